"""`python -m kvblocks` is the `kvblocks` command."""

from kvblocks.cli.app import main

if __name__ == "__main__":
    main()
