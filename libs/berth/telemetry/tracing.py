"""Traces of the event pipeline.

One message in, one message out, many services: a trace follows a job from the request to its release. Work is done in
batches, so each batch that contains traced events gets a span of its own, linked to the events it processed, and each
traced event gets a child of its cause, linked to the batch. Both end together when the batch is committed and sent.

Sampling is decided once, at the root (`root_span`), by ratio and by rate; everything after follows the flag in the
traceparent. An unsampled event costs a look at one character. Nothing here raises towards the caller, and with no
endpoint configured neither the SDK nor protobuf is imported.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol

from berth.telemetry.traceparent import TraceParent, is_sampled, new_traceparent, parse_traceparent, unsampled

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Link, Span, SpanContext, Tracer

AttributeValue = str | bool | int | float
Attributes = Mapping[str, AttributeValue]

MAX_LINKS: Final = 128  # the SDK's own limit for links of one span
_ONLY_OF_BATCHES: Final = frozenset({"messaging.batch.message_count", "berth.batch.traced_count"})


class TracingSettings(Protocol):
    """What tracing reads from a service's settings."""

    @property
    def otlp_endpoint(self) -> str | None:
        """Where spans go (OTLP over HTTP, protobuf); None turns tracing off."""

    @property
    def trace_sample_ratio(self) -> float:
        """Share of roots considered, 0..1."""

    @property
    def trace_roots_per_second(self) -> float:
        """At most so many roots are sampled each second, whatever the load."""

    def otlp_authorization(self) -> str | None:
        """The `Authorization` header for the endpoint, read when a connection is opened."""


class RootSampler:
    """Decides which roots are traced: every 1/ratio-th, never more than `roots_per_second` (bursts of one second)."""

    def __init__(self, *, ratio: float, roots_per_second: float) -> None:
        self._ratio = ratio
        self._rate = roots_per_second
        self._burst = max(roots_per_second, 1.0)
        self._tokens = self._burst
        self._last_seconds = 0.0
        self._owed = 1.0 - ratio  # so that the very first root is taken whenever ratio > 0

    def take(self, *, now_seconds: float | None = None) -> bool:
        """Whether the next root is sampled; `now_seconds` is monotonic and defaults to the real clock."""
        if self._rate <= 0 or self._ratio <= 0:
            return False
        self._owed += self._ratio
        if self._owed < 1.0:
            return False
        self._owed -= 1.0
        now = time.monotonic() if now_seconds is None else now_seconds
        self._tokens = min(self._burst, self._tokens + (now - self._last_seconds) * self._rate)
        self._last_seconds = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class RootSpan:
    """The start of a trace, at the edge of the platform; `traceparent` goes into everything it causes."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str, span: "Span | None") -> None:
        self.traceparent = traceparent
        self._span = span

    @property
    def is_sampled(self) -> bool:
        return self._span is not None

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute known only later, such as the job's id or the status code."""
        if self._span is not None:
            self._span.set_attribute(name, value)

    def failed(self, reason: str) -> None:
        """Mark the span as failed."""
        if self._span is not None:
            _mark_failed(self._span, reason)

    def end(self) -> None:
        if self._span is not None:
            self._span.end()
            self._span = None


class BatchSpan:
    """The processing of one batch by one consumer, with the spans of its traced events.

    Use as a context manager, or call `end` after the batch was committed and sent, `abandon` when it was not. Its own
    span begins with the first traced event that is in it, or that comes out of it: a job that waited is placed by
    somebody else's release.
    """

    __slots__ = ("_attributes", "_events", "_link", "_links", "_name", "_span", "_started_ns", "_tracer")

    def __init__(
        self, tracer: "Tracer", name: str, attributes: dict[str, AttributeValue], links: "Sequence[Link]"
    ) -> None:
        self._tracer = tracer
        self._name = name
        self._attributes = attributes
        self._links = links
        self._started_ns = time.time_ns()
        self._events: list[Span] = []
        self._span: Span | None = None
        self._link: Link | None = None

    @property
    def traceparent(self) -> str:
        """Context of the batch itself, for exemplars and log lines about it; empty while nothing in it is traced."""
        return "" if self._span is None else _to_traceparent(self._span.get_span_context())

    def is_recording(self) -> bool:
        """Whether spans of events are kept."""
        return True

    def begin(self) -> "Link":
        """Start the batch's own span, if that has not happened; returns the link to it."""
        if self._link is None:
            from opentelemetry.context import Context
            from opentelemetry.trace import Link, SpanKind

            self._span = self._tracer.start_span(
                self._name,
                context=Context(),
                kind=SpanKind.CONSUMER,
                attributes=self._attributes,
                links=self._links,
                start_time=self._started_ns,
            )
            self._link = Link(self._span.get_span_context())
        return self._link

    def start_event(self, name: str, parent: TraceParent, attributes: Attributes) -> str:
        """Open the span of one event; it ends with the batch. Returns the context for what the event causes."""
        from opentelemetry.trace import SpanKind

        own = {key: value for key, value in self._attributes.items() if key not in _ONLY_OF_BATCHES}
        span = self._tracer.start_span(
            name,
            context=_context_of(parent),
            kind=SpanKind.CONSUMER,
            attributes={**own, **attributes},
            links=[self.begin()],
            start_time=self._started_ns,
        )
        self._events.append(span)
        return _to_traceparent(span.get_span_context())

    def set(self, name: str, value: AttributeValue) -> None:
        """Set an attribute of the batch, such as the number of emitted events."""
        if self._span is not None:
            self._span.set_attribute(name, value)

    def end(self) -> None:
        """The batch is done: all its spans end now."""
        if self._span is None:
            return
        ended_ns = time.time_ns()
        for span in self._events:
            span.end(ended_ns)
        self._events.clear()
        self._span.end(ended_ns)

    def abandon(self, reason: str) -> None:
        """The batch was rolled back; its events come again, so their spans are marked as failed tries."""
        if self._span is not None:
            for span in (*self._events, self._span):
                _mark_failed(span, reason)
        self.end()

    def __enter__(self) -> "BatchSpan":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.end()
        else:
            self.abandon(type(error).__name__)


class _SilentBatch(BatchSpan):
    """Any batch while tracing is off: does nothing, and is shared by all."""

    __slots__ = ()

    def __init__(self) -> None:
        self._span = None

    def is_recording(self) -> bool:
        return False


SILENT_BATCH: Final[BatchSpan] = _SilentBatch()


class _ServiceTracing:
    """What `init_tracing` set up for one service."""

    __slots__ = ("provider", "sampler", "tracer")

    def __init__(self, sampler: RootSampler, provider: "TracerProvider", tracer: "Tracer") -> None:
        self.sampler = sampler
        self.provider = provider
        self.tracer = tracer


# By service name: tests and the single-process platform run several services in one process.
_services: dict[str, _ServiceTracing] = {}


def init_tracing(service: str, settings: TracingSettings, *, processor: "SpanProcessor | None" = None) -> bool:
    """Set up tracing for `service`; repeated calls replace the former set-up.

    Args:
        service: the service's name, shown on each of its spans.
        settings: endpoint and sampling.
        processor: takes the spans instead of the OTLP shipper (tests).

    Returns:
        Whether spans are recorded at all.
    """
    shutdown_tracing(service)
    if processor is None and settings.otlp_endpoint is None:
        return False
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    from berth.telemetry.span_ids import OwnIds

    if processor is None:
        from berth.telemetry.span_shipper import SpanShipper

        assert settings.otlp_endpoint is not None
        processor = SpanShipper(settings.otlp_endpoint, authorization=settings.otlp_authorization)
    # Not Resource.create(): its detectors start threads and read OTEL_* variables; our settings are the only source.
    provider = TracerProvider(
        resource=Resource({"service.name": service, "service.namespace": "berth"}),
        id_generator=OwnIds(),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    sampler = RootSampler(ratio=settings.trace_sample_ratio, roots_per_second=settings.trace_roots_per_second)
    _services[service] = _ServiceTracing(sampler, provider, provider.get_tracer("berth"))
    return True


def shutdown_tracing(service: str) -> None:
    """Send what is left (about two seconds at most) and stop; harmless when tracing was never set up."""
    tracing = _services.pop(service, None)
    if tracing is not None:
        tracing.provider.shutdown()


@contextmanager
def root_span(
    service: str, name: str, *, traceparent: str | None = None, attributes: Attributes | None = None
) -> Iterator[RootSpan]:
    """Start a trace, or join the caller's, for one request from outside.

    A caller's sampled flag is a wish: it counts against the same rate as our own roots, or any client could make us
    trace everything. The trace id is kept either way.
    """
    span = start_root_span(service, name, traceparent=traceparent, attributes=attributes)
    try:
        yield span
    except BaseException as error:
        span.failed(type(error).__name__)
        raise
    finally:
        span.end()


def start_root_span(
    service: str, name: str, *, traceparent: str | None = None, attributes: Attributes | None = None
) -> RootSpan:
    """As `root_span`, for callers that end it themselves."""
    tracing = _services.get(service)
    parent = parse_traceparent(traceparent)
    wanted = parent is None or parent.is_sampled
    if tracing is None or not wanted or not tracing.sampler.take():
        return RootSpan(new_traceparent() if parent is None else unsampled(str(parent)), None)
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind

    context = Context() if parent is None else _context_of(parent)
    span = tracing.tracer.start_span(name, context=context, kind=SpanKind.SERVER, attributes=attributes)
    return RootSpan(_to_traceparent(span.get_span_context()), span)


def batch_span(
    service: str,
    consumer: str,
    traceparents: Sequence[str | None],
    *,
    destination: str = "",
    operation: str = "process",
) -> BatchSpan:
    """The span of one batch: a root of its own, linked to the first 128 traced events in it.

    Args:
        service: as given to `init_tracing`.
        consumer: the durable consumer's name.
        traceparents: one per message of the batch, None where a message had none.
        destination: subject template such as `berth.evt.{pool}.job.{id}.{fact}`; never a concrete subject.
        operation: messaging operation type: `process`, `receive`, `send` or `settle`.

    Returns:
        A batch that costs two microseconds as long as nothing in it is traced, which is the normal case under load.
    """
    tracing = _services.get(service)
    if tracing is None:
        return SILENT_BATCH
    creators = [header for header in traceparents if is_sampled(header)]
    attributes: dict[str, AttributeValue] = {
        "messaging.system": "nats",
        "messaging.operation.type": operation,
        "messaging.consumer.group.name": consumer,
        "messaging.batch.message_count": len(traceparents),
        "berth.batch.traced_count": len(creators),
    }
    if destination:
        attributes["messaging.destination.template"] = destination
    batch = BatchSpan(tracing.tracer, f"{operation} {consumer}", attributes, _links_to(creators) if creators else ())
    if creators:
        batch.begin()
    return batch


def event_span(
    name: str,
    parent: str | None,
    batch: BatchSpan,
    attributes: Attributes | None = None,
    *,
    job_id: str | None = None,
    tenant: str | None = None,
) -> str | None:
    """Record the processing of one event of `batch`; returns the context for whatever it causes.

    Unsampled or absent parents come back unchanged at about 0.2 us. Call once per causing event, not per emission.
    """
    if not is_sampled(parent) or not batch.is_recording():
        return parent
    context = parse_traceparent(parent)
    if context is None:
        return parent
    own: dict[str, AttributeValue] = dict(attributes) if attributes else {}
    if job_id is not None:
        own["berth.job_id"] = job_id
    if tenant is not None:
        own["berth.tenant"] = tenant
    return batch.start_event(name, context, own)


def _links_to(creators: Sequence[str | None]) -> "list[Link]":
    from opentelemetry.trace import Link

    parsed = (parse_traceparent(header) for header in creators[:MAX_LINKS])
    return [Link(_span_context(context)) for context in parsed if context is not None]


def _span_context(parent: TraceParent) -> "SpanContext":
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=TraceFlags(1))


def _context_of(parent: TraceParent) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, set_span_in_context

    return set_span_in_context(NonRecordingSpan(_span_context(parent)), Context())


def _to_traceparent(context: "SpanContext") -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{'01' if context.trace_flags.sampled else '00'}"


def _mark_failed(span: "Span", reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_status(Status(StatusCode.ERROR, reason))
