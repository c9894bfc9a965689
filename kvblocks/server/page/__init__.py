"""The page at `/`, for a person with a browser: what is served, how full the cache is, and how to send requests.

The page is one static file: the server puts nothing into it, so there is nothing to escape. Its script requests /health
and /metrics, which name no tenant, and /v1/models, for which it asks for a key if the server needs one. Its content
security policy allows only its own script and style, by their digests, and requests to this server.
"""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_PAGE = files(__name__).joinpath("page.html").read_bytes()


def _digests(tag: str) -> str:
    """The digest of a tag's content, as a content security policy names it."""
    found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), _PAGE, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part).digest()).decode()}'" for part in found)


POLICY = (
    f"default-src 'none'; script-src {_digests('script')}; style-src {_digests('style')}; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def show_page(request: Request) -> Response:
    """The page."""
    del request
    return Response(_PAGE, headers=_HEADERS, media_type="text/html; charset=utf-8")
