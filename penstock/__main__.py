"""`python -m penstock` is the `penstock` command."""

import sys

from penstock.cli import main

sys.exit(main())
