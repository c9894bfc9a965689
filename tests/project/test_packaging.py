"""What users install: the wheel, the source distribution, the editable install, and the pinned versions."""

import ast
import email
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvblocks

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINNED_EXTRAS = ("engine", "server", "bench", "replay", "test", "dev")
PINNED_BY_TORCH = ("cuda-", "nvidia-", "triton")  # what a CUDA build of torch brings, in versions of its own choice
UNSHIPPED = ("__pycache__", "*.pyc", "*.so", "*.pyd", "*.egg-info")


def run_python(*arguments: str, cwd: Path) -> str:
    """Run this interpreter and return what it printed; a failure shows both streams."""
    # A compiled build has its own tests; here the source's packaging is the subject.
    environment = {name: value for name, value in os.environ.items() if name != "KVBLOCKS_COMPILE"}
    command = [sys.executable, *arguments]
    result = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=150)
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def build(source: Path, kind: str, destination: Path) -> Path:
    """Build a "wheel" or "sdist" with the installed build tools, so without a network."""
    pytest.importorskip("build", reason="needs the extra kvblocks[dev]")
    run_python("-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(destination), cwd=source)
    (made,) = destination.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def test_one_function_says_how_to_install_and_names_extras_that_exist():
    named, elsewhere = set(), set()
    for path in (ROOT / "kvblocks").rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if "pip_install" not in source and "kvblocks[" not in source:
            continue
        nodes = list(ast.walk(ast.parse(source)))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "pip_install":
                named |= set(ast.literal_eval(node.args[0]).split(","))
            if (
                isinstance(node, ast.Constant)
                and id(node) not in docstrings
                and "install 'kvblocks[" in str(node.value)
            ):
                elsewhere.add(path.name)
    assert {"engine", "server", "wire", "valkey", "structured", "gpu"} <= named
    assert named <= set(PYPROJECT["project"]["optional-dependencies"])
    assert elsewhere == {"arguments.py"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the sources: a build leaves folders behind, and would ship what an older one left."""
    destination = tmp_path_factory.mktemp("checkout") / "kvblocks"
    ignored = shutil.ignore_patterns(".git", ".venv*", "build", "dist", ".*_cache", ".hypothesis", *UNSHIPPED)
    shutil.copytree(ROOT, destination, symlinks=True, ignore=ignored)
    return destination


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> dict[str, bytes]:
    """The files of the wheel built from the sources, by name."""
    return read_wheel(build(checkout, "wheel", tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def metadata(wheel) -> Message:
    """The wheel's METADATA."""
    return email.message_from_bytes(wheel[f"kvblocks-{kvblocks.__version__}.dist-info/METADATA"])


def read_wheel(path: Path) -> dict[str, bytes]:
    """The files of a wheel, by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def expected_files() -> set[str]:
    """Every file of the two source folders, at the path where the wheel should have it, and those of some benches."""
    files = {
        f"kvblocks/{path.relative_to(ROOT).as_posix()}"
        for folder in ("bench", "bench/core", "bench/serving")
        for path in (ROOT / folder).glob("*.py")
    }
    for folder, package in (("kvblocks", "kvblocks"), ("kernels", "kvblocks/kernels")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts and path.suffix not in {".pyc", ".so", ".pyd"}:
                files.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return files


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    shipped = {name for name in wheel if ".dist-info/" not in name}
    # A folder or data file missing here is missing from [tool.setuptools] in pyproject.toml.
    assert shipped == expected_files()
    assert {name.partition("/")[0] for name in shipped} == {"kvblocks"}
    assert {"kvblocks/__init__.py", "kvblocks/py.typed", "kvblocks/kernels/__init__.py"} <= shipped


def test_the_wheel_carries_the_licence(wheel, metadata):
    licence = wheel[f"kvblocks-{kvblocks.__version__}.dist-info/licenses/LICENSE"]
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"


def test_the_wheels_description_is_the_readme_with_links_that_work_anywhere(metadata):
    repository = PYPROJECT["project"]["urls"]["Repository"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description = metadata.get_payload()
    links = re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", description)
    assert len(links) == len(re.findall(r"\]\(", readme)) > 20
    html = re.findall(r"(src)(?:set)?=\"([^\"]+)\"", description)
    assert len(html) == len(re.findall(r"\bsrc(?:set)?=", readme)) == 2
    links += html
    for image, link in links:
        kind = "raw" if image else "blob"
        if link.startswith(repository):
            path = link.removeprefix(f"{repository}/{kind}/v{kvblocks.__version__}/").partition("#")[0]
            assert (ROOT / path).is_file(), link
        else:
            assert re.match(r"https?://|#", link), link
    assert metadata["Description-Content-Type"] == "text/markdown"


def test_the_version_is_the_changelogs_newest_and_its_platforms_are_those_that_are_promised():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.MULTILINE)[0]
    assert newest == kvblocks.__version__
    promised = {name.split()[-1] for name in PYPROJECT["project"]["classifiers"] if ":: 3." in name}
    built = {f"{tag[2]}.{tag[3:].partition('-')[0]}" for tag in PYPROJECT["tool"]["cibuildwheel"]["build"]}
    assert built == promised


def test_the_wheel_says_what_it_needs(metadata):
    assert metadata["Name"] == "kvblocks"
    assert metadata["Version"] == kvblocks.__version__ == importlib.metadata.version("kvblocks")
    assert metadata["Requires-Python"] == ">=3.11"
    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    assert [requirement.name for requirement in requirements if requirement.marker is None] == ["xxhash"]
    extras = {
        "engine",
        "server",
        "structured",
        "wire",
        "valkey",
        "gpu",
        "fla",
        "mamba",
        "flash-attn",
        "flashinfer",
        "bench",
        "replay",
        "test",
        "docs",
        "dev",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == extras


def test_the_wheel_installs_the_command_and_the_plugin_for_vllm(wheel):
    entry_points = wheel[f"kvblocks-{kvblocks.__version__}.dist-info/entry_points.txt"].decode()
    plugin = ["[vllm.general_plugins]", "kvblocks", "=", "kvblocks.integrations.vllm_plugin:register"]
    assert entry_points.split() == ["[console_scripts]", "kvblocks", "=", "kvblocks.cli:main", *plugin]


def test_the_source_distribution_builds_the_same_wheel(checkout, wheel, tmp_path):
    with tarfile.open(build(checkout, "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"kvblocks-{kvblocks.__version__}"
    assert (unpacked / "tests" / "conftest.py").is_file()
    assert read_wheel(build(unpacked, "wheel", tmp_path)) == wheel


# Prints where kvblocks and its kernels come from when only `site_folder` and the installed requirements are importable:
# -S keeps this environment's own kvblocks away, and a plain sys.path entry does not run .pth files.
WHERE = """
import site, sys
site_folder, requirements = sys.argv[1:]
site.addsitedir(site_folder)
sys.path.append(requirements)
from importlib.util import find_spec
finders = len(sys.meta_path)
import kvblocks
print(len(sys.meta_path) - finders)
print(kvblocks.__version__, kvblocks.__file__, *find_spec("kvblocks.kernels").submodule_search_locations, sep="\\n")
"""


def where(site_folder: Path) -> list[str]:
    """What `import kvblocks` finds in `site_folder`.

    How many finders it puts into `sys.meta_path`, the version, the file of kvblocks, the folder of kvblocks.kernels.
    """
    requirements = sysconfig.get_path("purelib")
    return run_python("-I", "-S", "-c", WHERE, str(site_folder), requirements, cwd=site_folder).splitlines()


def test_an_installed_wheel_is_importable(wheel, tmp_path):
    for name, content in wheel.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    package = tmp_path / "kvblocks"
    assert where(tmp_path) == ["0", kvblocks.__version__, str(package / "__init__.py"), str(package / "kernels")]


# Runs a module as `python -m` does where a checkout comes first, then an installed wheel, then what that requires.
BESIDE = """
import runpy, sys
site_folder, requirements, module, *arguments = sys.argv[1:]
sys.path[:0] = [""]
sys.path += [site_folder, requirements]
sys.argv[1:] = arguments
import kvblocks.kernels
print(kvblocks.__file__, kvblocks.kernels.__file__, sep="\\n", flush=True)
if module == "kvblocks":  # what `serve` and `demo` load first
    import kvblocks.engine.demo.demo, kvblocks.server.run
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("arguments", [("kvblocks", "--version"), ("bench.serving", "--help")])
def test_a_checkout_that_is_first_on_the_path_of_a_plain_installation_has_its_own_kernels(
    checkout, wheel, tmp_path, arguments
):
    for module in ("torch", "starlette", "uvicorn"):
        pytest.importorskip(module, reason="needs the extra kvblocks[engine,server]")
    for name, content in wheel.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    requirements = sysconfig.get_path("purelib")
    said = run_python("-I", "-S", "-c", BESIDE, str(tmp_path), requirements, *arguments, cwd=checkout).splitlines()
    assert said[:2] == [
        str(checkout / "kvblocks" / "__init__.py"),
        str(checkout / "kvblocks" / "kernels" / "__init__.py"),
    ]
    assert said[2:]


# Runs `kvblocks` with a command line, where the modules named first can't be imported.
WITHOUT = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
refused = {*sys.argv[1].split(",")}
sys.meta_path.insert(0, Refused())
from kvblocks.cli import main
main(sys.argv[2:])
"""


def test_the_extra_replay_is_enough_to_replay(tmp_path):
    wanted = [Requirement(line).name for line in PYPROJECT["project"]["optional-dependencies"]["replay"]]
    needed, waiting = {"kvblocks", "xxhash"}, [*wanted]
    while waiting:
        name = canonicalize_name(waiting.pop())
        needed.add(name)
        needs = [Requirement(line) for line in importlib.metadata.requires(name) or []]
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    owners = importlib.metadata.packages_distributions()
    pytest.importorskip("torch", reason="needs the extra kvblocks[engine]")
    refused = {module for module, names in owners.items() if not {canonicalize_name(name) for name in names} & needed}
    assert {"torch", "tokenizers", "starlette"} <= refused
    assert not {"numpy", "rich", "typer"} & refused
    sample = ROOT / "kvblocks" / "replay" / "sample.jsonl.gz"
    rows = tmp_path / "rows.json"
    replayed = ["replay", str(sample), "--sizes", "2%", "--policies", "lru", "--quick", "--json", str(rows)]
    run_python("-c", WITHOUT, ",".join(sorted(refused)), *replayed, cwd=ROOT)
    assert rows.is_file()


# Runs `kvblocks` with a command line, as installed in the folder named first, above the folder with what it requires.
INSTALLED = """
import sys
site_folder, requirements, *arguments = sys.argv[1:]
sys.path += [site_folder, requirements]
from kvblocks.cli import main
import kvblocks
assert kvblocks.__file__.startswith(site_folder), kvblocks.__file__
main(arguments)
"""


@pytest.mark.parametrize("which", ["micro", "prefix-cache"])
def test_an_installed_wheel_has_benches(wheel, tmp_path, which):
    for name, content in wheel.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    command = ["-I", "-S", "-c", INSTALLED, str(tmp_path), sysconfig.get_path("purelib"), "bench", which, "--quick"]
    said = run_python(*command, cwd=tmp_path)
    assert "# source: installed" in said
    assert len(said.splitlines()) > 20


@pytest.mark.parametrize("has_link", [True, False])
def test_an_editable_install_finds_the_kernels_in_their_folder(checkout, tmp_path, has_link):
    """Without the link too: a source distribution has none, and Git for Windows may write a text file in its place."""
    source = tmp_path / "source"
    shutil.copytree(checkout, source, symlinks=True)
    package = source / "kvblocks"
    if not has_link:
        (package / "kernels").unlink()
        (package / "kernels").write_text("../kernels")
    hook = "import sys; from setuptools.build_meta import build_editable; build_editable(sys.argv[1])"
    run_python("-c", hook, str(tmp_path), cwd=source)
    (made,) = tmp_path.glob("*.whl")
    site_folder = tmp_path / "site"
    with zipfile.ZipFile(made) as archive:
        archive.extractall(site_folder)
    kernels = package / "kernels" if has_link else source / "kernels"
    assert where(site_folder) == ["0", kvblocks.__version__, str(package / "__init__.py"), str(kernels)]


def read_constraints() -> dict[str, str]:
    """The pinned version of each package; a line that is not `name==version` fails."""
    pins = {}
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9._-]+)==([0-9][0-9a-z.]*)", line)
            assert match is not None, f"expected name==version, got {line!r}"
            pins[canonicalize_name(match[1])] = match[2]
    return pins


def test_every_requirement_is_pinned_and_the_pins_are_installed():
    pins = read_constraints()
    project = PYPROJECT["project"]
    extras = [line for extra in PINNED_EXTRAS for line in project["optional-dependencies"][extra]]
    waiting = [Requirement(line) for line in [*project["dependencies"], *extras]]
    reached: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert name in pins, f"{name} is not pinned in constraints.txt"
        assert requirement.specifier.contains(pins[name], prereleases=True), f"{requirement} is pinned to {pins[name]}"
        if name in reached:
            continue
        reached.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed: needs the extras {', '.join(PINNED_EXTRAS)}")
        for line in needs:
            need = Requirement(line)
            needed = need.marker is None or need.marker.evaluate({"extra": ""})
            if needed and not (name == "torch" and need.name.startswith(PINNED_BY_TORCH)):
                waiting.append(need)
    assert pins["torch"] == "2.13.0"
