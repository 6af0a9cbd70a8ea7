"""A job stays in the trace it began with, whoever made room for it."""

from __future__ import annotations

from datetime import UTC, datetime

from berth.contracts.envelope import HEADER_TRACE, decode
from berth.contracts.events import JobWaiting
from berth.decisions.core import Emission
from berth.runtime.emissions import EmissionEncoder
from berth.telemetry.tracing import SILENT_BATCH

MINE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
MY_CAUSE = "00-0af7651916cd43dd8448eb211c80319c-00f067aa0ba902b7-00"
OTHERS = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
NOW = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)


def trace_of(*, cause: str, trace: str, causes: dict[str, tuple[str | None, str | None]]) -> str | None:
    emission = Emission(JobWaiting(job_id="j1", reasons=()), "j1", 1, tenant="t", cause=cause, trace=trace)
    encoder = EmissionEncoder(service="placement", pool="default")
    (encoded,), _ = encoder.encode([emission], now=NOW, causes=causes, batch=SILENT_BATCH)
    assert decode(encoded.payload).traceparent == encoded.headers.get(HEADER_TRACE, "")
    return encoded.headers.get(HEADER_TRACE)


def test_an_event_of_the_same_trace_is_the_parent() -> None:
    assert trace_of(cause="e1", trace=MINE, causes={"e1": (MY_CAUSE, None)}) == MY_CAUSE


def test_another_jobs_event_does_not_take_the_job_into_its_trace() -> None:
    assert trace_of(cause="e1", trace=MINE, causes={"e1": (OTHERS, None)}) == MINE


def test_a_cause_without_a_trace_and_a_timer_leave_the_job_in_its_own() -> None:
    assert trace_of(cause="e1", trace=MINE, causes={"e1": (None, None)}) == MINE
    assert trace_of(cause="", trace=MINE, causes={}) == MINE


def test_a_fact_without_a_job_follows_its_cause() -> None:
    assert trace_of(cause="e1", trace="", causes={"e1": (OTHERS, None)}) == OTHERS
    assert trace_of(cause="", trace="", causes={}) is None
