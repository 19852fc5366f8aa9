"""`python -m penstock` is the `penstock` command, and this is where it begins."""

import sys

from penstock.engine.ahead import ENGINE_AHEAD, is_worth_it


def main() -> int:
    """Run the command, while an engine process, where it wants one, imports what that needs."""
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


if __name__ == "__main__":
    sys.exit(main())
