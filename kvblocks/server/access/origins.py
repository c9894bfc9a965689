"""Which web pages may use the server from a browser (CORS). None, unless their origins are named.

A browser lets a page of another origin read an answer, or send JSON, only if the server names the page's origin. Names
must match exactly; there is no wildcard, and cookies aren't accepted. A page still needs a key if clients do.
"""

import re

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from kvblocks.server.errors import ApiError
from kvblocks.server.wire import error_response

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")
_DEFAULT_PORTS = (("http://", ":80"), ("https://", ":443"))


def is_origin(text: str) -> bool:
    """Whether a text is an origin as browsers send it: scheme://host[:port] in lower case, without a default port."""
    is_default = any(text.startswith(scheme) and text.endswith(port) for scheme, port in _DEFAULT_PORTS)
    return _ORIGIN.fullmatch(text) is not None and not is_default


class Origins(CORSMiddleware):
    """ASGI middleware that lets pages of these origins send requests and read answers.

    It also answers their preflights. It comes before the gate, since a preflight has no key, and a page should be able
    to read errors, too.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        super().__init__(
            app,
            allow_origins=origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),  # OpenAI's client for JavaScript sends a dozen of its own
            allow_private_network=True,  # a page on the internet, a server at home
            expose_headers=("x-request-id", "retry-after", "x-should-retry"),
        )

    def preflight_response(self, request_headers: Headers) -> Response:
        """Answer a browser that asks whether a page may send a request.

        If it may not, the answer is an error in JSON.
        """
        response = super().preflight_response(request_headers)
        if response.status_code == 200:
            return response
        message = f"expected an --allowed-origin and one of GET, POST, DELETE, got {request_headers['origin']!a:.80}"
        return error_response(ApiError(403, message, code="origin_not_allowed"), "")
