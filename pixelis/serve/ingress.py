"""Starts HAProxy for Ray Serve, with a changed configuration, and replaces it within a second if it dies.

Serve starts the script `haproxy`, which runs this file, for each new configuration; `-sf PID` in the arguments names the HAProxy
that the new one replaces. This process becomes HAProxy, because Serve compares process ids. Beside it a watcher waits for its
end. If HAProxy was killed while Serve's proxy actor, its parent, lives on, the watcher starts a stand-in on the same port. Serve
needs several failed health checks to notice the death, and seconds more to start another proxy actor; the HAProxy of that actor
takes the port over from the stand-in as soon as it knows the gateways. If the proxy actor was killed, its HAProxy serves until
then: it has a session of its own, because the raylet ends the process group of a worker that died.

Uses the standard library only and must not import pixelis: it runs isolated, in milliseconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
from http import HTTPStatus
from pathlib import Path

HEADER_TIMEOUT_S = 10
SHUTDOWN_S = 0.5
"""Seconds within which a service that stops on purpose ends the proxy actor after its HAProxy."""
REPLACEMENT_S = 60.0
"""Seconds within which Serve replaces a proxy actor that died; then a stand-in ends."""
BUFFER_BYTES, HEADER_BYTES, URL_BYTES = 32_768, 16_384, 8_192
"""HAProxy's buffer, into which a request without its body must fit, and the largest header and URL that a gateway gets."""
CLIENT_CONNECTIONS = 1024
"""Open connections of one address, of the 4096 that HAProxy has by default."""
METHODS = "GET HEAD POST PUT PATCH DELETE OPTIONS"
ERRORS = {
    400: ("bad_request", "the request is malformed, or ended before it was complete"),
    408: ("request_timeout", "the request did not arrive in time"),
    500: ("internal_error", "internal error"),
    501: ("not_implemented", "the request uses a feature of HTTP that is not supported"),
    502: ("unavailable", "the gateway ended while it answered"),
    503: ("unavailable", "no gateway answers at the moment"),
    504: ("timeout", "the gateway did not answer in time"),
}
"""Errors of HAProxy: code and message by status."""
UNPARSED = {
    400: ERRORS[400],
    408: ERRORS[408],
    431: ("header_too_large", f"the header is larger than {HEADER_BYTES} bytes"),
}
"""Errors for a connection that does not begin with a request. Those of HAProxy 2.8 are HTML compiled in, which a service in Lua
replaces. The same after another request on the connection stays HTML."""
LOG = {"%HM": "%[method]", "%ST": "%[var(txn.pixelis_status)]", "%Ta": "%[date(0,ms),sub(txn.pixelis_begin)]"}
"""Equivalents of the format variables in Serve's log of requests that mode tcp does not admit."""
BUFFER_FULL = BUFFER_BYTES - 2048
"""Bytes from which a buffer may be full: some are reserved for changes."""
NOT_FOUND, OVERLOADED = ("not_found", "no such route"), ("overloaded", "too many requests are waiting")


def error_body(status: int, code: str, message: str) -> str:
    """An error in OpenAI's format, without apostrophes."""
    kinds = {404: "not_found_error", 429: "rate_limit_error"}
    kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
    return json.dumps({"error": {"message": message, "type": kind, "code": code, "param": None}}).replace("'", "\\u0027")


def reply(status: int, code: str, message: str) -> str:
    """HAProxy's words for a reply with an error in OpenAI's format, and Retry-After where the caller may try again."""
    body = error_body(status, code, message)
    retry = " hdr Retry-After 1" if status in (429, 502, 503, 504) else ""
    return f"status {status} content-type application/json string '{body}'{retry}"


def unparsed_lua() -> str:
    """A Lua file with a TCP service `unparsed_STATUS` for each of UNPARSED."""
    parts = []
    for status, error in UNPARSED.items():
        body = error_body(status, *error)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        text = json.dumps(head + "Connection: close\r\n\r\n" + body)  # ASCII, so that it is a string of Lua too
        parts.append(f'core.register_service("unparsed_{status}", "tcp", function(applet) applet:send({text}) end)\n')
    return "".join(parts)


def adapt(text: str, lua: str) -> str:
    """The configuration that Serve wrote, changed. ``lua`` is the path of a file with ``unparsed_lua``.

    - Errors of HAProxy and of Serve, which are plain text, have OpenAI's format, and Retry-After where the caller may try again.
    - Callers have 10 s to send a header, of at most 16 kB. Methods that the gateway's server would call malformed are errors.
    - One address may have a quarter of the connections: none keeps all others out by opening connections.
    - `option forwardfor`: the gateway limits rates by client address.
    - Statistics and metrics are bound to loopback only.
    """
    defaults = ["option abortonclose", "option forwardfor", f"timeout http-request {HEADER_TIMEOUT_S}s"]
    defaults += [f"http-error {reply(status, *error)}" for status, error in ERRORS.items()]
    rules = [
        "mode tcp",  # until a request was read: the errors of mode http for what is none are compiled in
        f"tcp-request inspect-delay {HEADER_TIMEOUT_S}s",
        "tcp-request content switch-mode http if HTTP",
        "http-request set-var(txn.pixelis_begin) date(0,ms)",
        "http-after-response set-var(txn.pixelis_status) status",
        "stick-table type ipv6 size 100k expire 10m store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {CLIENT_CONNECTIONS} }}",
        f"http-request return {reply(414, 'url_too_long', f'the URL is longer than {URL_BYTES} bytes')} "
        f"if {{ url,length gt {URL_BYTES} }}",
        f"http-request return {reply(431, *UNPARSED[431])} if {{ req.hdrs,length gt {HEADER_BYTES} }}",
        f"http-request return {reply(405, 'bad_request', f'the method is none of {METHODS}')} unless {{ method {METHODS} }}",
    ]
    rules += [
        f"http-response return {reply(status, *error)} if {{ status {status} }} {{ res.hdr(content-type) -m beg text/plain }}"
        for status, error in {**ERRORS, 404: NOT_FOUND, 429: OVERLOADED}.items()
    ]
    full, complete = f"{{ req.len ge {BUFFER_FULL} }}", "{ req.payload(0,0),hex -m sub 0D0A0D0A }"
    unparsed = [
        "mode tcp",
        f"tcp-request content use-service lua.unparsed_400 if {complete}",
        f"tcp-request content use-service lua.unparsed_431 if {full}",
        "tcp-request content use-service lua.unparsed_408",
    ]
    unknown = reply(404, *NOT_FOUND) if knows_gateways(text) else reply(503, *ERRORS[503])
    text = re.sub(r"^ *errorfile .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^( *bind )\*?:", r"\g<1>127.0.0.1:", text, flags=re.MULTILINE)
    text = re.sub(r"^( *tune.bufsize ).*", rf"\g<1>{BUFFER_BYTES}", text, flags=re.MULTILINE)
    text = re.sub(r"^ *option abortonclose$", _indented(defaults), text, flags=re.MULTILINE)
    text = re.sub(r"^frontend http_frontend\n.*$", lambda bind: f"{bind[0]}\n{_indented(rules)}", text, flags=re.MULTILINE)
    text = re.sub(r"http-request return status 404 content-type text/plain .*", lambda _: f"http-request return {unknown}", text)
    for name, expression in LOG.items():
        text = re.sub(rf"(?<=[ =]){name}\b", expression, text)
    # Before Serve's choice of a backend by the path.
    text = re.sub(
        r"^( *acl is_|    default_backend )", "    use_backend unparsed unless HTTP\n\\g<1>", text, count=1, flags=re.MULTILINE
    )
    text = re.sub(r"^global$", f"global\n    lua-load {lua}", text, flags=re.MULTILINE)
    return f"{text.rstrip()}\nbackend unparsed\n{_indented(unparsed)}\n"


def _indented(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines)


def knows_gateways(text: str) -> bool:
    """Whether a configuration has a backend with servers."""
    return re.search(r"^ *server \S+ \S+:\d+ check", text, re.MULTILINE) is not None


def without(text: str, *sections: str) -> str:
    """A configuration without the named sections."""
    parts = re.split(r"^(?=\S)", text, flags=re.MULTILINE)
    return "".join(part for part in parts if part.partition("\n")[0].strip() not in sections)


def is_haproxy(pid: int, folder: Path) -> bool:
    """Whether the process is a HAProxy with a configuration in ``folder``."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def wait(timeout_s: float | None, *processes: int) -> bool:
    """Wait until one of the processes, given as file descriptors, has ended; False after ``timeout_s``."""
    poll = select.poll()
    for process in processes:
        poll.register(process, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


class Ingress:
    """The HAProxy of a node, whose files are in the ``folder`` of its configuration ``path``."""

    def __init__(self, binary: str, path: Path):
        self.binary, self.path, self.folder = binary, path, path.parent
        self.serving = self.folder / "serving.pid"
        """Process that has the port."""
        self.spare = self.folder / "stand-in.cfg"
        """Its configuration without the admin socket: Serve must notice its death."""
        self.lua = self.folder / "unparsed.lua"

    def start(self, arguments: list[str]) -> None:
        """Become HAProxy."""
        predecessor = self.predecessor(arguments)
        self.lua.write_text(unparsed_lua())
        text = adapt(self.path.read_text(), str(self.lua))
        if predecessor and not knows_gateways(text):
            # A new proxy actor does not know the gateways yet: the predecessor keeps the port until the next configuration.
            text = without(text, "frontend http_frontend", "frontend prometheus")
            text = re.sub(r"^( *bind )127.0.0.1:\d+", rf"\g<1>unix@{self.folder}/unused.sock", text, flags=re.MULTILINE)
        else:
            spare = re.sub(r"^ *stats socket .*\n", "", without(text, "frontend prometheus", "listen stats"), flags=re.MULTILINE)
            self.spare.write_text(spare)
            self.serving.write_text(str(os.getpid()))
            self.watch()
            arguments = arguments + (["-sf", str(predecessor)] if predecessor else [])
        self.path.write_text(text)
        if os.getpgrp() != os.getpid():
            os.setsid()
        # Without splice() (-dS): with it, version 2.8 misses half of the callers who disconnect before their reply begins, and
        # the work for them would continue until its deadline.
        os.execv(self.binary, [self.binary, "-dS", *arguments])

    def predecessor(self, arguments: list[str]) -> int | None:
        """A living HAProxy that has the port and that Serve does not know of: a stand-in, or one whose proxy actor was killed."""
        try:
            pid = int(self.serving.read_text())
        except (OSError, ValueError):
            return None
        return pid if str(pid) not in arguments and is_haproxy(pid, self.folder) else None

    def watch(self) -> None:
        """Start the watcher of this process: a grandchild, so that nobody has to wait for its end."""
        haproxy, manager = os.pidfd_open(os.getpid()), os.pidfd_open(os.getppid())
        own, raylet = os.getpid(), os.pidfd_open(parent_of(os.getppid()))
        if (child := os.fork()) != 0:
            os.waitpid(child, 0)
            for descriptor in (haproxy, manager, raylet):
                os.close(descriptor)
            return
        os.setsid()
        if os.fork() == 0:
            wait(None, haproxy, manager)
            if not wait(0, haproxy):
                wait(REPLACEMENT_S, haproxy, raylet)
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(haproxy, signal.SIGKILL)
            elif not wait(SHUTDOWN_S, manager, raylet) and self.serving.read_text() == str(own):
                self.stand_in(raylet)
        os._exit(0)

    def stand_in(self, raylet: int) -> None:
        """Serve with the same configuration until another HAProxy takes over. ``raylet``: the node's, as a file descriptor."""
        command = [self.binary, "-dS", "-db", "-f", str(self.spare)]
        with open(self.folder / "stand-in.log", "ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.serving.write_text(str(process.pid))
        wait(REPLACEMENT_S, os.pidfd_open(process.pid), raylet)
        process.kill()
        process.wait()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    binary = os.environ["RAY_SERVE_HAPROXY_BUNDLED"]
    if "-f" not in arguments:
        os.execv(binary, [binary, *arguments])
    Ingress(binary, Path(arguments[arguments.index("-f") + 1])).start(arguments)
