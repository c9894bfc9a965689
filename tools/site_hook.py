"""The hook of mkdocs.yml: adds pages from outside of docs/, the API reference, and links between all pages.

`make docs` runs it. A new guide is one line in the `nav` of mkdocs.yml. There `DIR/*` stands for all pages of a folder,
and `api/*` for the pages that are made here from the sources.
"""

import posixpath
import re
import runpy
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from api_pages import api_pages  # noqa: E402  # a hook is no package
from links import relink  # noqa: E402

log = get_plugin_logger("kvblocks")

OUTSIDE = {
    "index.md": "README.md",
    "benches.md": "bench/README.md",
    "benches-traces.md": "bench/traces.md",
    "benches-engines.md": "bench/engines.md",
    "benches-tiers.md": "bench/tiers.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
"""Pages of the site that are files outside of docs/."""

SOURCES = ROOT / "build" / "docs-sources"
"""The package as it ships, the link to kernels/ followed: the API reference is read from here."""

PICTURE = re.compile(r"<picture>.*?<img alt=\"([^\"]*)\" src=\"([^\"]*)\">.*?</picture>", re.DOTALL)
"""A picture with two files, between which GitHub's theme chooses. On the site the picture itself follows the theme."""

UNRENDERED = re.compile(r"<p>[^<]*\n *(?:[-*] |\d+\. |\|)|```")
"""Markdown that GitHub renders and Python-Markdown doesn't: a list or table without a blank line before it, a fence."""


def on_startup(**_: Any) -> None:
    """Copy the sources, before mkdocstrings looks for them."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd")
    shutil.copytree(ROOT / "kvblocks", SOURCES / "kvblocks", ignore=ignored)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the nav, take the address from pyproject.toml, and append the version to the name on all pages."""
    config.site_name += f" {version()}"
    config.extra["repository"] = repository()
    config.extra["social"] = [{"icon": "fontawesome/brands/git-alt", "link": repository(), "name": "sources"}]
    config.nav = [expanded(item, Path(config.docs_dir)) for item in config.nav or []]
    return config


def repository() -> str:
    """Return the address of the project."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def version() -> str:
    """Return the version that the site describes: a release, or the state after the last one."""
    number = runpy.run_path(str(ROOT / "kvblocks" / "version.py"))["__version__"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## ")[0].strip()
    return f"after {number}" if unreleased else number


def expanded(item: Any, docs: Path) -> Any:
    """Return an item of the nav with each `folder/*` replaced by the folder's pages."""
    if isinstance(item, dict):
        return {title: expanded(inside, docs) for title, inside in item.items()}
    if isinstance(item, list):
        return [page for inside in item for page in _pages(inside, docs)]
    return item


def _pages(item: Any, docs: Path) -> list[Any]:
    if isinstance(item, str) and item.endswith("/*"):
        if item == "api/*":
            return [{title: path} for path, (title, _) in api_pages(SOURCES / "kvblocks").items()]
        return [path.relative_to(docs).as_posix() for path in sorted((docs / item[:-2]).glob("*.md"))]
    return [expanded(item, docs)]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    made = {path: (ROOT / source).read_text(encoding="utf-8") for path, source in OUTSIDE.items()}
    made |= {path: text for path, (_, text) in api_pages(SOURCES / "kvblocks").items()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Make the links of a page lead to pages of the site, or to files in the repository."""
    path = page.file.src_uri
    if path.startswith("api/"):
        return markdown
    source = OUTSIDE.get(path, f"docs/{path}")
    markdown = PICTURE.sub(r"![\1](\2)", markdown)
    return relink(markdown, lambda target: site_link(target, source, path, config.extra["repository"]))


def site_link(target: str, source: str, page: str, address: str) -> str:
    """Return the replacement of the link `target` of the file `source` in `page`, which is made from that file."""
    parts = urlsplit(target)
    if parts.scheme or not parts.path:
        return target
    named = posixpath.normpath(posixpath.join(posixpath.dirname(source), parts.path))
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    inside = {outside: made for made, outside in OUTSIDE.items()}.get(named)
    if inside is None and named.startswith("docs/") and (ROOT / named).is_file():
        inside = named.removeprefix("docs/")
    if inside is not None:
        return posixpath.relpath(inside, posixpath.dirname(page) or ".") + fragment
    if not (ROOT / named).exists():
        log.warning("%s: %s: expected a file, got none", source, target)
    return f"{address}/{'tree' if (ROOT / named).is_dir() else 'blob'}/main/{named}{fragment}"


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Remove the sitemap and the error page if the site's address isn't known, since they would be wrong."""
    if not config.site_url:
        for name in ("404.html", "sitemap.xml", "sitemap.xml.gz"):
            (Path(config.site_dir) / name).unlink(missing_ok=True)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Warn of Markdown that was not rendered."""
    text = re.sub(r"<pre.*?</pre>|<code.*?</code>", "", html, flags=re.DOTALL)
    for match in UNRENDERED.finditer(text):
        log.warning("%s: not rendered: %r", page.file.src_uri, match[0][-80:])
    return html
