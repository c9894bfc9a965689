"""Benchmarks: `python -m bench.core.micro` for this machine, `python -m bench.core.compare` beside the peers.

An installed kvblocks, compiled perhaps, is what gets measured; the checkout's only where none is installed. `python -m`
puts the checkout first on the path, so it is moved to the end here, before anything imports kvblocks.
"""

import sys
from pathlib import Path

_CHECKOUT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if entry not in ("", _CHECKOUT)] + [_CHECKOUT]
