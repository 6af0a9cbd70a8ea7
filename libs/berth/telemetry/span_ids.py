"""Span and trace ids for the SDK.

The SDK's default draws from the shared `random` module: whoever seeds that (a test, a reproducible run) would make
trace ids repeat between processes.
"""

from opentelemetry.sdk.trace.id_generator import IdGenerator

from berth.telemetry.traceparent import new_span_id, new_trace_id


class OwnIds(IdGenerator):
    """Ids from our own generator, seeded by the operating system."""

    def generate_span_id(self) -> int:
        return new_span_id()

    def generate_trace_id(self) -> int:
        return new_trace_id()
