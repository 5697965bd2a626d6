"""Admits viewers by host name and token, and adds the headers that confine the page."""

import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Says who may look."""

    token: str | None = None
    """The secret that a viewer must know; None: none is needed."""
    hosts: Sequence[str] | None = None
    """Names in the Host header that are served, such as localhost, with any port; None: all.

    A page of another site whose name was made to lead here ("DNS rebinding") has that name in the header.
    """
    cookie: str = "atoll_watch"
    """Name of the cookie that holds the token: browsers share cookies between the ports of a host."""

    def knows_token(self, given: str | None) -> bool:
        """Returns whether a text is the token; compares in constant time."""
        return self.token is None or hmac.compare_digest((given or "").encode(), self.token.encode())


class Guard:
    """Wraps an ASGI app: answers only GET, only to those who are admitted, and always with `HEADERS`."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, as ASGI has it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return

        async def confined(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(scope)
        await (self._app if refused is None else refused)(scope, receive, confined)

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns the answer to a request that is not admitted; None if it is."""
        headers, admission = Headers(scope=scope), self._admission
        if admission.hosts is not None and _host(headers) not in admission.hosts:
            words = f"This page is served to {', '.join(admission.hosts)} only."
            return PlainTextResponse(f"421: {words}\n", 421)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        told = query.pop("token", [None])[0]
        known = admission.knows_token(told) or any(map(admission.knows_token, _tokens(headers, admission.cookie)))
        if not known:
            said = {"www-authenticate": "Bearer"}
            return PlainTextResponse("401: use the address with the token that `atoll watch` printed.\n", 401, said)
        if headers.get("sec-fetch-site") == "cross-site" and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("403: only the page itself may ask for its parts.\n", 403)
        if scope["method"] != "GET":
            return PlainTextResponse("405: only GET is served.\n", 405, {"allow": "GET"})
        if told is not None and admission.token is not None and admission.knows_token(told):
            return self._remember(scope["path"], urlencode(query, doseq=True))
        return None

    def _remember(self, path: str, query: str) -> Response:
        """Returns an answer that keeps the token in a cookie, so that it leaves the address."""
        assert self._admission.token is not None
        answer = RedirectResponse("/" + path.lstrip("/\\") + (f"?{query}" if query else ""), 303)
        answer.set_cookie(self._admission.cookie, self._admission.token, httponly=True, samesite="strict", path="/")
        return answer


def _host(headers: Headers) -> str:
    """Returns the Host header without its port, in lower case."""
    host = headers.get("host", "").lower()
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


def _tokens(headers: Headers, cookie: str) -> list[str]:
    """Returns the tokens that a request's headers hold."""
    scheme, _, credentials = headers.get("authorization", "").partition(" ")
    found = [credentials.strip()] if scheme.lower() == "bearer" else []
    try:
        jar = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return found
    return found + ([jar[cookie].value] if cookie in jar else [])
