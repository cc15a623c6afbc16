"""Access control: API keys, host names, client addresses, and the headers of every reply."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Mapping

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pixelis.config import Config
from pixelis.protocol.errors import ApiError
from pixelis.serve.counters import Counters
from pixelis.serve.keys import Caller, Keys, key_file
from pixelis.serve.responses import api_error
from pixelis.telemetry import tracing

requests = logging.getLogger("pixelis.requests")
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""Set where a route sets no other: replies may not be framed, sniffed, cached, or read by another site."""


class Access:
    """Checks that need no look at the body. ``key_digest``: see ``Keys``."""

    def __init__(self, config: Config, key_digest: bytes | None):
        self.config, self.proxies = config, config.serve.proxies
        self.keys = Keys(key_file(config), key_digest, config.serve.api_key_env)
        self.salt = secrets.token_bytes(16)

    def authorise(self, key: str) -> Caller:
        """Raises ApiError 401 for an unknown or revoked key."""
        # Header bytes arrive as latin-1 text.
        caller = self.keys.caller(hashlib.sha256(key.strip().encode("latin-1", "replace")).digest())
        if caller is None:
            raise ApiError(401, "a valid API key is required: `Authorization: Bearer KEY`", "invalid_api_key")
        return caller

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError 403 if no key is required and the Host header does not name this machine.

        A web page on a name that resolves to 127.0.0.1 would otherwise have the service's origin.
        """
        if not self.keys.required and not is_local(headers.get("host", "")):
            message = "without an API key this service answers to localhost, 127.0.0.1 and [::1] only"
            raise ApiError(403, message, "host_not_allowed")

    def client_id(self, request: Request) -> str:
        """A salted hash of the caller's address; addresses of one IPv6 /64 network are one client.

        With ``serve.proxies`` = n it is the n-th last of X-Forwarded-For; the caller may invent those before
        it.
        """
        address = request.client.host if request.client is not None else ""
        forwarded = ",".join(request.headers.getlist("x-forwarded-for"))
        hops = [hop.strip() for hop in forwarded.split(",")]
        if 0 < self.proxies <= len(hops) and hops[-self.proxies]:
            address = hops[-self.proxies]
        elif not self.proxies and address in forwarded:
            # uvicorn believes callers on this machine: all that name an address are one client.
            address = "forwarded"
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            client = address[:100]
        else:
            client = str(ip)
            if isinstance(ip, ipaddress.IPv6Address):
                client = str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
        return hashlib.blake2b(client.encode(), key=self.salt, digest_size=8).hexdigest()


class Shield:
    """ASGI middleware: host check, security headers, request metrics, and 500 for unhandled exceptions."""

    def __init__(self, app: ASGIApp, access: Access, counters: Counters):
        self.app, self.access, self.counters = app, access, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if not scope["path"].startswith("/v1/"):
            await self._respond(scope, receive, send, {})
            return
        with tracing.span(scope["method"], Headers(scope=scope).get("traceparent")) as span:
            trace_id = tracing.trace_id()
            status = await self._respond(scope, receive, send, {"X-Trace-Id": trace_id} if trace_id else {})
            span.update_name(f"{scope['method']} {_route_label(scope)}")
            span.set_attribute("http.response.status_code", status)

    async def _respond(
        self, scope: Scope, receive: Receive, send: Send, more_headers: Mapping[str, str]
    ) -> int:
        """Pass the request on; returns the status of the reply, 0 without one."""
        started, status = time.monotonic(), 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                for name, value in {**scope.get("pixelis.headers", {}), **more_headers}.items():
                    headers[name] = value
            await send(message)

        try:
            self.access.check_host(Headers(scope=scope))
            await self.app(scope, receive, send_with_headers)
        except Exception as error:
            if status:  # the reply has begun
                raise
            await api_error(error).response()(scope, receive, send_with_headers)
        finally:
            seconds = time.monotonic() - started
            self.counters.request(_route_label(scope), status, seconds)
            if requests.isEnabledFor(logging.INFO) and scope["path"].startswith("/v1/"):
                # Neither contents nor query nor headers, which may hold secrets.
                fields = {"method": scope["method"], "route": _route_label(scope), "status": status}
                fields |= {"ms": round(1e3 * seconds, 1), "caller": scope.get("pixelis.caller", "")}
                requests.info("%(method)s %(route)s %(status)s", fields, extra={"fields": fields})
        return status


def is_local(host: str) -> bool:
    """Whether a Host header is localhost or a loopback address, with any port."""
    match = re.fullmatch(r"(?:\[([^\]]*)\]|([^:\[\]]*))(?::[0-9]*)?", host)
    return match is not None and is_loopback((match[1] or match[2] or "").lower().removesuffix("."))


def is_loopback(host: str) -> bool:
    """True for ``localhost`` and loopback addresses, but no other names."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _route_label(scope: Scope) -> str:
    """The route's path with its parameters unresolved. All unknown paths share a label."""
    if (route := scope.get("route")) is not None:
        return route.path
    page = scope["path"] in ("/", "/docs", "/openapi.json") or scope["path"].startswith("/page/")
    return "page" if page else "other"
