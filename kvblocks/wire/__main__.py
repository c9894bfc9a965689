"""`python -m kvblocks.wire`: see `kvblocks.wire.tail`."""

import sys


def main() -> int:
    """Run the command; say what to install where a package is missing."""
    try:
        from kvblocks.wire.tail import main as run
    except ImportError as error:
        print(error, file=sys.stderr)
        return 1
    return run()


if __name__ == "__main__":
    sys.exit(main())
