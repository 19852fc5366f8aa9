"""`python -m penstock` is the `penstock` command, and this is where it begins."""

import os
import sys

from penstock.engine.ahead import ENGINE_AHEAD, is_worth_it


def main() -> int:
    """Run the command, while an engine process, where it wants one, imports what that needs."""
    _open_closed_streams()
    try:
        if is_worth_it(sys.argv[1:]):
            ENGINE_AHEAD.begin()
        # Here, for it takes half a second and more.
        from penstock.cli import main as run_command

        return run_command()
    except KeyboardInterrupt:  # while that was imported
        return 130
    finally:
        ENGINE_AHEAD.close()


def _open_closed_streams() -> None:
    """Have standard streams that were closed before us read and write nothing, here and in processes we start.

    Else the next descriptors to be opened would have their numbers, and child processes take those for streams.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, which is the stream's
            os.set_inheritable(nowhere, True)
            setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8", closefd=False))


if __name__ == "__main__":
    sys.exit(main())
