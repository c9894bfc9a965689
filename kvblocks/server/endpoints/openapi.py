"""A description of the endpoints in OpenAPI, for tools and for the page at /docs."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvblocks import __version__
from kvblocks.server.access.gate import Audience, audience_of
from kvblocks.server.wire import json_response

Json = dict[str, Any]

_ABOUT = "The fields of bodies are described in docs/server.md. Errors have a JSON body, too."
_PARAMETER = re.compile(r"{(\w+)(?::path)?}")


class OpenApi:
    """The description of the routes, with the texts of the endpoints' docstrings."""

    def __init__(self, routes: Sequence[Route]) -> None:
        paths: dict[str, Json] = {}
        for route in routes:
            for method in sorted((route.methods or set()) - {"HEAD"}):
                path = _PARAMETER.sub(r"{\1}", route.path)
                paths.setdefault(path, {})[method.lower()] = _operation(route, method, path)
        scheme = {"type": "http", "scheme": "bearer", "description": "Where the server has keys."}
        self.document: Json = {
            "openapi": "3.1.0",
            "info": {"title": "kvblocks", "version": __version__, "description": _ABOUT},
            "paths": dict(sorted(paths.items())),
            "components": {"securitySchemes": {"key": scheme}},
        }

    async def show(self, request: Request) -> Response:
        """The description of all endpoints, in OpenAPI."""
        del request
        return json_response(self.document)


def _operation(route: Route, method: str, path: str) -> Json:
    lines = (inspect.getdoc(route.endpoint) or "").partition("\n\n")
    names = _PARAMETER.findall(route.path)
    found: Json = {
        "operationId": f"{method.lower()}{re.sub('[^A-Za-z0-9]+', '_', path).rstrip('_')}",
        "summary": " ".join(lines[0].split()).rstrip("."),
        "responses": {"200": {"description": "The answer."}, "default": {"description": "An error, in JSON."}},
    }
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if method == "POST":
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    if audience_of(path) in {Audience.CLIENTS, Audience.OPERATORS}:
        found["security"] = [{"key": []}]
    return found
