"""Middleware for every request: host, origin and token checks, security headers, unexpected errors, metrics."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from patchloom.serve.metrics import Metrics
from patchloom.serve.settings import Settings, host_name

_log = logging.getLogger("patchloom.serve")

SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
# Closing a connection with unread bytes resets it. A client that sends everything before it reads would see the reset
# in place of the response. 128 MB is more than a photo of any camera, and nginx waits 5 s, too.
_LINGER_BYTES, _LINGER_SECONDS = 128_000_000, 5


class Guard:
    """ASGI middleware around the whole application.

    Checks come before the application, so that a refused request costs no reading and no parsing.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self.settings = settings
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        begun = time.perf_counter()
        refusal = self._refusal(scope, Headers(scope=scope))
        try:
            await (refusal or self.app)(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # happens only at the end of the process
            self.metrics.unanswered += 1
            raise
        except Exception:
            # The details go to the log only: messages of exceptions may contain paths or data.
            _log.exception("Internal error in a %s request", scope["method"])
            if exchange.status is None:
                await error_response(500, "Internal server error.")(scope, exchange.receive, exchange.send)
        finally:
            # The route's pattern, not the path: clients could otherwise create any number of metrics.
            route = getattr(scope.get("route"), "path", "other")
            # 499, as in nginx: the client left before it got a response.
            self.metrics.request(route, exchange.status or 499, time.perf_counter() - begun)

    def _refusal(self, scope: Scope, headers: Headers) -> JSONResponse | None:
        # A page of another site can point its own name at 127.0.0.1 (DNS rebinding): only known names are served.
        if not self.settings.knows_host(host_name(headers.get("host", ""))):
            return error_response(400, "This server does not accept this host name. Allow it with --allow-host.")
        # A browser sends simple forms across sites without asking: they could use up the server.
        if scope["method"] == "POST" and _is_cross_site(headers):
            return error_response(403, "Requests from pages of other sites are not allowed.")
        private = scope["path"].startswith("/api/") or scope["path"] in ("/metrics", "/version")
        if private and not self._has_token(headers):
            return error_response(401, "A bearer token is required.", {"www-authenticate": "Bearer"})
        return None

    def _has_token(self, headers: Headers) -> bool:
        if self.settings.token is None:
            return True
        kind, _, token = headers.get("authorization", "").partition(" ")
        # In constant time, so that the time of a refusal says nothing about the token.
        same = hmac.compare_digest(token.strip().encode("latin-1", "replace"), self.settings.token.encode())
        return kind.lower() == "bearer" and same


class _Exchange:
    """One request and its response: records the status and adds headers.

    If a request is refused while the client is still sending, the response is sent at once and the connection is
    closed. Most clients read the response only after sending everything, so a limited amount is read and discarded
    before closing.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        headers = Headers(scope=scope)
        self._unread = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        self._expects_continue = "expect" in headers  # the client waits before it sends the body
        self.status: int | None = None

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "http.request" or not message.get("more_body"):
            self._unread = False
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            if self._unread:
                headers["connection"] = "close"
            for name, value in SECURITY.items():
                headers.setdefault(name, value)
        elif self._unread and not message.get("more_body") and not self._expects_continue and self.status != 408:
            await self._send({**message, "more_body": True})  # the whole response; its end closes the connection
            await self._linger()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _linger(self) -> None:
        """Read and discard the rest of the body, up to the limits above."""

        async def read() -> None:
            total = 0
            while self._unread and total < _LINGER_BYTES:
                total += len((await self.receive()).get("body", b""))

        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(read(), _LINGER_SECONDS)


def error_response(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """The response {"error": text}."""
    return JSONResponse({"error": text}, status, headers)


def _is_cross_site(headers: Headers) -> bool:
    """Whether a browser marks the request as sent by a page of another site; other clients send neither header."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site") == "cross-site"
    scheme, _, place = origin.lower().partition("://")
    default = {"http": ":80", "https": ":443"}.get(scheme, "")
    same = place.removesuffix(default) == headers.get("host", "").lower().removesuffix(default)
    return not (place and same) or headers.get("sec-fetch-site") == "cross-site"
