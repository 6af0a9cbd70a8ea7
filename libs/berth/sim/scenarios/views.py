"""Jobs as users see them, kept from the events alone, the way the gateway does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from berth.contracts.envelope import Envelope
from berth.contracts.events import (
    Assignment,
    AttemptEnded,
    AttemptOutcome,
    JobAdmitted,
    JobCancelled,
    JobFailed,
    JobHeld,
    JobPlaced,
    JobReclaimed,
    JobRefused,
    JobRequeued,
    JobRunning,
    JobStopping,
    JobSubmitted,
    JobSucceeded,
    JobUnknown,
    JobWaiting,
    ServiceAdmitted,
    WorkerReady,
)
from berth.contracts.jobs import JobSpec, JobState
from berth.contracts.reasons import Code, Reason
from berth.decisions.serving.core import SERVICE_LABEL

NOTICES = frozenset({Code.PREEMPTED, Code.RECLAIM, Code.QUOTA_CUT})
"""Causes of a stop for another's sake, or for a line, a window or a quota."""


@dataclass(slots=True)
class Placed:
    """A worker's place under one fence."""

    fence: int
    assignment: Assignment


@dataclass(slots=True)
class JobSeen:
    """One job. workers: what it holds now, by worker; places: all it ever had, by attempt."""

    id: str
    spec: JobSpec
    submitted_at: datetime
    state: JobState = JobState.SUBMITTED
    attempt: int = 0
    workers: dict[int, Placed] = field(default_factory=dict)
    places: dict[int, dict[int, Placed]] = field(default_factory=dict)
    charged: int = 0
    reasons: tuple[Reason, ...] = ()
    cause: Reason | None = None
    notified_at: datetime | None = None
    notices: int = 0
    preemptions: int = 0
    trimmed: int = 0
    starts: int = 0
    was_stopped: bool = False
    stopped_by_platform: bool = False
    running_attempt: int = 0
    running_since: datetime | None = None
    service: str = ""
    is_ready: bool = False
    requested_by: str = ""

    @property
    def holds(self) -> bool:
        """Whether it holds anything."""
        return bool(self.workers)

    @property
    def nodes(self) -> list[str]:
        """Nodes it is on, sorted."""
        return sorted({placed.assignment.node for placed in self.workers.values()})


class Views:
    """All jobs, by id."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobSeen] = {}

    def take(self, event: Envelope[Any]) -> None:
        """Take in one event."""
        handler = _HANDLERS.get(type(event.data))
        if handler is not None:
            handler(self, event)

    def _submitted(self, event: Envelope[Any]) -> None:
        data = event.data
        if data.job_id not in self.jobs:
            self.jobs[data.job_id] = JobSeen(data.job_id, data.spec, data.submitted_at, requested_by=event.actor)

    def _admitted(self, event: Envelope[Any]) -> None:
        self._submitted(event)
        job = self.jobs[event.data.job_id]
        job.service = event.data.spec.labels.get(SERVICE_LABEL, "")
        if job.state is JobState.SUBMITTED:
            job.state = JobState.WAITING

    def _ready(self, event: Envelope[Any]) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is not None and job.attempt == event.data.attempt:
            job.is_ready = event.data.is_ready

    def _refused(self, event: Envelope[Any]) -> None:
        job = self.jobs[event.data.job_id]
        job.state, job.reasons = JobState.REFUSED, event.data.reasons

    def _waits(self, event: Envelope[Any]) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is not None and not job.state.is_final and not job.holds:
            job.state, job.reasons = JobState.WAITING, event.data.reasons

    def _placed(self, event: Envelope[Any]) -> None:
        data: JobPlaced = event.data
        job = self.jobs[data.job_id]
        if data.attempt > job.attempt or not job.holds:
            job.state, job.attempt, job.notified_at = JobState.STARTING, data.attempt, None
            job.starts += 1
            job.is_ready = False
        for assignment in data.assignments:
            placed = Placed(data.fence, assignment)
            job.workers[assignment.worker] = placed
            job.places.setdefault(data.attempt, {})[assignment.worker] = placed

    def _running(self, event: Envelope[Any]) -> None:
        job = self.jobs[event.data.job_id]
        if job.attempt == event.data.attempt and job.state in (JobState.STARTING, JobState.UNKNOWN, JobState.RUNNING):
            job.state = JobState.RUNNING
            job.running_attempt, job.running_since = event.data.attempt, event.data.started_at

    def _unknown(self, event: Envelope[Any]) -> None:
        job = self.jobs[event.data.job_id]
        if job.state is JobState.RUNNING:
            job.state = JobState.UNKNOWN

    def _stopping(self, event: Envelope[Any]) -> None:
        data: JobStopping = event.data
        job = self.jobs[data.job_id]
        if data.cause.code in NOTICES:
            job.notices += 1
            job.notified_at = event.time
        if data.workers is None:
            job.state, job.cause, job.is_ready = JobState.STOPPING, data.cause, False
            job.stopped_by_platform = True

    def _ended(self, event: Envelope[Any]) -> None:
        data: AttemptEnded = event.data
        job = self.jobs[data.job_id]
        if data.workers is not None:
            for worker in data.workers:
                job.workers.pop(worker, None)
            if data.outcome is AttemptOutcome.PREEMPTED:
                job.trimmed += len(data.workers)
            return
        job.workers, job.is_ready = {}, False
        job.running_since = None
        job.preemptions += data.outcome is AttemptOutcome.PREEMPTED
        job.was_stopped = data.outcome in (AttemptOutcome.PREEMPTED, AttemptOutcome.LOST)

    def _requeued(self, event: Envelope[Any]) -> None:
        job = self.jobs[event.data.job_id]
        job.state, job.charged = JobState.WAITING, event.data.charged

    def _final(self, event: Envelope[Any]) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is None:
            return
        job.state = _FINAL[type(event.data)]
        job.cause = getattr(event.data, "cause", None)


_FINAL: dict[type[Any], JobState] = {
    JobSucceeded: JobState.SUCCEEDED,
    JobFailed: JobState.FAILED,
    JobCancelled: JobState.CANCELLED,
    JobReclaimed: JobState.RECLAIMED,
}
_HANDLERS: dict[type[Any], Callable[[Views, Envelope[Any]], None]] = {
    JobSubmitted: Views._submitted,
    JobAdmitted: Views._admitted,
    ServiceAdmitted: Views._admitted,
    WorkerReady: Views._ready,
    JobRefused: Views._refused,
    JobHeld: Views._waits,
    JobWaiting: Views._waits,
    JobPlaced: Views._placed,
    JobRunning: Views._running,
    JobUnknown: Views._unknown,
    JobStopping: Views._stopping,
    AttemptEnded: Views._ended,
    JobRequeued: Views._requeued,
    **dict.fromkeys(_FINAL, Views._final),
}
