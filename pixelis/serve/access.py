"""Access control: API key, local host names, origin, read-only mode, and the headers of every reply."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
import time
from collections.abc import Mapping

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pixelis.config import Config
from pixelis.serve.counters import Counters
from pixelis.serve.schemas import ApiError

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
"""Given where a route sets no other: nothing here is to be framed, sniffed, kept, or read by another site."""


def digest(key: str) -> bytes:
    """What is kept of the API key: enough to compare, useless to whoever reads an actor's arguments."""
    return hashlib.sha256(key.encode()).digest()


class Access:
    """The checks before a request is looked at; ``key_digest`` None asks for no key and so admits only this machine's names.

    ``ingress`` is the number of proxies of Serve's own that add to X-Forwarded-For: one with our HAProxy script, else none.
    """

    def __init__(self, config: Config, key_digest: bytes | None, ingress: int = 0):
        self.config, self.key_digest, self.proxies = config, key_digest, config.serve.proxies + ingress
        self.salt = secrets.token_bytes(16)

    def authorise(self, request: Request) -> None:
        """Raises ApiError 401 without the key. Compared in constant time, as digests of one length."""
        if self.key_digest is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Header bytes arrive as latin-1 text.
        presented = hashlib.sha256(given.strip().encode("latin-1", "replace")).digest()
        if not hmac.compare_digest(presented, self.key_digest) or scheme.lower() != "bearer":
            raise ApiError(401, "a valid API key is needed: `Authorization: Bearer KEY`", "invalid_api_key")

    def json_only(self, request: Request) -> None:
        """Raises ApiError 415 for another content type: a web page elsewhere can post forms and text unasked, but not JSON."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, "the content type must be application/json", "content_type")

    def writing(self) -> None:
        """Raises ApiError 403 when the service is read-only."""
        if self.config.serve.read_only:
            raise ApiError(403, "this service is read-only: it keeps and changes nothing", "read_only")

    def host(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError 403 when no key is asked for and the request is addressed to a name other than this machine's own.

        A web page whose name is made to point to 127.0.0.1 would otherwise count as the same origin and could read and do all.
        """
        if self.key_digest is None and not is_local(headers.get("host", "")):
            message = "without an API key this service answers to localhost, 127.0.0.1 and [::1] only"
            raise ApiError(403, message, "host_not_allowed")

    def client(self, request: Request) -> str:
        """A name for the caller that tells nothing about it: a salted hash of its address, new with every replica.

        With ``serve.proxies`` = n the address is the n-th last of X-Forwarded-For; all before it is the client's own say. The
        addresses of one IPv6 network of 64 bits are one client.
        """
        address = request.client.host if request.client is not None else ""
        hops = [hop.strip() for hop in ",".join(request.headers.getlist("x-forwarded-for")).split(",")]
        if 0 < self.proxies <= len(hops) and hops[-self.proxies]:
            address = hops[-self.proxies]
        return hashlib.blake2b(_network(address).encode(), key=self.salt, digest_size=8).hexdigest()

    def operator(self) -> str:
        """Who an order came from, for the audit log: the key, told apart from others by the start of its digest, or loopback."""
        return f"key {self.key_digest.hex()[:8]}" if self.key_digest is not None else "loopback"


class Shield:
    """ASGI middleware: the host check, the headers of every reply, and its status and time for the counters."""

    def __init__(self, app: ASGIApp, access: Access, counters: Counters):
        self.app, self.access, self.counters = app, access, counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                for name, value in scope.get("pixelis.headers", {}).items():
                    headers[name] = value
            await send(message)

        try:
            try:
                self.access.host(Headers(scope=scope))
            except ApiError as error:
                await error.response()(scope, receive, watched)
                return
            await self.app(scope, receive, watched)
        finally:
            self.counters.request(scope.get("pixelis.route") or _route(scope["path"]), status, time.monotonic() - started)


def is_local(host: str) -> bool:
    """Whether a Host header names this machine: localhost or a loopback address, with any port."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        port = port.removeprefix(":")
        if not bracket:
            return False
    else:
        name, _, port = host.partition(":")
    if port and not (port.isascii() and port.isdigit()):
        return False
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name.lower().removesuffix(".") == "localhost"


def _route(path: str) -> str:
    """A label for what no route of ours took: never the path itself, which is the caller's and has no bound."""
    return "page" if path == "/" or path.startswith("/page/") else "other"


def _network(address: str) -> str:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address[:100]
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is not None:
            return str(known.ipv4_mapped)
        return str(ipaddress.ip_network((known, 64), strict=False))
    return str(known)
