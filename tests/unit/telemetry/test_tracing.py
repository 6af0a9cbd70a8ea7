import timeit
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from berth.telemetry.traceparent import is_sampled, new_traceparent, parse_traceparent, trace_id_of
from berth.telemetry.tracing import (
    MAX_LINKS,
    SILENT_BATCH,
    RootSampler,
    batch_span,
    event_span,
    init_tracing,
    root_span,
    shutdown_tracing,
    start_root_span,
)

SERVICE = "placement"


@dataclass
class Sampling:
    otlp_endpoint: str | None = None
    trace_sample_ratio: float = 1.0
    trace_roots_per_second: float = 10.0

    def otlp_authorization(self) -> str | None:
        return None


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    init_tracing(SERVICE, Sampling(), processor=SimpleSpanProcessor(exporter))
    yield exporter
    shutdown_tracing(SERVICE)


def hex_span_id(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def test_a_job_can_be_followed_from_request_over_two_services(spans: InMemorySpanExporter) -> None:
    with root_span(SERVICE, "POST /v1/jobs") as root:
        pass
    with batch_span(SERVICE, "admission-events", [root.traceparent]) as admission:
        admitted = event_span("admit", root.traceparent, admission, job_id="j1", tenant="vision")
    with batch_span(SERVICE, "placement-events", [admitted]) as placement:
        placed = event_span("place", admitted, placement, job_id="j1", tenant="vision")

    by_name = {span.name: span for span in spans.get_finished_spans()}
    admit, place = by_name["admit"], by_name["place"]
    assert trace_id_of(placed) == trace_id_of(root.traceparent)
    assert admit.parent is not None
    assert f"{admit.parent.span_id:016x}" == hex_span_id(by_name["POST /v1/jobs"])
    assert place.parent is not None
    assert f"{place.parent.span_id:016x}" == hex_span_id(admit)
    assert place.attributes is not None
    assert place.attributes["berth.job_id"] == "j1"
    assert place.attributes["berth.tenant"] == "vision"
    assert place.attributes["messaging.system"] == "nats"
    assert place.resource.attributes["service.name"] == SERVICE


def test_a_batch_is_a_trace_of_its_own_linked_both_ways(spans: InMemorySpanExporter) -> None:
    parent = new_traceparent(sampled=True)

    with batch_span(
        SERVICE, "c", [None, parent, new_traceparent()], destination="berth.evt.{pool}.job.{id}.{fact}"
    ) as batch:
        event_span("place", parent, batch)

    event, whole = spans.get_finished_spans()
    assert whole.parent is None
    assert whole.context is not None
    assert f"{whole.context.trace_id:032x}" != trace_id_of(parent)
    assert [f"{link.context.trace_id:032x}" for link in whole.links] == [trace_id_of(parent)]
    assert [link.context.span_id for link in event.links] == [whole.context.span_id]
    assert whole.attributes is not None
    assert whole.attributes["messaging.batch.message_count"] == 3
    assert whole.attributes["messaging.consumer.group.name"] == "c"
    assert whole.attributes["messaging.destination.template"] == "berth.evt.{pool}.job.{id}.{fact}"
    assert event.end_time == whole.end_time


def test_links_stop_at_the_limit(spans: InMemorySpanExporter) -> None:
    with batch_span(SERVICE, "c", [new_traceparent(sampled=True) for _ in range(300)]):
        pass

    (whole,) = spans.get_finished_spans()
    assert len(whole.links) == MAX_LINKS
    assert whole.attributes is not None
    assert whole.attributes["berth.batch.traced_count"] == 300


def test_a_rolled_back_batch_marks_its_events_as_failed(spans: InMemorySpanExporter) -> None:
    parent = new_traceparent(sampled=True)

    with pytest.raises(ConnectionError), batch_span(SERVICE, "c", [parent]) as batch:
        event_span("place", parent, batch)
        raise ConnectionError

    assert [(span.status.status_code, span.status.description) for span in spans.get_finished_spans()] == [
        (StatusCode.ERROR, "ConnectionError")
    ] * 2


def test_unsampled_events_leave_no_span_and_pass_their_context_on(spans: InMemorySpanExporter) -> None:
    parent = new_traceparent()

    with batch_span(SERVICE, "c", [parent, None]) as batch:
        assert event_span("place", parent, batch) == parent
        assert event_span("place", None, batch) is None

    assert spans.get_finished_spans() == ()


def test_a_traced_job_that_moves_on_in_a_batch_about_others_is_recorded(spans: InMemorySpanExporter) -> None:
    waited = new_traceparent(sampled=True)

    with batch_span(SERVICE, "c", [new_traceparent()]) as batch:
        placed = event_span("place", waited, batch)

    event, whole = spans.get_finished_spans()
    assert trace_id_of(placed) == trace_id_of(waited)
    assert whole.context is not None
    assert [link.context.span_id for link in event.links] == [whole.context.span_id]
    assert list(whole.links) == []


def test_unsampled_events_cost_next_to_nothing() -> None:
    parent = new_traceparent()

    seconds = min(timeit.repeat(lambda: event_span("place", parent, SILENT_BATCH), number=10_000, repeat=5)) / 10_000

    assert seconds < 2e-6  # 0.2 us on a quiet machine


def test_without_an_endpoint_requests_still_get_a_trace_id() -> None:
    assert not init_tracing(SERVICE, Sampling())

    span = start_root_span(SERVICE, "POST /v1/jobs")

    assert parse_traceparent(span.traceparent) is not None
    assert not is_sampled(span.traceparent)
    assert batch_span(SERVICE, "c", [new_traceparent(sampled=True)]) is SILENT_BATCH


def test_a_callers_trace_is_joined_and_its_decision_against_tracing_respected(spans: InMemorySpanExporter) -> None:
    wanted, unwanted = new_traceparent(sampled=True), new_traceparent()

    with root_span(SERVICE, "a", traceparent=wanted) as joined, root_span(SERVICE, "b", traceparent=unwanted) as quiet:
        pass

    assert trace_id_of(joined.traceparent) == trace_id_of(wanted)
    assert joined.is_sampled is False  # ended
    assert quiet.traceparent == unwanted
    assert [span.name for span in spans.get_finished_spans()] == ["a"]


def test_a_flood_of_sampled_callers_is_rate_limited(spans: InMemorySpanExporter) -> None:
    for _ in range(500):
        start_root_span(SERVICE, "flood", traceparent=new_traceparent(sampled=True)).end()

    assert 10 <= len(spans.get_finished_spans()) <= 12


def test_malformed_callers_start_a_new_trace(spans: InMemorySpanExporter) -> None:
    with root_span(SERVICE, "a", traceparent="nonsense") as span:
        assert parse_traceparent(span.traceparent) is not None


def test_the_sampler_takes_a_share_and_never_more_than_its_rate() -> None:
    sparse = RootSampler(ratio=0.25, roots_per_second=1000)
    assert [sparse.take(now_seconds=1.0) for _ in range(8)] == [True, False, False, False] * 2

    capped = RootSampler(ratio=1.0, roots_per_second=10)
    taken = [capped.take(now_seconds=100.0 + index / 1000) for index in range(5000)]
    assert sum(taken) == pytest.approx(10 + 50, abs=1)

    assert not RootSampler(ratio=0.0, roots_per_second=10).take()
    assert not RootSampler(ratio=1.0, roots_per_second=0).take()
