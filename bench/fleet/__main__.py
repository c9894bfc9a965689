"""`python -m bench.fleet`."""

import sys

from bench.fleet.fleet import main

sys.exit(main())
