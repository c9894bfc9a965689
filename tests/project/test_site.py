"""The site's navigation and links: what `make docs` builds, without building it."""

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from api_pages import api_pages, public_names  # noqa: E402  # tools is no package
from browser import MISSING, browser  # noqa: E402
from links import relink  # noqa: E402
from try_site import faults  # noqa: E402

import kvblocks  # noqa: E402


@pytest.fixture(scope="module")
def pages():
    return api_pages(ROOT / "kvblocks")


def test_every_public_name_stands_on_the_first_page_of_the_reference(pages):
    _, text = pages["api/kvblocks.md"]
    assert set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)) == set(kvblocks.__all__) - {"__compiled__"}


def test_every_module_with_public_names_is_on_one_page(pages):
    shown = re.findall(r"^::: (\S+)$", "".join(text for _, text in pages.values()), flags=re.MULTILINE)
    assert len(shown) == len(set(shown)) > 150
    assert {"kvblocks.manager", "kvblocks.core.block", "kvblocks.engine.engine", "kvblocks.wire.mirror"} <= set(shown)
    assert not [name for name in shown if name.startswith("kvblocks.cli")]


def test_every_guide_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w/-]+\.md", nav))
    guides = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert guides <= listed, "expected each page of docs/ in the nav of mkdocs.yml"
    folders = {path.parent.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*/*.md")}
    assert {f"{folder}/*" for folder in folders} <= set(re.findall(r"[\w/]+/\*", nav))


def test_links_change_outside_of_code_alone():
    text = "[a](x.md) `[b](x.md)` ![c](y.svg)\n\n    [d](x.md)\n\n```\n[e](x.md)\n```\n[![f](z.svg)](x.md)\n"
    changed = relink(text, lambda target: f"<{target}>")
    assert changed == text.replace("[a](x.md)", "[a](<x.md>)").replace("(y.svg)", "(<y.svg>)").replace(
        ")](x.md)", ")](<x.md>)"
    )
    assert relink("a [b\nc](x.md) `[d\n](x.md)`\n", lambda _: "y") == "a [b\nc](y) `[d\n](x.md)`\n"
    assert relink("[a]\n\n(x.md)\n", lambda _: "y") == "[a]\n\n(x.md)\n"


def test_the_sites_packages_are_those_that_the_extra_asks_for():
    pinned = dict(
        line.split("==")
        for line in (ROOT / "docs" / "requirements.txt").read_text(encoding="utf-8").split()
        if "==" in line
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {re.split("[<>=]", wanted)[0] for wanted in extras["docs"]} <= set(pinned)
    assert callable(public_names)


def test_what_a_page_of_the_site_lacks_is_found(tmp_path):
    (tmp_path / "a.html").write_text('<h1 id="a">A</h1><a href="b.html#b"></a><a href="#a"></a><img src="c.svg">')
    (tmp_path / "b.html").write_text('<h1 id="b">B</h1><a href="https://example.org"></a>')
    (tmp_path / "c.svg").touch()
    assert faults(tmp_path) == []
    (tmp_path / "b.html").write_text('<a href="../x.html"></a><script src="https://example.org/x.js"></script>')
    (tmp_path / "c.svg").unlink()
    assert faults(tmp_path) == [
        "a.html: b.html#b: expected a heading, got none",
        "a.html: c.svg: expected a file, got none",
        "b.html: https://example.org/x.js: expected a file of the site",
        "b.html: ../x.html: expected a file, got none",
    ]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_a_page_that_is_a_file_has_a_worker(tmp_path):
    shutil.copy(ROOT / "docs" / "iframe-worker.js", tmp_path)
    (tmp_path / "worker.js").write_text("addEventListener('message', event => postMessage(event.data + 1))")
    page = tmp_path / "page.html"
    page.write_text(
        """<script src="iframe-worker.js"></script><body><script>
        const worker = new Worker(new URL("worker.js", location));
        worker.addEventListener("message", event => document.title = event.data);
        worker.postMessage(1)</script>"""
    )
    with browser() as window:
        window.open(page.as_uri())
        assert window.wait_for("return document.title", seconds=60) == "2"
