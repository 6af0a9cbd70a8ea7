"""What lifecycle remembers: jobs with their attempt, workers, nodes. Plain values that a shell can store as JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from berth.contracts.jobs import JobState
from berth.decisions.lifecycle.states import WORKER_TRANSITIONS, WorkerPhase, WorkerTrigger, advance


class StopKind(StrEnum):
    """Why an attempt is being stopped; decides what the job comes to."""

    CANCEL = "cancel"
    TIME_LIMIT = "time_limit"
    RECLAIM = "reclaim"
    PREEMPT = "preempt"
    FAILURE = "failure"
    FAULT = "fault"


@dataclass(slots=True)
class Stop:
    """An order to stop that was given. cause: a reason as JSON. by: preemptor or user."""

    kind: StopKind
    cause: dict[str, Any]
    by: str
    at: datetime
    grace_seconds: int


@dataclass(slots=True)
class Worker:
    """One worker of the live attempt.

    fence: of the placement that gave it its cards. launch: number of the newest launch command for it (0: none), by
    which a refusal is told from one of an earlier command; stop: the same for stops. launch_again_at, stop_again_at:
    when to send it again. is_cut_off: its node was lost and the gang kept; it has certainly been stopped there, unless
    the node says otherwise. leaves: why this worker alone was told to stop, as JSON. reason: of its end, as JSON.
    """

    number: int
    node: str
    fence: int
    gpus: tuple[str, ...]
    card_type: str = ""
    role: str = ""
    gpu_milli: int = 1000
    memory_mib: int | None = None
    slice: str | None = None
    phase: WorkerPhase = WorkerPhase.ASSIGNED
    launch: int = 0
    has_started: bool = False
    is_lost: bool = False
    is_cut_off: bool = False
    launch_again_at: datetime | None = None
    stop: int = 0
    stop_again_at: datetime | None = None
    leaves: dict[str, Any] | None = None
    exit_code: int | None = None
    signal: int | None = None
    reason: dict[str, Any] | None = None
    message: str = ""

    def move(self, trigger: WorkerTrigger) -> None:
        """Go where `trigger` leads."""
        self.phase = advance(WORKER_TRANSITIONS, self.phase, trigger)

    @property
    def is_over(self) -> bool:
        """Whether it holds no card any more."""
        return self.phase is WorkerPhase.OVER

    @property
    def is_live(self) -> bool:
        """Whether a program of it may run."""
        return self.phase in (WorkerPhase.LAUNCHING, WorkerPhase.RUNNING)

    @property
    def has_failed(self) -> bool:
        """Whether its program ended other than well."""
        return bool(self.reason) or bool(self.signal) or bool(self.exit_code)

    @property
    def has_succeeded(self) -> bool:
        """Whether its program ended well."""
        return self.exit_code == 0 and not self.signal and not self.reason


@dataclass(slots=True)
class Evidence:
    """What an interactive job was seen doing. Times are the platform's, `stamps` (by worker) the nodes' own.

    active: workers seen at work. idle_seconds: idle time counted up to `fresh_at`, the last fresh report.
    """

    last_activity: datetime
    fresh_at: datetime | None = None
    stamps: dict[str, datetime] = field(default_factory=dict)
    active: list[int] = field(default_factory=list)
    was_active: bool = True
    idle_seconds: float = 0
    is_warned: bool = False
    is_stale: bool = False


@dataclass(slots=True)
class JobRun:
    """A job that was placed at least once.

    charged: restarts counted against max_restarts. unstarted: attempts in a row that never ran, by nobody's fault of
    the job; they are spaced out. told: number of the newest emission. stale: kinds of stale reports already noted.
    wake: when a timer of it falls due, at the latest. grace_until: a gang short of a worker is kept until then.
    extensions: of its lifetime; warned_of: the end of it that was last warned of.
    """

    job_id: str
    tenant: str
    trace: str = ""
    state: JobState = JobState.WAITING
    attempt: int = 0
    fence: int = 0
    workers: list[Worker] = field(default_factory=list)
    charged: int = 0
    unstarted: int = 0
    stop: Stop | None = None
    cancelled_by: str | None = None
    running_since: datetime | None = None
    first_started_at: datetime | None = None
    ended_at: datetime | None = None
    grace_until: datetime | None = None
    evidence: Evidence | None = None
    extensions: int = 0
    warned_of: datetime | None = None
    stale: list[str] = field(default_factory=list)
    told: int = 0
    wake: datetime | None = None

    @property
    def has_attempt(self) -> bool:
        """Whether an attempt is live."""
        return self.state in (JobState.STARTING, JobState.RUNNING, JobState.UNKNOWN, JobState.STOPPING)

    def worker(self, number: int) -> Worker | None:
        """The worker of that number, if it was placed."""
        at = bisect_left(self.workers, number, key=lambda w: w.number)
        found = self.workers[at] if at < len(self.workers) else None
        return found if found is not None and found.number == number else None

    def put(self, worker: Worker) -> None:
        """Add a worker, or take it in the place of one of the same number."""
        at = bisect_left(self.workers, worker.number, key=lambda w: w.number)
        if at < len(self.workers) and self.workers[at].number == worker.number:
            self.workers[at] = worker
        else:
            self.workers.insert(at, worker)


@dataclass(slots=True)
class Node:
    """What lifecycle knows of a node. told: number of the newest command to it."""

    node: str
    epoch: int = 0
    address: str = "127.0.0.1"
    is_silent: bool = False
    is_lost: bool = False
    told: int = 0


@dataclass(slots=True)
class Cancel:
    """A cancel request for a job that is not here yet."""

    by: str
    at: datetime


def by_node(workers: Iterable[Worker]) -> Iterator[tuple[str, list[Worker]]]:
    """Workers grouped by node, nodes in the order of their first worker."""
    groups: dict[str, list[Worker]] = {}
    for worker in workers:
        groups.setdefault(worker.node, []).append(worker)
    yield from groups.items()
