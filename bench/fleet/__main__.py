"""`python -m bench.fleet`."""

from bench.fleet.fleet import main

main()
