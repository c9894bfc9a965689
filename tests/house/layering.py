"""The checker behind test_layering.py: where each folder stands, and what it may import.

A module stands where FLOORS says of it, or of the innermost folder that it lies in. An import may go to a lower floor,
or sideways on its own floor and inside its own folder if no circle comes of it. Imports count wherever they stand: in
a function, under TYPE_CHECKING, or as `importlib.import_module("...")`.
"""

import ast
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

FLOORS = {
    "kvblocks.version": 0,
    "kvblocks.errors": 0,
    "kvblocks.arguments": 0,
    "kvblocks.closed": 0,
    "kvblocks.events": 0,
    "kvblocks.stats": 0,
    "kvblocks.hashing": 1,  # digests and extra keys; knows nothing of the core
    "kvblocks.core": 2,
    "kvblocks.retention": 3,
    "kvblocks.retention.policies": 1,  # know nothing of the core, as a user's don't
    "kvblocks.groups": 4,
    "kvblocks.core.kinds": 1,  # what an engine says of its layers; knows nothing of the core
    "kvblocks.groups.states": 3,  # what pools, tables and lookups of groups need of states
    "kvblocks.states": 5,  # extends the slots of groups
    "kvblocks.prefix_cache": 6,
    "kvblocks.observe": 5,
    "kvblocks.tiers": 4,
    "kvblocks.tiers.grouped": 5,
    "kvblocks.manager": 6,
    "kvblocks.observe.metrics": 7,  # watches a manager, and nothing that a manager imports
    "kvblocks.metrics": 8,  # the path by which people import it
    "kvblocks": 8,  # the public names, imported when asked for
    "kvblocks.gate": 9,  # lets sessions take turns; touches no block
    "kvblocks.integrations.probing": 9,  # what the integrations' probes share
    "kvblocks.integrations.vllm.probe": 10,
    "kvblocks.integrations.vllm.disk": 11,  # a tier of vLLM's, which does input and output in threads of its own
    "kvblocks.integrations": 12,  # inside other engines, which have environments of their own
    "kvblocks.integrations.auto": 13,  # loaded by an interpreter that was told to, and imports what is asked for
    "kvblocks.integrations.vllm_plugin": 13,  # loaded by every vLLM, and imports the integration when that is chosen
    "kvblocks.kernels": 10,  # the floor K: beside the engine, reached through a few doors
    "kvblocks.kernels.device": 9,  # the kernels themselves
    "kvblocks.wire": 9,  # beside the engine: others' formats, and their transport
    "kvblocks.tiers.disk": 9,  # input and output, but no package that the core does without
    "kvblocks.replay.arrays": 10,  # the manager's decisions for whole prompts; knows nothing of traces
    "kvblocks.replay": 11,  # traces through the public manager; no engine
    "kvblocks.replay.served": 12,  # the same on a server that takes time
    "kvblocks.verify": 9,  # random walks over any block manager
    "kvblocks.verify.server": 10,  # a client of any server
    "kvblocks.verify.adapters": 10,  # each imports its engine, and ours only by its public names
    "kvblocks.replay.report": 13,  # shows what a replay found
    "kvblocks.tiers.store": 10,  # input and output, and one package in one module, imported when a store is opened
    "kvblocks.engine.errors": 8,
    "kvblocks.engine.collector": 9,
    "kvblocks.engine.sampling": 10,
    "kvblocks.engine.schedule": 10,
    "kvblocks.engine.text": 10,
    "kvblocks.engine.model.gguf": 9,
    "kvblocks.engine.model": 10,
    "kvblocks.engine.model.hybrid": 9,  # layers as functions of tensors; knows nothing of models
    "kvblocks.engine.grammar": 11,
    "kvblocks.engine.attention": 11,
    "kvblocks.engine.run": 12,
    "kvblocks.engine.tiers": 13,
    "kvblocks.engine": 14,
    "kvblocks.engine.demo": 15,
    "kvblocks.server.errors": 14,
    "kvblocks.server.wire": 15,
    "kvblocks.server.kept": 15,  # knows nothing of what it keeps
    "kvblocks.server.body": 16,
    "kvblocks.server.body.fields": 15,
    "kvblocks.server.body.parsing": 15,  # bodies are parsed where they are bounded, too
    "kvblocks.server.page": 16,
    "kvblocks.server.access": 16,
    "kvblocks.server.answers": 16,
    "kvblocks.server.tools": 16,
    "kvblocks.server.misses": 16,
    "kvblocks.server.pins": 16,
    "kvblocks.server": 17,
    "kvblocks.server.endpoints": 18,
    "kvblocks.server.protocols": 18,
    "kvblocks.server.app": 19,
    "kvblocks.server.run": 19,
    "kvblocks.cli.replay": 19,
    "kvblocks.cli.shown": 19,
    "kvblocks.cli": 20,
    "kvblocks.__main__": 21,
}
TOP_CORE_FLOOR = 8

KERNELS = "kvblocks.kernels"
# Those modules of the engine that turn its objects into the tensors that kernels take; nothing else may know a kernel.
KERNELS_DOORS = frozenset(
    f"kvblocks.engine.{name}"
    for name in (
        *("attention.attention", "attention.triton_attention", "attention.flash_attention", "attention.cascade"),
        *("attention.latents", "run.backends"),  # the latter chooses what draws tokens, which takes tensors as it is
    )
)

CORE_PACKAGES = frozenset({"xxhash"})
KERNEL_PACKAGES = frozenset({"torch", "triton"})
ENGINE_PACKAGES = frozenset(
    {"torch", "numpy", "safetensors", "tokenizers", "jinja2", "gguf", "filelock", "rich", "typer", "prometheus_client"}
    | {"flash_attn", "flashinfer", "fla", "mamba_ssm", "xxhash", "llguidance"}
)
SERVER = "kvblocks.server"
SERVER_PACKAGES = ENGINE_PACKAGES | {
    "starlette",
    "uvicorn",
    "httptools",
    "httpx2",
}  # the engine itself knows nothing of HTTP
CLI = "kvblocks.cli"
REPLAY = "kvblocks.replay"
REPLAY_PACKAGES = CORE_PACKAGES | {"numpy"}
DISK = "kvblocks.tiers.disk"
VLLM_DISK = "kvblocks.integrations.vllm.disk"
MLX_LM = "kvblocks.integrations.mlx_lm"  # has a disk, and a server's start
AUTO = "kvblocks.integrations.auto"
STORE = "kvblocks.tiers.store"
STORE_DOOR = "kvblocks.tiers.store.client"  # the module that speaks to a server; the others have rules alone
VLLM_HASHES = "kvblocks.hashing.vllm"  # imported when a manager is to have vLLM's hashes; its seed is a setting
WIRE = "kvblocks.wire"
WIRE_PACKAGES = CORE_PACKAGES | {"msgspec", "cbor2"}
# The modules of the wire that have sockets, threads or settings; the others do no input or output, like the core.
WIRE_DOORS = frozenset(f"kvblocks.wire.{name}" for name in ("publisher", "client", "tail", "__main__"))
VERIFY_SERVER = "kvblocks.verify.server"
VERIFY_ADAPTERS = "kvblocks.verify.adapters"
VERIFIED_PACKAGES = frozenset({"vllm", "sglang", "nanovllm", "mlx", "mlx_lm", "torch"})
INTEGRATIONS = "kvblocks.integrations"
INTEGRATION_PACKAGES = frozenset({"vllm", "transformers", "nanovllm", "minisgl", "torch"})
MLX_PACKAGES = frozenset({"mlx", "mlx_lm", "numpy", "huggingface_hub"})  # the others are what mlx-lm itself needs
GATE = "kvblocks.gate"  # counts tokens and knows no block, so any engine may use it
# These packages use kvblocks as any engine would: beside their own modules they import public names only, from here.
USERS = (INTEGRATIONS, GATE)
FACADE = frozenset({"kvblocks", "kvblocks.arguments", "kvblocks.tiers.disk", "kvblocks.gate", "kvblocks.hashing.vllm"})

# The core and the kernels do no input or output, and take time, seeds and settings as arguments.
FORBIDDEN_STDLIB = frozenset(
    {
        *("asyncio", "concurrent", "multiprocessing", "queue", "sched", "selectors", "signal", "threading", "_thread"),
        *("calendar", "datetime", "time", "timeit", "zoneinfo"),
        *("random", "secrets", "uuid"),
        *("fcntl", "fileinput", "glob", "io", "mmap", "os", "pathlib", "shelve", "shutil", "sqlite3", "tempfile"),
        *(
            "ftplib",
            "http",
            "imaplib",
            "poplib",
            "select",
            "smtplib",
            "socket",
            "socketserver",
            "ssl",
            "urllib",
            "xmlrpc",
        ),
        *("ctypes", "importlib", "pickle", "pkgutil", "runpy", "site", "subprocess", "webbrowser"),
        *("getpass", "locale", "logging", "platform", "pwd", "resource", "syslog", "termios", "tty"),
    }
)

# "module" -> a package of the forbidden ones that it may import all the same, and why.
PERMITTED_STDLIB = {
    "kvblocks.integrations.vllm.scheduler": "time",  # inside vLLM, whose clock it gives to the session gate
    "kvblocks.retention.policies.check": "random",  # histories that a seed decides, for tests
    "kvblocks": "importlib",  # its names are imported when they are first asked for
    "kvblocks.wire": "importlib",  # likewise
    "kvblocks.prefix_cache.cache": "threading",  # a lock is what makes it safe to share; it starts no thread
}


@dataclass(frozen=True)
class Import:
    """One import of `target`, a dotted name, at `line` of its module."""

    target: str
    line: int


def floor_of(module: str) -> int | None:
    """The floor that `module` stands on, or None if the table doesn't list it, or a folder of its below kvblocks."""
    name = module
    while name not in FLOORS:
        name = name.rpartition(".")[0]
        if name in ("", "kvblocks"):  # what lies at the top is listed by itself
            return None
    return FLOORS[name]


def is_inside(module: str, folder: str) -> bool:
    """Whether `module` is the package `folder` or anything in it."""
    return module == folder or module.startswith(folder + ".")


def folder_of(module: str, packages: Collection[str]) -> str:
    """The folder that a module of kvblocks lies in; a folder's __init__ lies in it too."""
    return module if module in packages else module.rpartition(".")[0]


def find_imports(module: str, source: str, known: Mapping[str, object], *, is_package: bool) -> list[Import]:
    """Every import in `source`, resolved: `from a import b` means a.b where that is a module in `known`, else a."""
    found: list[Import] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + is_package
                base = ".".join([*parents[:keep], *([base] if base else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                found.append(Import(submodule if submodule in known else base, node.lineno))
        elif isinstance(node, ast.Call) and re.search(r"(^|\.)(import_module|__import__)$", ast.unparse(node.func)):
            argument = node.args[0] if node.args else None
            constant = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            found.append(Import(str(argument.value) if constant else "<computed>", node.lineno))
    return found


def allowed_packages(module: str) -> frozenset[str]:
    """The packages outside the standard library that `module` may import."""
    if is_inside(module, KERNELS):
        return KERNEL_PACKAGES
    if is_inside(module, SERVER) or is_inside(module, CLI) or is_inside(module, VERIFY_SERVER):
        return SERVER_PACKAGES
    if is_inside(module, MLX_LM):
        return MLX_PACKAGES
    if is_inside(module, INTEGRATIONS):
        return INTEGRATION_PACKAGES
    if is_inside(module, VERIFY_ADAPTERS):
        return VERIFIED_PACKAGES
    if module == STORE_DOOR:
        return CORE_PACKAGES | {"valkey"}
    if is_inside(module, GATE):
        return frozenset()
    if is_inside(module, DISK) or is_inside(module, STORE):
        return CORE_PACKAGES
    if is_inside(module, REPLAY):
        return REPLAY_PACKAGES
    if module == VLLM_HASHES:
        return CORE_PACKAGES | {"cbor2"}
    if is_inside(module, WIRE):
        return WIRE_PACKAGES | {"zmq"} if module in WIRE_DOORS else WIRE_PACKAGES
    floor = floor_of(module)
    return CORE_PACKAGES if floor is not None and floor <= TOP_CORE_FLOOR else ENGINE_PACKAGES


def check_inside(module: str, imported: Import, known: Mapping[str, object], packages: Collection[str]) -> str | None:
    """What is wrong with an import of one of our own modules, or None."""
    target = imported.target
    if target not in known:
        return f"imports {target}, which is not a module of this tree"
    if is_inside(target, SERVER) and is_inside(module, "kvblocks.engine"):
        return f"imports {target}: the engine knows nothing of its server"
    if is_inside(target, KERNELS) and not is_inside(module, KERNELS) and module not in KERNELS_DOORS:
        return f"imports {target}: only {', '.join(sorted(KERNELS_DOORS))} may import {KERNELS}"
    if is_inside(module, KERNELS) and not is_inside(target, KERNELS):
        return f"imports {target}: kernels take tensors, and import only torch, triton and each other"
    user = next((package for package in USERS if is_inside(module, package)), None)
    if user is not None and not is_inside(target, user) and target not in FACADE:
        return f"imports {target}: {user} uses the public names, {', '.join(sorted(FACADE))}"
    here, there = floor_of(module), floor_of(target)
    if here is None or there is None:
        return None  # check_imports reports the module without a floor
    if there > here:
        return f"imports {target}: expected a floor of at most {here}, got {there}"
    if there == here and folder_of(module, packages) != folder_of(target, packages):
        return f"imports {target}: sideways imports stay inside one folder"
    return None


def check_outside(module: str, imported: Import) -> str | None:
    """What is wrong with an import from outside kvblocks, or None."""
    package = imported.target.partition(".")[0]
    does_io = (
        module in WIRE_DOORS
        or module == VLLM_HASHES
        or any(is_inside(module, room) for room in (DISK, STORE, REPLAY, VLLM_DISK, MLX_LM, AUTO))
    )
    pure = not allowed_packages(module) >= ENGINE_PACKAGES and not does_io
    if imported.target == "<computed>" and module in ("kvblocks", WIRE):
        return None  # from a table that a test holds against imports under TYPE_CHECKING
    if imported.target == "<computed>":
        return "imports a computed name: expected a constant, so that this test can follow it"
    if package in sys.stdlib_module_names:
        return (
            f"imports {imported.target}: the core and the kernels do no I/O"
            if pure and package in FORBIDDEN_STDLIB and PERMITTED_STDLIB.get(module) != package
            else None
        )
    if package not in allowed_packages(module):
        return f"imports {imported.target}: expected the standard library or {sorted(allowed_packages(module))}"
    return None


def check_imports(sources: Mapping[str, str], packages: frozenset[str]) -> list[str]:
    """Every violation of the floors in `sources` (dotted name -> text); `packages` names those that are an __init__."""
    problems = []
    sideways: dict[str, set[str]] = {}
    for module, source in sorted(sources.items()):
        if floor_of(module) is None:
            problems.append(f"{module}: has no floor; add its folder to FLOORS in tests/house/layering.py")
        for imported in find_imports(module, source, sources, is_package=module in packages):
            ours = is_inside(imported.target, "kvblocks")
            problem = check_inside(module, imported, sources, packages) if ours else check_outside(module, imported)
            if problem is not None:
                problems.append(f"{module}:{imported.line}: {problem}")
            if ours:
                sideways.setdefault(module, set()).add(imported.target)
    try:
        TopologicalSorter(sideways).prepare()
    except CycleError as error:
        problems.append(f"imports go in a circle: {' -> '.join(reversed(error.args[1]))}")
    return problems
