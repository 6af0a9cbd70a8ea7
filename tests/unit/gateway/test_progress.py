"""A job's events, in order, late, twice and out of order, become one truthful view."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from berth.contracts import events as ev
from berth.contracts.envelope import Envelope
from berth.contracts.events import Assignment
from berth.contracts.jobs import FINAL_STATES, JobState
from berth.contracts.reasons import Code, because
from services.gateway.progress import JobProgress

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)


def event(data: Any, minute: float = 0) -> Envelope[Any]:
    at = START + timedelta(minutes=minute)
    return Envelope[Any](id="e", type=data.TYPE, source="/berth/p/s", subject="j", time=at, data=data)


def placed(attempt: int = 1, *, workers: tuple[int, ...] = (0,), node: str = "n1") -> ev.JobPlaced:
    assignments = tuple(Assignment(worker=w, node=node, gpus=(f"G{w}",)) for w in workers)
    return ev.JobPlaced(job_id="j", attempt=attempt, fence=attempt, assignments=assignments)


def running(attempt: int = 1) -> ev.JobRunning:
    return ev.JobRunning(job_id="j", attempt=attempt, started_at=START)


def ended(attempt: int = 1) -> ev.AttemptEnded:
    return ev.AttemptEnded(
        job_id="j", attempt=attempt, fence=attempt, outcome=ev.AttemptOutcome.FAILED, exit_code=1, ended_at=START
    )


def requeued(attempt: int = 1) -> ev.JobRequeued:
    cause = because(Code.PROGRAM_FAILED)
    return ev.JobRequeued(job_id="j", after_attempt=attempt, not_before=START, cause=cause, charged=attempt)


def waiting(code: Code = Code.NO_FREE_GPUS) -> ev.JobWaiting:
    return ev.JobWaiting(job_id="j", reasons=(because(code, needed=1),))


def stopping(attempt: int = 1, workers: tuple[int, ...] | None = None) -> ev.JobStopping:
    return ev.JobStopping(job_id="j", attempt=attempt, cause=because(Code.CANCELLED), workers=workers)


FINALS = (
    ev.JobRefused(job_id="j", reasons=(because(Code.NEVER_FITS),), policy_version=1),
    ev.JobSucceeded(job_id="j", attempt=1, ended_at=START),
    ev.JobFailed(job_id="j", attempt=1, cause=because(Code.PROGRAM_FAILED), message="end", ended_at=START),
    ev.JobCancelled(job_id="j", ended_at=START),
    ev.JobReclaimed(job_id="j", attempt=1, cause=because(Code.IDLE), ended_at=START),
)


def told(*facts: Any) -> JobProgress:
    progress = JobProgress()
    for minute, fact in enumerate(facts):
        progress.apply(event(fact, minute))
        progress = JobProgress.from_json(progress.to_json())
    return progress


def test_a_plain_run() -> None:
    states = []
    progress = JobProgress()
    for fact in (waiting(), placed(), running(), ended(), FINALS[1]):
        progress.apply(event(fact))
        states.append(progress.state)
    assert states == ["waiting", "starting", "running", "stopping", "succeeded"]


def test_waiting_time_adds_up_over_attempts() -> None:
    progress = told(waiting(), placed(), running(), ended(), requeued(), placed(2))
    assert progress.waited_seconds == 120
    assert [attempt["attempt"] for attempt in progress.attempts] == [1, 2]


def test_a_backoff_is_a_reason_while_it_lasts() -> None:
    cause = because(Code.PROGRAM_FAILED)
    later = START + timedelta(minutes=10)
    progress = told(placed(), ended())
    progress.apply(event(ev.JobRequeued(job_id="j", after_attempt=1, not_before=later, cause=cause)))
    assert [reason["code"] for reason in progress.reasons] == ["program_failed", "backoff"]


@pytest.mark.parametrize("late", [waiting(), running(1), stopping(1), ended(1), requeued(1)])
def test_a_late_word_on_an_earlier_attempt_does_not_bring_it_back(late: Any) -> None:
    progress = told(placed(), running(), ended(), requeued(), placed(2), running(2))
    progress.apply(event(late))
    assert (progress.state, progress.attempt, progress.nodes) == ("running", 2, ["n1"])


@pytest.mark.parametrize("final", FINALS, ids=lambda f: type(f).__name__)
def test_a_final_state_has_no_way_out(final: Any) -> None:
    progress = told(placed(), final)
    state = progress.state
    assert JobState(state) in FINAL_STATES
    for late in (waiting(), placed(2), running(2), stopping(2), requeued(1), *FINALS):
        progress.apply(event(late))
    assert progress.state == state
    assert progress.nodes == []


def test_every_order_of_one_attempt_ends_the_same() -> None:
    facts = (placed(), running(), stopping(), ended(), FINALS[3])
    for order in itertools.permutations(facts):
        progress = told(*order)
        assert progress.state == "cancelled"
        assert progress.attempt in {0, 1}


def test_repeats_change_nothing() -> None:
    once = told(waiting(), placed(), running())
    twice = told(waiting(), placed(), placed(), running(), running())
    assert (once.state, once.nodes, once.attempts[0]["assignments"]) == (
        twice.state,
        twice.nodes,
        twice.attempts[0]["assignments"],
    )


def test_a_second_word_on_a_live_attempt_adds_workers() -> None:
    progress = told(placed(workers=(0,)), placed(workers=(1,), node="n2"))
    assert progress.nodes == ["n1", "n2"]
    assert [a["worker"] for a in progress.attempts[0]["assignments"]] == [0, 1]


def test_stopping_some_workers_does_not_stop_the_job() -> None:
    assert told(placed(workers=(0, 1)), running(), stopping(workers=(1,))).state == "running"


def test_a_silent_node_makes_it_unknown_until_it_is_heard() -> None:
    progress = told(placed(), running(), ev.JobUnknown(job_id="j", attempt=1, node="n1"))
    assert progress.state == "unknown"
    progress.apply(event(running()))
    assert progress.state == "running"


def test_only_the_last_attempts_are_kept() -> None:
    progress = JobProgress()
    for attempt in range(1, 121):
        for fact in (placed(attempt), ended(attempt), requeued(attempt)):
            progress.apply(event(fact))
    assert len(progress.attempts) == 50
    assert progress.attempts[-1]["attempt"] == 120
