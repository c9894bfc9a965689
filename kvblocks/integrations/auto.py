"""`KVBLOCKS_AUTO=mlx_lm`: switches on an integration without a line of code.

    python -m kvblocks.integrations.auto enable

writes one file, kvblocks_auto.pth, beside the installed packages of this interpreter. From then on, each start of the
interpreter reads the environment variable KVBLOCKS_AUTO. It may name integrations, separated by commas. Each is
installed as soon as its engine's module is imported. Without the variable nothing happens. `disable` removes the file.

An engine that the integration doesn't support stays as it is, with a warning. mini-sglang chooses caches by name, so
there the name is added in each process, and `--cache-type kvblocks` chooses it. vLLM needs no such file: it loads
plug-ins in all of its processes, and `vllm_plugin`, which is one, reads the variable.
"""

import os
import sys
import sysconfig
import warnings
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "KVBLOCKS_AUTO"
# By name: the module of the engine whose import it waits for.
INTEGRATIONS = {
    "mini_sglang": "minisgl.kvcache",
    "mlx_lm": "mlx_lm.models.cache",
    "nano_vllm": "nanovllm.engine.scheduler",
    "transformers": "transformers.generation.continuous_batching.continuous_api",
}
KNOWN = (*INTEGRATIONS, "vllm")
_FILE = "kvblocks_auto.pth"
_LINE = (
    f"import os; os.environ.get({VARIABLE!r}) and __import__('kvblocks.integrations.auto').integrations.auto.start()\n"
)


class _Installing(Loader):
    """Loads a module as its own loader does, and then calls `install`."""

    def __init__(self, loader: Loader, name: str) -> None:
        self._loader = loader
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # what importlib.resources and others ask of it

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader; then install. A failure is a warning.

        A program that has imported the integration itself is left alone: it has a line of its own.
        """
        self._loader.exec_module(module)
        if f"kvblocks.integrations.{self._name}" in sys.modules:
            return
        try:
            install(self._name)
        except Exception as error:  # noqa: BLE001  # the engine goes on without us, whatever it is
            warnings.warn(f"{VARIABLE}: {self._name} was not installed: {error}", stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds the engines' modules by the other finders, and wraps their loaders."""

    def __init__(self, awaited: dict[str, str]) -> None:
        self._awaited = awaited

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for a module that is waited for, None for all others."""
        integration = self._awaited.pop(name, None)
        if integration is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Installing(spec.loader, integration)
                return spec
        return None


def install(name: str) -> None:
    """Call the `install` of an integration with its defaults, or its `register`. Raises what that raises."""
    if name == "mini_sglang":
        from kvblocks.integrations import mini_sglang

        mini_sglang.register()
    elif name == "mlx_lm":
        from kvblocks.integrations import mlx_lm

        mlx_lm.install()
    elif name == "nano_vllm":
        from kvblocks.integrations import nano_vllm

        nano_vllm.install()
    else:
        from kvblocks.integrations import transformers

        transformers.install()


def wanted() -> list[str]:
    """Return the names of integrations in the environment variable."""
    return [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]


def start() -> None:
    """Prepare to install the wanted integrations when their engines are imported. Warns of an unknown name."""
    names = wanted()
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        warnings.warn(f"{VARIABLE}: expected some of {', '.join(KNOWN)}, got {', '.join(unknown)}", stacklevel=2)
    awaited = {INTEGRATIONS[name]: name for name in names if name in INTEGRATIONS}
    if awaited:
        sys.meta_path.insert(0, _Finder(awaited))


def main(arguments: list[str]) -> int:
    """Write or remove the file. Returns the exit status."""
    path = Path(sysconfig.get_path("purelib")) / _FILE
    if arguments == ["enable"]:
        path.write_text(_LINE, encoding="utf-8")
        print(f"{path}: written. {VARIABLE}=… now takes effect, with: {', '.join(KNOWN)}")  # noqa: T201
    elif arguments == ["disable"]:
        path.unlink(missing_ok=True)
        print(f"{path}: removed, or not there")  # noqa: T201
    else:
        got = " ".join(arguments) or "neither"
        print(f"kvblocks: expected python -m kvblocks.integrations.auto enable, or disable; got {got}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
