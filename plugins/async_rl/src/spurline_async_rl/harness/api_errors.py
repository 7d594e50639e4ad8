"""Errors as OpenAI's API says them: a status and a JSON object with message, type, param and code."""

from __future__ import annotations

from aiohttp import web

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A request is refused or failed.

    param: the field of the request it is about. code: for programs. retry: whether the same request may be right a
    little later; clients obey.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, retry: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry = retry

    def response(self) -> web.Response:
        """As it is sent."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        # OpenAI's clients repeat requests after 408, 429 and 5xx of their own accord, unless this header forbids it.
        headers = {"x-should-retry": "true" if self.retry else "false"}
        return web.json_response({"error": error}, status=self.status, headers=headers)
