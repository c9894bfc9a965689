"""`python -m bench.serving`."""

import sys

from bench.serving.serving import main

sys.exit(main())
