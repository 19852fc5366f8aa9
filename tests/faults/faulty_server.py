"""`penstock serve` with the faulty engine: `python -m tests.faults.faulty_server serve MODEL --name value …`."""

import sys

from penstock.commands.serve import run
from penstock.config import gather

if __name__ == "__main__":
    words, given = sys.argv[2:], {}
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            given[word.removeprefix("--").replace("-", "_")] = words.pop(0)
        else:
            given["model"] = word
    sys.exit(run(gather(given, environ={}), engine_module="tests.faults.faulty_engine"))
