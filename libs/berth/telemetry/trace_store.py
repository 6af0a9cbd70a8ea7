"""Spans as plain values: decoded from OTLP, kept by whoever owns a store, drawn as a waterfall.

The gateway receives spans (`decode_export_request`) and stores `SpanRecord.to_dict()`; CLI and console draw them with
`render_trace`. Only decoding needs protobuf, so drawing works in the small client install.
"""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from rich.cells import cell_len, set_cell_size
from rich.text import Text

if TYPE_CHECKING:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span

AttributeValue = str | bool | int | float | list["AttributeValue"]

MAX_REQUEST_BYTES: Final = 8 * 1024 * 1024
_KINDS: Final = ("unspecified", "internal", "server", "client", "producer", "consumer")


class MalformedTraces(ValueError):
    """The bytes are no OTLP trace request, or more than we take."""


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """Another span that this one has to do with without being its child."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One finished span; ids are lower-case hex, `parent_id` is empty for roots, times are nanoseconds since 1970."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    started_ns: int
    ended_ns: int
    kind: str = "internal"
    error: str | None = None
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    links: tuple[LinkRecord, ...] = ()

    @property
    def duration_ns(self) -> int:
        return max(self.ended_ns - self.started_ns, 0)

    @property
    def is_batch(self) -> bool:
        """Whether this is the span of a whole batch rather than of one event."""
        return "messaging.batch.message_count" in self.attributes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `from_dict` reads it back."""
        return {
            "trace_id": self.trace_id,
            "span_id": self.span_id,
            "parent_id": self.parent_id,
            "name": self.name,
            "service": self.service,
            "started_ns": self.started_ns,
            "ended_ns": self.ended_ns,
            "kind": self.kind,
            "error": self.error,
            "attributes": dict(self.attributes),
            "links": [
                {"trace_id": link.trace_id, "span_id": link.span_id, "attributes": dict(link.attributes)}
                for link in self.links
            ],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        links = tuple(LinkRecord(**link) for link in stored.get("links", ()))
        return cls(**{**stored, "links": links})


def decode_export_request(body: bytes, *, content_encoding: str = "") -> list[SpanRecord]:
    """Decode an OTLP `ExportTraceServiceRequest`, plain or gzip, in the order sent.

    Raises:
        MalformedTraces: not such a request, an unknown encoding, or above 8 MiB unpacked.
    """
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # ships no types
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    body = _unpacked(body, content_encoding)
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        raise MalformedTraces(f"not an OTLP trace request: {error}") from error
    spans: list[SpanRecord] = []
    for resource_spans in request.resource_spans:
        service = str(_attributes(resource_spans.resource.attributes).get("service.name", "unknown"))
        for scope in resource_spans.scope_spans:
            spans += [_record(span, service) for span in scope.spans]
    return spans


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding in {"", "identity"}:
        unpacked = body
    elif encoding == "gzip":
        try:
            # One byte more than allowed is enough to know; a small body may unpack to gigabytes.
            unpacked = zlib.decompressobj(wbits=31).decompress(body, MAX_REQUEST_BYTES + 1)
        except zlib.error as error:
            raise MalformedTraces(f"not gzip: {error}") from error
    else:
        raise MalformedTraces(f"unknown content encoding: {encoding[:40]}")
    if len(unpacked) > MAX_REQUEST_BYTES:
        raise MalformedTraces(f"above {MAX_REQUEST_BYTES} bytes")
    return unpacked


def _record(span: "Span", service: str) -> SpanRecord:
    is_error = span.status.code == span.status.STATUS_CODE_ERROR
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=service,
        started_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        kind=_KINDS[span.kind] if 0 <= span.kind < len(_KINDS) else _KINDS[0],
        error=(span.status.message or "error") if is_error else None,
        attributes=_attributes(span.attributes),
        links=tuple(
            LinkRecord(link.trace_id.hex(), link.span_id.hex(), _attributes(link.attributes)) for link in span.links
        ),
    )


def _attributes(pairs: "Iterable[KeyValue]") -> dict[str, AttributeValue]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: "AnyValue") -> AttributeValue:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(inner) for inner in value.array_value.values]
    if kind == "bytes_value":
        return value.bytes_value.hex()
    if kind in {"string_value", "bool_value", "int_value", "double_value"}:
        plain: AttributeValue = getattr(value, kind)
        return plain
    return ""  # nested maps and empty values are not used by any span we draw


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the waterfall."""

    span: SpanRecord
    guides: str


def trace_rows(spans: Sequence[SpanRecord], trace_id: str) -> list[tuple[int, SpanRecord]]:
    """The spans of one trace as a tree in depth-first order, with their depth; siblings by start, then id.

    Spans whose parent is missing (lost, or not yet arrived) stand at the top. Repeated deliveries show once.
    """
    return [(len(row.guides) // 2, row.span) for row in _rows(spans, trace_id)]


def _rows(spans: Sequence[SpanRecord], trace_id: str) -> list[_Row]:
    own = {span.span_id: span for span in spans if span.trace_id == trace_id}
    children: dict[str, list[SpanRecord]] = defaultdict(list)
    for span in own.values():
        is_top = span.parent_id not in own or span.parent_id == span.span_id
        children["" if is_top else span.parent_id].append(span)
    for siblings in children.values():
        siblings.sort(key=lambda span: (span.started_ns, span.span_id))
    rows: list[_Row] = []
    # A stack instead of recursion: a long-lived job's chain of events may be deeper than the interpreter's limit.
    stack = [(span, "", "") for span in reversed(children[""])]
    seen: set[str] = set()
    while stack:
        span, guides, below = stack.pop()
        if span.span_id in seen:
            continue
        seen.add(span.span_id)
        rows.append(_Row(span, guides))
        below_here = children.get(span.span_id, [])
        for index, child in enumerate(reversed(below_here)):
            is_last = index == 0
            stack.append((child, below + ("└ " if is_last else "├ "), below + ("  " if is_last else "│ ")))
    return rows


def render_trace(spans: Sequence[SpanRecord], *, trace_id: str | None = None, width: int = 110) -> Text:
    """Draw one trace as a tree with a waterfall, and below each event the batch it was processed in.

    Args:
        spans: the trace's spans; spans of other traces among them are used to name linked batches.
        trace_id: which trace; by default the one that began first and is not a batch.
        width: columns; at least 60.

    Returns:
        Text with styles; `.plain` is the same without.
    """
    chosen = trace_id or _first_trace(spans)
    rows = _rows(spans, chosen) if chosen is not None else []
    if not rows:
        return Text("no spans (yet); they arrive within a few seconds", style="dim")
    known = {(span.trace_id, span.span_id): span for span in spans}
    begin = min(row.span.started_ns for row in rows)
    total = max(max(row.span.ended_ns for row in rows) - begin, 1)
    width = max(width, 60)
    name_width = min(max(cell_len(row.guides + row.span.name) for row in rows) + 1, width // 2 - 10)
    service_width = min(max(len(row.span.service) for row in rows) + 1, 14)
    bar_width = width - name_width - service_width - 20
    services = len({row.span.service for row in rows})
    text = Text(no_wrap=True, overflow="crop")
    text.append(f"trace {chosen}", style="bold")
    text.append(f"  {len(rows)} spans, {services} services, {_time_text(total)}\n")
    for row in rows:
        span = row.span
        text.append(set_cell_size(row.guides + span.name, name_width), style="bold red" if span.error else "")
        text.append(set_cell_size(span.service, service_width), style="cyan")
        text.append(f"{'+' + _time_text(span.started_ns - begin):>9} {_time_text(span.duration_ns):>9} ", style="dim")
        text.append(_bar(span.started_ns - begin, span.duration_ns, total, bar_width), style=_style_of(span))
        text.append("\n")
        for note in _notes(span, known):
            text.append(set_cell_size("", cell_len(row.guides)) + "   " + note + "\n", style="dim")
    text.right_crop(1)
    return text


def _first_trace(spans: Sequence[SpanRecord]) -> str | None:
    first = min(spans, key=lambda span: (span.is_batch, span.started_ns, span.span_id), default=None)
    return None if first is None else first.trace_id


def _notes(span: SpanRecord, known: Mapping[tuple[str, str], SpanRecord]) -> list[str]:
    notes = [f"error: {span.error}"] if span.error else []
    if span.is_batch:
        notes.append(f"{span.attributes['messaging.batch.message_count']} messages, links to {len(span.links)} events")
        return notes
    for link in span.links:
        batch = known.get((link.trace_id, link.span_id))
        if batch is None:
            notes.append(f"↳ linked to span {link.span_id} of trace {link.trace_id}")
        else:
            count = batch.attributes.get("messaging.batch.message_count")
            of = f" of {count} message{'' if count == 1 else 's'}" if count is not None else ""
            notes.append(f"↳ in batch “{batch.name}”{of}, {_time_text(batch.duration_ns)}, trace {batch.trace_id}")
    return notes


def _bar(start_ns: int, duration_ns: int, total_ns: int, width: int) -> str:
    begin = min(int(start_ns / total_ns * width), width - 1)
    length = max(1, min(round(duration_ns / total_ns * width), width - begin))
    return " " * begin + "█" * length


def _style_of(span: SpanRecord) -> str:
    return "red" if span.error else ("green" if span.kind == "server" else "blue")


def _time_text(nanoseconds: int) -> str:
    if nanoseconds < 1_000_000:
        return f"{nanoseconds / 1e3:.0f} µs"
    if nanoseconds < 1_000_000_000:
        return f"{nanoseconds / 1e6:.1f} ms"
    if nanoseconds < 60_000_000_000:
        return f"{nanoseconds / 1e9:.2f} s"
    minutes, seconds = divmod(nanoseconds // 1_000_000_000, 60)
    return f"{minutes}m{seconds:02d}s"
