"""OpenTelemetry traces, from a request to the update and promotion that learnt from it.

Ray calls carry the context (W3C ``traceparent``) as an argument: threads and actors do not inherit it. It is
passed on also when spans are not recorded.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan

    from pixelis.config import Config

log = logging.getLogger("pixelis.telemetry")

FOLDER = "traces"
MAX_FILE_BYTES = 50_000_000
"""Size at which a span file is closed; the one before it is then deleted."""
FLUSH_MS = 1000
_W3C = TraceContextTextMapPropagator()
_ID_KEYS = {"traceId", "spanId", "parentSpanId"}
_started = threading.Lock()
_tracer: trace.Tracer = trace.NoOpTracer()  # not the global one, which Ray Serve may have set


def start(config: Config, service: str) -> None:
    """Record this process's spans as ``telemetry.traces`` says. With ``telemetry.logs`` alone they only have ids."""
    global _tracer
    destination = config.telemetry.traces
    if not (destination or config.telemetry.logs) or not _started.acquire(blocking=False):
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    exporter: SpanExporter | None = None
    if destination == "file":
        exporter = _file_exporter(Path(config.run.dir) / FOLDER / f"{service}-{os.getpid()}.jsonl")
    elif destination:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(endpoint=destination)
    resource = Resource.create(
        {"service.name": f"pixelis-{service}", "service.instance.id": f"{config.run.name}-{os.getpid()}"}
    )
    provider = TracerProvider(
        resource=resource, sampler=ParentBased(TraceIdRatioBased(config.telemetry.trace_share))
    )
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=FLUSH_MS))
    _tracer = provider.get_tracer("pixelis")


@contextmanager
def span(name: str, parent: str | None = None, **attributes: Any) -> Iterator[Span]:
    """A span of the enclosed work, below ``parent`` (a ``traceparent``) or the current span.

    Not around the ``yield`` of a generator, whose steps may run in other contexts: see ``begin``.
    """
    with _tracer.start_as_current_span(name, _context(parent), attributes=_plain(attributes)) as current:
        yield current


def begin(name: str, parent: str | None = None, **attributes: Any) -> Span:
    """A span that does not become the current one, and that the caller ends."""
    return _tracer.start_span(name, _context(parent), attributes=_plain(attributes))


def record(name: str, parents: Sequence[str], since: float, **attributes: Any) -> None:
    """A span from ``since`` (``time.time``) until now in each trace of ``parents``."""
    for parent in filter(None, dict.fromkeys(parents)):
        _tracer.start_span(
            name, _context(parent), attributes=_plain(attributes), start_time=int(since * 1e9)
        ).end()


def traceparent(of: Span | None = None) -> str:
    """The W3C ``traceparent`` of a span, by default the current one; empty outside of every trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, None if of is None else trace.set_span_in_context(of))
    return carrier.get("traceparent", "")


def trace_id() -> str:
    """The current trace's id as 32 hex digits; empty outside of every trace."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def failed(span: Span, code: str) -> None:
    span.set_status(StatusCode.ERROR, code)


def _context(parent: str | None) -> Context | None:
    return _W3C.extract({"traceparent": parent}) if parent else None


def _plain(attributes: dict[str, Any]) -> dict[str, Any]:
    return {
        f"pixelis.{name}": value
        for name, value in attributes.items()
        if isinstance(value, str | bool | int | float)
    }


def _file_exporter(path: Path) -> Any:
    """An exporter that appends OTLP as JSON lines, as the Collector's file exporter does."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class FileExporter(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            content = MessageToDict(encode_spans(spans))
            for item in _spans(content):
                for key in _ID_KEYS & item.keys():  # in hex, where protobuf has base64
                    item[key] = base64.b64decode(item[key]).hex()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file() and path.stat().st_size > MAX_FILE_BYTES:
                    path.replace(path.with_suffix(".old.jsonl"))
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(content, separators=(",", ":")) + "\n")
            except OSError as error:  # a full disk must not cost more than the trace
                log.warning("spans are not written to %s: %s", path.name, error.strerror)
                return SpanExportResult.FAILURE
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            pass

    return FileExporter()


def _spans(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in content["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            yield from scope["spans"]


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The spans of the files in ``folder`` by trace id, in order of their start; see ``_span``."""
    traces: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                try:
                    content = json.loads(line)
                    service = _attributes(content["resourceSpans"][0]["resource"])["service.name"]
                    for item in _spans(content):
                        traces.setdefault(item["traceId"], []).append(_span(item, service))
                except (ValueError, KeyError, TypeError):  # an incomplete line
                    continue
    for spans in traces.values():
        spans.sort(key=lambda span: span["start"])
    return dict(sorted(traces.items(), key=lambda entry: entry[1][0]["start"]))


def _span(item: dict[str, Any], service: str) -> dict[str, Any]:
    return {
        "id": item["spanId"],
        "parent": item.get("parentSpanId", ""),
        "name": item["name"],
        "service": service.removeprefix("pixelis-"),
        "start": int(item["startTimeUnixNano"]) / 1e9,
        "end": int(item["endTimeUnixNano"]) / 1e9,
        "failed": item.get("status", {}).get("code") == "STATUS_CODE_ERROR",
        "attributes": {name.removeprefix("pixelis."): value for name, value in _attributes(item).items()},
    }


def _attributes(item: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values()), None) for entry in item.get("attributes", [])}


def tree(spans: Sequence[dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    known = {span["id"] for span in spans}
    children: dict[str, list[dict[str, Any]]] = {}
    for item in spans:
        children.setdefault(item["parent"] if item["parent"] in known else "", []).append(item)
    rows: list[tuple[int, dict[str, Any]]] = []
    waiting = [(0, item) for item in reversed(children.get("", []))]
    while waiting:
        depth, item = waiting.pop()
        rows.append((depth, item))
        waiting += [(depth + 1, child) for child in reversed(children.get(item["id"], []))]
    return rows
