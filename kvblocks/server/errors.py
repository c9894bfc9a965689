"""The errors that a client sees: a status, and a body in OpenAI's format, {"error": {message, type, param, code}}."""

from collections.abc import Mapping

from kvblocks.engine.errors import ForgetError, GrammarError, ModelError, RequestTooLongError
from kvblocks.errors import InvalidArgumentError, KVBlocksError, PinBudgetError, PoolExhaustedError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}

_ANTHROPICS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
MESSAGES = "/v1/messages"
"""Paths that begin with this get errors in Anthropic's format."""


class ApiError(KVBlocksError):
    """An error that a request gets instead of an answer.

    status: the HTTP status, even if a stream has begun and the error is its last event. param: the wrong field. code: a
    word that programs can act on. headers: further headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, object]:
        """Return the body of the response."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def to_anthropics(self) -> dict[str, object]:
        """Return the body of the response in Anthropic's format."""
        kind = _ANTHROPICS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def to_json_for(self, path: str) -> dict[str, object]:
        """Return the body of the response to a request for this path."""
        return self.to_anthropics() if path.startswith(MESSAGES) else self.to_json()


def as_api_error(error: BaseException, *, param: str | None = None) -> ApiError:
    """Return the error that a client sees: the client's mistakes in full, bugs without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, PinBudgetError):
        return ApiError(409, str(error), param=param, code="pin_budget")
    if isinstance(error, PoolExhaustedError):
        return ApiError(503, str(error), code="pool_exhausted", headers={"Retry-After": "5"})
    if isinstance(error, ForgetError):
        return ApiError(503, str(error), code="forget_incomplete")
    if isinstance(error, RequestTooLongError):
        return length_error(str(error), param)
    if isinstance(error, (InvalidArgumentError, ModelError)):
        return ApiError(400, str(error), param=param)
    return ApiError(500, f"expected an answer, got {type(error).__name__}: a bug; the server's log has more")


def step_error(error: Exception) -> ApiError:
    """Return the error that a client sees when the step that computed its request failed."""
    if isinstance(error, PoolExhaustedError):
        return as_api_error(error)
    if isinstance(error, GrammarError):
        return ApiError(400, str(error), code="grammar_too_complex")
    message = f"expected a step to succeed, got {type(error).__name__}: the server's log has more"
    return ApiError(500, message, code="step_failed", headers={"x-should-retry": "false"})


def stopping_error() -> ApiError:
    """The error for requests that are new or unfinished when the server stops."""
    return ApiError(503, "expected a running server, got one that is stopping", code="stopping")


def busy_error(message: str, code: str, retry_after_s: int) -> ApiError:
    """The error for a request that there is no room for now. OpenAI's clients retry by themselves."""
    return ApiError(429, message, code=code, headers={"Retry-After": str(retry_after_s)})


def length_error(message: str, param: str | None) -> ApiError:
    """The error for a prompt that doesn't fit into the model's context."""
    # litellm recognizes such errors by these words, not by the code.
    full = f"{message}, which is over this model's maximum context limit"
    return ApiError(400, full, param=param, code="context_length_exceeded")


def late_error(seconds: float) -> ApiError:
    """The error for a request that exceeded its time limit."""
    # OpenAI's clients would retry by themselves, and that would take as much time again.
    headers = {"x-should-retry": "false"}
    return ApiError(504, f"expected an answer within {seconds:g} s, got none: the time is over", headers=headers)
