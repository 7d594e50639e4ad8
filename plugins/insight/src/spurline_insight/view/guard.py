"""Show the page only to a browser that has the token, and whose request names a host in `HOSTS`.

The guard is an ASGI application that wraps another application. The address of the first visit contains the token. The
guard sets a cookie, and redirects the browser to the same address without the token. Later requests need only the
cookie. The headers of every answer forbid scripts and styles from other addresses, frames, and access by other sites.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HOSTS = ("127.0.0.1", "localhost")
"""Host names in requests that the guard allows. Other names may point to this machine too (DNS rebinding)."""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Guard:
    """An application that forwards requests with the cookie to `app`. The name of the cookie contains `port`."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._cookie = f"spurline_view_{port}"
        self.one_visit = secrets.token_urlsafe(24)
        """A token that is valid for one visit. The browser is started with this token, because other users of the
        machine can read the command line of the browser."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", scope["type"]

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refusal(Request(scope))
        await (answer or self._app)(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        if request.headers.get("host", "").rpartition(":")[0] not in HOSTS:
            return PlainTextResponse("This page is served only to this machine.", 400)
        query = parse_qs(request.url.query)
        given = query.pop("token", [""])[0]
        if given and self._is_let_in(given):
            rest = urlencode(query, doseq=True)
            answer = RedirectResponse("/" + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return answer
        if _same(request.cookies.get(self._cookie, ""), self._token):
            return None
        return PlainTextResponse("Open the address that `spurline view` has printed. It contains the token.", 403)

    def _is_let_in(self, given: str) -> bool:
        if _same(given, self.one_visit):
            self.one_visit = secrets.token_urlsafe(24)
            return True
        return _same(given, self._token)


def _same(given: str, expected: str) -> bool:
    """Compare in constant time."""
    return secrets.compare_digest(given.encode(errors="replace"), expected.encode())
