"""Benchmarks: `python -m bench.core.micro` times this machine, `python -m bench.core.compare` adds the peers.

Benches measure the installed kvblocks, which may be compiled, or else the checkout's. `python -m` puts the checkout
first on the path, so it is moved to the end here, before anything imports kvblocks.

An installed wheel has some of them as kvblocks/bench, for `kvblocks bench`.
"""

import sys
from pathlib import Path

_PARENT = Path(__file__).resolve().parent.parent
if not (_PARENT / "manager.py").is_file():  # a checkout
    sys.path[:] = [entry for entry in sys.path if entry not in ("", str(_PARENT))] + [str(_PARENT)]
