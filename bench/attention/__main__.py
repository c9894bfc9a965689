"""`python -m bench.attention`."""

import sys

from bench.attention.attention import main

sys.exit(main())
