"""`penstock serve` with the faulty engine, and with little patience when that stands still.

`python -m tests.faults.faulty_server serve MODEL --name value …`
"""

import sys

from penstock.commands.serve import run
from penstock.config import gather
from penstock.server.engine_watch import Patience

PATIENCE = Patience(still_seconds=3.0, step_seconds=5.0)

if __name__ == "__main__":
    words, given = sys.argv[2:], {}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            given[word.removeprefix("--").replace("-", "_")] = words.pop(0)
        else:
            given["model"] = word
    sys.exit(run(gather(given, environ={}), engine_module="tests.faults.faulty_engine", patience=PATIENCE))
