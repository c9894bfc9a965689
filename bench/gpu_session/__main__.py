"""Use a GPU that is lent for minutes: `python -m bench.gpu_session --out DIR --minutes 9.3`.

It runs from a checkout with PYTHONPATH=$PWD, with the installed torch and triton: no venv, no pip, no network, no
weights. Each result is in DIR/results.jsonl at once, and what the processes print is in DIR/log.txt. It ends in time.
`--resume` continues what an earlier session has left, perhaps on another machine. `facts` runs in every session, so the
lines after it belong to the machine that it names.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.gpu_session.items import FIRST, NO_GPU, OWN, items, run_item
from bench.gpu_session.results import Results
from bench.gpu_session.session import CANNOT, Item, Session

STARTED = time.monotonic()


def main(arguments: list[str] | None = None) -> int:
    """Run and return the exit status: 0 if everything is done and right, 2 if nothing can run, else 1."""
    parser = argparse.ArgumentParser(prog="bench.gpu_session", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder for results.jsonl, log.txt and JSON")
    parser.add_argument("--minutes", type=minutes, default=9.3, help="end after so many minutes (default: %(default)s)")
    parser.add_argument(
        "--items", default="", help="only these, separated by commas, of: " + ", ".join(_names(items()))
    )
    parser.add_argument("--resume", action="store_true", help="continue the session in that folder")
    parser.add_argument("--cache", type=Path, help="a file of kernels that bench.gpu_session.ahead has compiled")
    parser.add_argument(
        "--rehearse", action="store_true", help=f"run {', '.join(OWN)}, with tiny shapes, without a GPU"
    )
    parser.add_argument("--item", choices=OWN, help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    results = Results(given.out.resolve() / "results.jsonl")
    if given.item:
        return run_item(given.item, results, given.part, is_rehearsal=given.rehearse)
    known = items(is_rehearsal=given.rehearse)
    wanted = given.items.split(",") if given.items else _names(known)
    unknown = [name for name in wanted if name not in _names(known)]
    if unknown:
        parser.error(f"--items: expected some of {', '.join(_names(known))}, got {unknown[0]}")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        if results.path.exists() and not given.resume:
            parser.error(f"--out: expected a folder without results, or --resume, got {given.out}")
        status = _run(given, [item for item in known if item.name in (FIRST, *wanted)])
    except OSError as error:
        parser.error(f"--out: expected a folder that can be written, got {given.out}: {error}")
    if status == CANNOT:
        print(NO_GPU, file=sys.stderr)
    for line in results.bad_cases():
        print(f"{line['item']}, {line['case']}: {line['state']}: {line.get('error', line.get('why', ''))}")
    return status


def _run(given: argparse.Namespace, wanted: list[Item]) -> int:
    """Run items, with the kernels of `--cache`. Raises OSError if a result can't be written."""
    with ExitStack() as stack:
        if given.cache is not None:
            from bench.gpu_session.ahead import unpack

            # Not in the folder of results, which may be carried back, and only with few files.
            temporary = tempfile.TemporaryDirectory(prefix="kvblocks-triton-", ignore_cleanup_errors=True)
            folder = stack.enter_context(temporary)
            if unpack(given.cache, Path(folder)):
                os.environ["TRITON_CACHE_DIR"] = folder
        session = Session(given.out.resolve(), 60 * given.minutes - (time.monotonic() - STARTED))
        return session.run(wanted)


def minutes(text: str) -> float:
    """Read the option. Its name is what argparse says."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of minutes above 0, got {text}")
    return number


def _names(known: list[Item]) -> list[str]:
    return [item.name for item in known]


if __name__ == "__main__":
    sys.exit(main())
