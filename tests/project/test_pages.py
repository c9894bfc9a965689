"""The pages: their links lead somewhere, and pages that sources name exist."""

import re
from collections import Counter
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DESIGN = sorted((DOCS / "design").rglob("*.md"))
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "bench").glob("*.md")])
FOLDERS = ("kvblocks", "kernels", "tests", "bench", "examples", "tools")
SOURCES = [*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))]
NAMED = re.compile(r"\bdocs/[\w/-]+\.md(?:#[\w-]+)?")
"""A page as sources name it."""

FILE = re.compile(r"`([\w/]+\.py)`")
"""A source as the design names it: the end of its path."""

ELSEWHERE = {"docs/gguf.md"}  # ggml's


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def anchor_of(heading: str) -> str:
    """The anchor that GitHub gives a heading: lower case, without punctuation, hyphens for blanks."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read(text: str) -> tuple[set[str], list[str]]:
    """A page's anchors and its links, images included."""
    tokens = MarkdownIt("commonmark").enable("table").parse(text)
    anchors, links, seen = set(), [], Counter()
    for i, token in enumerate(tokens):
        if token.type == "inline":
            links += [str(child.attrs["href"]) for child in token.children if child.type == "link_open"]
            links += [str(child.attrs["src"]) for child in token.children if child.type == "image"]
        if token.type == "html_block":
            links += re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", token.content)
        if token.type == "heading_open":
            inside = tokens[i + 1].children
            anchor = anchor_of("".join(child.content for child in inside if child.type in {"text", "code_inline"}))
            anchors.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
            seen[anchor] += 1
    return anchors, links


@cache
def page(path: Path) -> tuple[set[str], list[str]]:
    return read(path.read_text(encoding="utf-8"))


def fault(link: str, source: Path) -> str | None:
    """What is wrong with a link of the file `source`; None if nothing is, or if it leads to another site."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (source.parent / unquote(parts.path)).resolve() if parts.path else source
    if not target.exists():
        return f"{link}: expected a file, got none"
    if parts.fragment and parts.fragment not in page(target)[0]:
        return f"{link}: expected a heading of {name_of(target)}, got none"
    return None


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    faults = [wrong for link in page(path)[1] if (wrong := fault(link, path))]
    assert not faults, f"{name_of(path)}: {faults}"


def test_pages_that_sources_name_are_there():
    faults = [
        f"{name_of(path)}: {wrong}"
        for path in SOURCES
        if path != Path(__file__)
        for link in NAMED.findall(path.read_text(encoding="utf-8"))
        if link not in ELSEWHERE and (wrong := fault(link, ROOT / "README.md"))
    ]
    assert not faults


def test_files_that_the_design_and_the_glossary_name_are_there():
    files = [f"/{name_of(path)}" for path in SOURCES]
    faults = [
        f"{name_of(path)}: {name}"
        for path in [DOCS / "design.md", DOCS / "glossary.md", *DESIGN]
        for name in FILE.findall(path.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert not faults


def test_the_first_page_of_the_design_lists_the_others():
    listed = {(DOCS / link).resolve() for link in page(DOCS / "design.md")[1]}
    assert [name_of(path) for path in DESIGN if path not in listed] == []
    assert len(DESIGN) > 20


def test_what_leads_nowhere_is_found():
    readme = ROOT / "README.md"
    assert fault("docs/design.md#the-shape", readme) is None
    assert fault("https://example.org/docs/nowhere.md", readme) is None
    assert "expected a file" in fault("docs/nowhere.md", readme)
    assert "expected a heading" in fault("docs/design.md#nowhere", readme)
    assert "expected a heading" in fault("#nowhere", readme)
    assert read('# `kvblocks`, *too*: a\n\n# B\n\n[x](y.md#z) ![](p.png)\n\n## B\n\n<p>\n<img src="q.svg">\n') == (
        {"kvblocks-too-a", "b", "b-1"},
        ["y.md#z", "p.png", "q.svg"],
    )
    assert FILE.findall("`core/pool.py`, `setup` and `x.py`") == ["core/pool.py", "x.py"]
    assert NAMED.findall("see docs/design.md, and docs/policies.md#sessions.") == [
        "docs/design.md",
        "docs/policies.md#sessions",
    ]
