"""`python -m kvblocks.wire`: see `kvblocks.wire.tail`."""

import sys


def main() -> int:
    """Run the command. If a package is missing, say what to install."""
    try:
        from kvblocks.wire.tail import main as run
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
