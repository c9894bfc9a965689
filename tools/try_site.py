"""Check the site that `make docs` built: `python tools/try_site.py [--browser]`.

Each link, script, style and image of each page must lead to a file of the site, and to an existing heading. Nothing may
be loaded from elsewhere. With --browser, a Chromium searches the site as files and from a server below a path, and must
get answers without requests to anybody else. That needs the environment of the tests, chromium and chromedriver.
"""

import argparse
import shutil
import sys
import tempfile
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
QUERY = "session gate"
ANSWERS = "return document.querySelectorAll('.md-search-result__item a').length"
SEARCH = """
document.getElementById('__search').click();
const field = document.querySelector('.md-search__input');
field.focus();
field.value = arguments[0];
field.dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}));
"""


class Page(HTMLParser):
    """One page: the ids that links may name, and what it links to and loads."""

    def __init__(self, path: Path) -> None:
        """Read a page."""
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag's ids and targets."""
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") in {"stylesheet", "icon", "preload"}:
            self.loads.append(values["href"])
        elif tag in {"script", "img", "iframe", "source"}:
            self.loads += [values[name] for name in ("src", "srcset") if name in values]


def faults(site: Path) -> list[str]:
    """Return the faults of the pages of `site`, one line each."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        found += [f"{name}: {target}: expected a file of the site" for target in page.loads if urlsplit(target).scheme]
        for target in page.links + page.loads:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not file.is_file() or not file.is_relative_to(site.resolve()):
                found.append(f"{name}: {target}: expected a file, got none")
            elif parts.fragment and file in pages and unquote(parts.fragment) not in pages[file].ids:
                found.append(f"{name}: {target}: expected a heading, got none")
    return found


def search(address: str, own: str) -> list[str]:
    """Search the site at `address` in a browser, and return the faults. All requests must begin with `own`."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from browser import browser

    with browser() as window:
        window.requested()
        window.open(f"{address}/design/wire.html")
        window.run(SEARCH, QUERY)
        count = window.wait_for(ANSWERS, seconds=60)
        first = window.run("return document.querySelector('.md-search-result__item a').href")
        others = {url for url in window.requested() if not url.startswith((own, "data:", "blob:", "about:"))}
        said = [message for message in window.said() if "favicon" not in message]
    print(f"{address}: {count} answers for {QUERY!r}, the first is {first.rsplit('/', 1)[1].partition('?')[0]}")
    wrong = [f"{address}: {url}: expected no request to elsewhere" for url in sorted(others)]
    wrong += [f"{address}: the console says {message}" for message in said]
    return (
        wrong if "gate.html" in first else [*wrong, f"{address}: expected gate.html as the first answer, got {first}"]
    )


def in_browser(site: Path) -> list[str]:
    """Search the site as files, and from a server below a path. Returns the faults."""
    found = search(site.as_uri(), site.as_uri())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(site, Path(folder) / "below" / "kvblocks")
        handler = partial(Quiet, directory=folder)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/below/kvblocks"
            found += search(address, address)
            server.shutdown()
    return found


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def main() -> int:
    """Check the site."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--browser", action="store_true", help="search it in a Chromium too")
    asked = parser.parse_args()
    if not SITE.is_dir():
        parser.error(f"expected the site in {SITE}, got none: run `make docs`")
    found = faults(SITE)
    if asked.browser:
        found += in_browser(SITE)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
