"""The items of a session, the most valuable first: the first ten minutes should go to these.

On an H200 all but `hybrids`, `sanitizer` and `sweep` took 8 minutes.
"""

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from bench.attention.kernel_keys import fix_keys
from bench.gpu_session.cases import Case, run_cases
from bench.gpu_session.results import Results
from bench.gpu_session.session import CANNOT, Item

PARTS = {"smoke": 12, "hybrids": 4}
"""How many processes run at a time for items that compile a lot."""
TEST_PROCESSES = ("4", "12")
"""The numbers of processes of the engine's tests and of the kernels' tests."""
_TEST_TIMEOUT_S = 120
FIRST = "facts"
"""The item that every session runs, and begins with."""
OWN = (FIRST, "smoke", "engine", "hybrids")
"""Items that are modules of this folder: each has `cases`."""
SANITIZED = tuple(
    f"tests/kernels/test_{name}.py"
    for name in ("store", "decode", "extend", "prefix_decode", "copy", "states", "rows", "draw")
)
"""Test files to run under compute-sanitizer, without torch's caching allocator, so it knows all tensors' bounds."""
UNSANITIZED = ("graph", "captured", "128k", "random")
"""Parts of the names of tests to leave out there: nothing may be allocated in a capture, and long ones take minutes."""
_NONE_OF_THEM = " and ".join(f"not {name}" for name in UNSANITIZED)

NO_GPU = f"""bench.gpu_session: expected a GPU that torch can use, got none.
`--rehearse` runs {", ".join(OWN)} once on the CPU, tiny, in Triton's interpreter."""


def items(*, is_rehearsal: bool = False) -> list[Item]:
    """Return all items, or those that need no GPU."""
    if is_rehearsal:
        return [_own(name, 600, is_rehearsal=True) for name in OWN]
    tests = tuple(f"tests/engine/run/test_{name}.py" for name in ("engine_gpu", "decode_step", "ragged_step"))
    kernels = ("-n", TEST_PROCESSES[1], "tests/kernels", "--ignore=tests/kernels/test_aot.py")
    return [
        _own(FIRST, 60),
        _own("engine", 190, case_limit_s=90),
        _tests("tests-engine", 100, "-n", TEST_PROCESSES[0], *tests),
        _tests("tests-kernels", 400, *kernels, "-m", "not slow and not exhaustive"),
        _bench("bench-attention", 240, "bench.attention", "--no-peers", "attention.json"),
        _own("smoke", 150),
        _own("hybrids", 240, case_limit_s=200),  # compiling Kimi's kernels for prompts took two minutes
        _tests("tests-more", 400, *kernels, "-m", "not slow and exhaustive"),
        _bench("bench-engine", 300, "bench.attention.engine_gpu", "engine-gpu.json"),
        Item(
            "sanitizer",
            600,
            (
                *("compute-sanitizer", "--target-processes", "all", "--error-exitcode", "9"),
                *_pytest("-m", "not slow and not exhaustive", "-k", _NONE_OF_THEM, *SANITIZED),
            ),
            least_s=60,
            case_limit_s=600,
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        ),
        _bench("sweep", 3600, "bench.attention.sweep_kernels", "sweep.json", overwrites=False),
    ]


def run_item(name: str, results: Results, part: int, *, is_rehearsal: bool) -> int:
    """Run an item of this folder in this process. Return the exit status."""
    import torch

    if not is_rehearsal and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return CANNOT
    torch.set_num_threads(1 if is_rehearsal else 4)
    fix_keys()
    make: Callable[..., Iterator[Case]] = import_module(f"bench.gpu_session.{name}").cases
    all_cases = list(make(is_rehearsal=is_rehearsal))
    num_parts = 1 if is_rehearsal else PARTS.get(name, 1)
    return run_cases(name, all_cases[part::num_parts], results, part)


def _own(name: str, limit_s: float, *, case_limit_s: float = 60, is_rehearsal: bool = False) -> Item:
    command = ("-m", "bench.gpu_session", "--out", "{out}", "--item", name, "--part", "{part}")
    more = ("--rehearse",) * is_rehearsal
    environment = _environment(is_rehearsal=is_rehearsal)
    return Item(
        name,
        limit_s,
        (sys.executable, *command, *more),
        case_limit_s=600 if is_rehearsal else case_limit_s,
        parts=1 if is_rehearsal else PARTS.get(name, 1),
        is_needed=name == FIRST,
        is_repeated=name == FIRST,
        environment=environment,
    )


def _pytest(*arguments: str) -> tuple[str, ...]:
    """A run of tests. A worker that hangs is ended by the timeout's thread, and replaced by xdist.

    Warnings aren't errors here: other versions of packages warn of other things. A file that can't be imported doesn't
    keep the others from running.
    """
    return (
        *(sys.executable, "-m", "pytest", "-q", "-p", "bench.gpu_session.pytest_recorder", "-p", "no:cacheprovider"),
        *("-m", "not slow", "-W", "default", "--timeout", str(_TEST_TIMEOUT_S), "--timeout-method", "thread"),
        "--continue-on-collection-errors",
        *arguments,
    )


def _tests(name: str, limit_s: float, *arguments: str) -> Item:
    command = _pytest("--max-worker-restart", "1000", *arguments)
    # Longer than a test's own limit, which xdist enforces without losing the other tests.
    return Item(name, limit_s, command, least_s=20, case_limit_s=600, environment=_environment(is_rehearsal=False))


def _bench(name: str, limit_s: float, module: str, *arguments: str, overwrites: bool = True) -> Item:
    """A bench that writes a file. overwrites: whether it begins the file anew, instead of adding what isn't there."""
    *options, file = arguments
    command = (sys.executable, "-m", module, *options, "--json", str(Path("{out}") / file))
    environment = _environment(is_rehearsal=False)
    return Item(name, limit_s, command, least_s=30, overwrites=file if overwrites else None, environment=environment)


def _environment(*, is_rehearsal: bool) -> dict[str, str]:
    return {"TRITON_INTERPRET": "1" if is_rehearsal else "0"}
