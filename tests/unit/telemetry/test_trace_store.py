import gzip
import json

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from berth.telemetry.trace_store import (
    MAX_REQUEST_BYTES,
    MalformedTraces,
    SpanRecord,
    decode_export_request,
    render_trace,
)
from berth.telemetry.trace_store import trace_rows as rows_of
from berth.telemetry.tracing import batch_span, event_span, init_tracing, root_span, shutdown_tracing


class Sampling:
    otlp_endpoint = None
    trace_sample_ratio = 1.0
    trace_roots_per_second = 10.0

    def otlp_authorization(self) -> str | None:
        return None


def a_pipeline_trace() -> bytes:
    """A request, then one event through two services, as OTLP bytes."""
    exporter = InMemorySpanExporter()
    for service in ("gateway", "admission", "placement"):
        init_tracing(service, Sampling(), processor=SimpleSpanProcessor(exporter))
    with root_span("gateway", "POST /v1/jobs") as root:
        pass
    context: str | None = root.traceparent
    for service, name in (("admission", "admit"), ("placement", "place")):
        with batch_span(service, f"{service}-events", [context, None]) as batch:
            context = event_span(name, context, batch, job_id="j1")
    for service in ("gateway", "admission", "placement"):
        shutdown_tracing(service)
    body: bytes = encode_spans(exporter.get_finished_spans()).SerializeToString()
    return body


def a_span(
    span_id: str, parent_id: str = "", *, trace: str = "t", start: int = 0, end: int = 1000, **more: object
) -> SpanRecord:
    fields: dict[str, object] = {"name": span_id, "service": "s", **more}
    return SpanRecord(trace_id=trace, span_id=span_id, parent_id=parent_id, started_ns=start, ended_ns=end, **fields)  # type: ignore[arg-type]


def test_spans_and_links_survive_the_wire() -> None:
    spans = decode_export_request(a_pipeline_trace())

    place = next(span for span in spans if span.name == "place")
    batch = next(span for span in spans if span.name == "process placement-events")
    assert place.service == "placement"
    assert place.kind == "consumer"
    assert place.attributes["berth.job_id"] == "j1"
    assert [(link.trace_id, link.span_id) for link in place.links] == [(batch.trace_id, batch.span_id)]
    assert batch.is_batch
    assert batch.parent_id == ""


def test_a_record_can_be_stored_as_json() -> None:
    for span in decode_export_request(a_pipeline_trace()):
        assert SpanRecord.from_dict(json.loads(json.dumps(span.to_dict()))) == span


def test_gzip_is_unpacked_and_bombs_are_refused() -> None:
    body = a_pipeline_trace()

    assert decode_export_request(gzip.compress(body), content_encoding="gzip") == decode_export_request(body)
    with pytest.raises(MalformedTraces, match="above"):
        decode_export_request(gzip.compress(bytes(MAX_REQUEST_BYTES + 1)), content_encoding="gzip")


@pytest.mark.parametrize(("body", "encoding"), [(b"\xff\xff\xff", ""), (b"plain", "gzip"), (b"", "br")])
def test_what_is_no_trace_request_is_refused(body: bytes, encoding: str) -> None:
    with pytest.raises(MalformedTraces):
        decode_export_request(body, content_encoding=encoding)


def test_the_tree_is_complete_even_if_spans_are_missing_repeated_or_in_a_circle() -> None:
    spans = [
        a_span("root"),
        a_span("late", "root", start=50),
        a_span("early", "root", start=10),
        a_span("early", "root", start=10),
        a_span("orphan", "never-arrived", start=70),
        a_span("other", trace="u"),
    ]

    assert [(depth, span.span_id) for depth, span in rows_of(spans, "t")] == [
        (0, "root"),
        (1, "early"),
        (1, "late"),
        (0, "orphan"),
    ]
    assert rows_of([a_span("a", "b"), a_span("b", "a")], "t") == []


def test_a_very_deep_trace_is_drawn() -> None:
    spans = [a_span(f"{index}", f"{index - 1}" if index else "") for index in range(3000)]

    assert len(rows_of(spans, "t")) == 3000
    assert "3000 spans" in render_trace(spans).plain


def test_the_drawing_shows_the_chain_and_the_batches() -> None:
    drawing = render_trace(decode_export_request(a_pipeline_trace()), width=120).plain

    lines = drawing.splitlines()
    assert "3 spans, 3 services" in lines[0]
    assert lines[1].startswith("POST /v1/jobs")
    assert "└ admit" in drawing
    assert "  └ place" in drawing
    assert "↳ in batch “process placement-events” of 2 messages" in drawing
    assert all(len(line) <= 120 for line in lines)


def test_failures_are_named_and_an_empty_trace_says_so() -> None:
    assert "error: ConnectionError" in render_trace([a_span("root", error="ConnectionError")]).plain
    assert "no spans" in render_trace([]).plain
