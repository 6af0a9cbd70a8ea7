"""Idle and lifetime: what counts, what proves nothing, when is warned and when reclaimed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from berth.contracts.events import (
    Activity,
    ActivityReported,
    IdleWarned,
    JobExtendRequested,
    JobReclaimed,
    LifetimeWarned,
    TelemetryStale,
)
from berth.contracts.reasons import Code
from berth.decisions.lifecycle import LifecycleCore
from tests.unit.decisions.desks import (
    START,
    Desk,
    a_spec,
    admitted,
    did_exit,
    did_release,
    did_start,
    kinds,
    placed,
    policy,
    registered,
)

IDLE = {"timeout": 3600, "warn_before": 600, "counts": ["kernel_busy", "gpu_util"], "gpu_util_at_least": 0.05}


def a_desk(*, job_class: str = "interactive", telemetry: dict[str, Any] | None = None, **defaults: Any) -> Any:
    desk = Desk(LifecycleCore())
    fact = policy(**defaults)
    if telemetry:
        fact = fact.model_copy(update={"document": {**fact.document, "telemetry": telemetry}})
    desk.feed(fact, registered("n1"), admitted(spec=a_spec(job_class=job_class)), placed(), did_start())
    return desk


def seen(
    desk: Desk[LifecycleCore], *signs: Activity, gpu: float | None = 0.0, stamp: float | None = None
) -> ActivityReported:
    return ActivityReported(
        job_id="j1",
        attempt=1,
        fence=1,
        worker=0,
        node="n1",
        epoch=1,
        active=signs,
        gpu_utilization=gpu,
        sampled_at=desk.now if stamp is None else START + timedelta(seconds=stamp),
    )


def idle_for(desk: Desk[LifecycleCore], seconds: int, *, every: int = 60, gpu: float | None = 0.0) -> list[Any]:
    """Fresh reports of nothing going on."""
    told = []
    for _ in range(seconds // every):
        told += desk.wait(every)
        told += desk.feed(seen(desk, gpu=gpu))
    return told


def test_idle_time_counts_from_the_end_of_the_last_activity() -> None:
    desk = a_desk(idle=IDLE)
    desk.feed(seen(desk, Activity.KERNEL_BUSY))
    desk.wait(7200)
    desk.feed(seen(desk))
    assert kinds(idle_for(desk, 2940)) == []
    assert kinds(idle_for(desk, 60)) == ["IdleWarned"]
    told = idle_for(desk, 600)
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    assert told[0].cause.code is Code.IDLE
    told = desk.feed(did_exit(code=0), did_release())
    assert kinds(told) == ["AttemptEnded", "JobReclaimed"]
    assert {"last_activity", "timeout"} <= told[1].evidence.keys()


def test_work_without_the_gpu_counts_and_takes_a_warning_back() -> None:
    desk = a_desk(idle=IDLE)
    desk.feed(seen(desk))
    idle_for(desk, 3060)
    desk.wait(1)
    desk.feed(seen(desk, Activity.KERNEL_BUSY))
    desk.wait(1)
    desk.feed(seen(desk))
    assert kinds(idle_for(desk, 2940)) == []
    assert len(desk.all(IdleWarned)) == 1


def test_a_sign_that_policy_does_not_count_keeps_nothing_alive() -> None:
    desk = a_desk(idle=IDLE)
    desk.feed(seen(desk))
    told = []
    for _ in range(60):
        told += desk.wait(60)
        told += desk.feed(seen(desk, Activity.TERMINAL_BUSY, gpu=0.04))
    assert "JobStopping" in kinds(told)


@pytest.mark.parametrize("gpu", [0.05, 0.5])
def test_gpu_use_at_the_limit_is_work(gpu: float) -> None:
    desk = a_desk(idle=IDLE)
    desk.feed(seen(desk))
    assert kinds(idle_for(desk, 7200, gpu=gpu)) == []


def test_a_counted_sign_that_is_not_known_proves_nothing() -> None:
    desk = a_desk(idle=IDLE, telemetry={"stale_after": 300})
    desk.feed(seen(desk))
    told = idle_for(desk, 7200, gpu=None)
    assert kinds(told) == ["TelemetryStale"]


def test_without_any_report_nobody_is_idle() -> None:
    desk = a_desk(idle=IDLE)
    assert kinds(desk.wait(86400)) == []


def test_stamps_that_stand_still_prove_nothing_and_the_gap_does_not_count() -> None:
    desk = a_desk(idle=IDLE, telemetry={"stale_after": 300})
    desk.feed(seen(desk))
    idle_for(desk, 600)
    frozen = seen(desk)
    for _ in range(120):
        desk.wait(60)
        desk.feed(frozen)
    assert len(desk.all(TelemetryStale)) == 1
    assert desk.all(IdleWarned) == []
    desk.feed(seen(desk))
    assert "JobStopping" not in kinds(idle_for(desk, 2940))
    assert "JobStopping" in kinds(idle_for(desk, 120))


def test_a_node_whose_clock_is_wrong_is_judged_by_the_platforms_clock() -> None:
    desk = a_desk(idle=IDLE)
    for minute in range(30):
        desk.feed(seen(desk, stamp=-86400 + minute))
        desk.wait(60)
    assert desk.all(IdleWarned) == []


def test_idle_and_lifetime_are_for_interactive_jobs_unless_a_class_sets_its_own() -> None:
    desk = a_desk(job_class="training", idle=IDLE, lifetime={"max": 3600})
    desk.feed(seen(desk))
    assert kinds(idle_for(desk, 7200)) == []
    own = policy(2).model_copy(update={"document": {"classes": {"training": {"lifetime": {"max": 7300}}}}})
    desk.feed(own, registered("n2"))
    assert "JobStopping" in kinds(idle_for(desk, 7200))


def test_a_lifetime_ends_a_busy_job_after_a_warning_and_counts_from_the_first_start() -> None:
    desk = a_desk(lifetime={"max": 3600, "warn_before": 600})
    assert kinds(desk.wait(3000)) == ["LifetimeWarned"]
    assert desk.last(LifetimeWarned).extensions_left == 0
    assert kinds(desk.wait(600)) == ["JobStopping", "StopWorkers"]
    desk.feed(did_exit(), did_release())
    assert desk.last(JobReclaimed).cause.code is Code.LIFETIME


def test_a_lifetime_is_extended_as_often_as_policy_allows_and_warned_of_again() -> None:
    desk = a_desk(lifetime={"max": 3600, "warn_before": 600, "extend_by": 1800, "extensions": 1})
    desk.wait(3100)
    ask = [JobExtendRequested(job_id="j1", request_id=f"x{i}", requested_by="user:a") for i in (1, 2)]
    told = desk.feed(*ask)
    assert kinds(told) == ["JobExtended", "JobExtendRefused"]
    assert told[0].until == START + timedelta(seconds=5400)
    assert told[1].reason.code is Code.OVER_LIMIT
    assert kinds(desk.wait(2000)) == ["LifetimeWarned"]
    assert kinds(desk.wait(300)) == ["JobStopping", "StopWorkers"]


def test_evidence_survives_a_restart() -> None:
    desk = a_desk(idle=IDLE)
    desk.feed(seen(desk))
    idle_for(desk, 3000)
    desk.restart(LifecycleCore())
    assert "JobStopping" in kinds(idle_for(desk, 660))
