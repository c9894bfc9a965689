"""The pages at `/` and `/docs` for a browser: what is served, how full the cache is, a chat, and the endpoints.

Each page is one static file: the server puts nothing into it, so there is nothing to escape. The scripts request
/health and /metrics, which name no tenant, /openapi.json, and what is below /v1, for which they ask for a key if the
server needs one. A content security policy allows only the page's own script and style, by their digests, and requests
to this server.
"""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


class Page:
    """A static page of HTML. policy: its content security policy."""

    def __init__(self, name: str) -> None:
        self._body = files(__name__).joinpath(name).read_bytes()
        self.policy = (
            f"default-src 'none'; script-src {self._digests('script')}; style-src {self._digests('style')};"
            " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def _digests(self, tag: str) -> str:
        """The digests of a tag's contents, as a content security policy names them."""
        found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), self._body, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'" for part in found)

    def show(self) -> Response:
        """The page as a response."""
        headers = {
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(self._body, headers=headers, media_type="text/html; charset=utf-8")


_PAGE, _DOCS = Page("page.html"), Page("docs.html")


async def show_page(request: Request) -> Response:
    """A page for a browser: what is served, how full the cache is, and a chat."""
    del request
    return _PAGE.show()


async def show_docs(request: Request) -> Response:
    """A page for a browser: the endpoints."""
    del request
    return _DOCS.show()
