"""Benchmarks: `python -m bench.core.micro` for this machine, `python -m bench.core.compare` beside the peers.

Benches measure the installed kvblocks, which may be compiled. If none is installed, they measure the checkout's.
`python -m` puts the checkout first on the path. So it is moved to the end here, before anything imports kvblocks.
"""

import sys
from pathlib import Path

_CHECKOUT = str(Path(__file__).resolve().parent.parent)
sys.path[:] = [entry for entry in sys.path if entry not in ("", _CHECKOUT)] + [_CHECKOUT]
