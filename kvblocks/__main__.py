"""`python -m kvblocks` is the `kvblocks` command."""

from kvblocks.cli import main

if __name__ == "__main__":
    main()
