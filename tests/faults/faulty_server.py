"""`penstock serve` with the faulty engine: `python -m tests.faults.faulty_server serve MODEL --name value …`."""

import sys

from penstock.commands.serve import run
from penstock.config import gather

if __name__ == "__main__":
    _, _, model, *flags = sys.argv
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    given = {"model": model, **dict(zip(names, flags[1::2], strict=True))}
    sys.exit(run(gather(given, environ={}), engine_module="tests.faults.faulty_engine"))
