"""Benchmarks: `python -m bench.core.micro` for this machine, `python -m bench.core.compare` beside the peers.

Benches measure the installed kvblocks, which may be compiled. If none is installed, they measure the checkout's.
`python -m` puts the checkout first on the path. So it is moved to the end here, before anything imports kvblocks.

An installed wheel has some of them as kvblocks/bench, for `kvblocks bench`.
"""

import sys
from pathlib import Path

_PARENT = Path(__file__).resolve().parent.parent
if not (_PARENT / "manager.py").is_file():  # a checkout
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(_PARENT))] + [str(_PARENT)]
