"""The agent's record of one worker: from the accepted command to the confirmed release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final, TypedDict

from berth.contracts.events import WorkerExited, WorkerReleased, WorkerStarted
from berth.contracts.reasons import Code, Reason, because
from services.node_agent.process.runtime import StartRefused, WorkerExit, WorkerKey


class Phase(StrEnum):
    """Where a worker is. All survive a crash of the agent: they are in the journal.

    accepted --started--> running --exited--> exited --released--> released
       └──── refused, never started ──────────▶┘
    """

    ACCEPTED = "accepted"
    RUNNING = "running"
    EXITED = "exited"
    """No process is left; its cards may not be clean yet."""
    RELEASED = "released"


class Trigger(StrEnum):
    """What moves a worker on."""

    STARTED = "started"
    EXITED = "exited"
    RELEASED = "released"


TRANSITIONS: Final[Mapping[tuple[Phase, Trigger], Phase]] = {
    (Phase.ACCEPTED, Trigger.STARTED): Phase.RUNNING,
    (Phase.ACCEPTED, Trigger.EXITED): Phase.EXITED,
    (Phase.RUNNING, Trigger.EXITED): Phase.EXITED,
    (Phase.EXITED, Trigger.RELEASED): Phase.RELEASED,
}


class InvalidTransitionError(Exception):
    """A worker cannot do that in its phase."""


def advance(phase: Phase, trigger: Trigger) -> Phase:
    """The phase after `trigger`."""
    try:
        return TRANSITIONS[phase, trigger]
    except KeyError:
        raise InvalidTransitionError(f"{trigger} in {phase}") from None


Report = WorkerStarted | WorkerExited | WorkerReleased


class _Named(TypedDict):
    """What every report begins with."""

    job_id: str
    attempt: int
    fence: int
    worker: int
    node: str
    epoch: int


@dataclass(slots=True)
class Worker:
    """One worker of one attempt on this node. Times are the node's own, in seconds since 1970: information only."""

    node: str
    job_id: str
    attempt: int
    worker: int
    fence: int
    epoch: int
    command_id: str
    expires_at: float
    """When its command expired; afterwards a repeat would be refused anyway."""
    tenant: str = ""
    trace: str = ""
    gpus: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """What the program is given: the cards, or slices of them."""
    is_exclusive: bool = True
    grace_seconds: float = 30.0
    phase: Phase = Phase.ACCEPTED
    is_told: bool = False
    """Its release was confirmed by the bus."""
    pid: int = 0
    started_at: float = 0.0
    ended_at: float = 0.0
    exit_code: int | None = None
    signal: int | None = None
    reason: dict[str, Any] | None = None
    message: str = ""
    stop_grace_seconds: float | None = None
    """Asked to stop before its program ran."""
    stop_reason: str = ""

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.job_id, self.attempt, self.worker)

    @property
    def journal_key(self) -> str:
        """Key of its entry in the journal."""
        return f"{self.node}/{self.key.folder}"

    @property
    def is_live(self) -> bool:
        """Whether a process of it may hold its cards."""
        return self.phase in (Phase.ACCEPTED, Phase.RUNNING)

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> Worker:
        values = dict(entry)
        values["gpus"], values["devices"] = tuple(values["gpus"]), tuple(values["devices"])
        values["phase"] = Phase(values["phase"])
        return cls(**values)

    # -- what happens to it

    def on_started(self, pid: int, started_at: float) -> None:
        self.phase = advance(self.phase, Trigger.STARTED)
        self.pid, self.started_at = pid, started_at

    def on_refused(self, refused: StartRefused, at: float) -> None:
        """The program could not be started: the end of it, and the platform learns why."""
        self.phase = advance(self.phase, Trigger.EXITED)
        self.ended_at, self.message = at, refused.reason
        self._set_reason(because(Code.START_REFUSED, errno=refused.errno, error=refused.reason))

    def on_never_started(self, at: float) -> None:
        """The agent died between accepting and starting it; certain now that it will never start."""
        self.phase = advance(self.phase, Trigger.EXITED)
        self.ended_at = at
        self._set_reason(because(Code.WORKER_LOST, error="agent ended before the program was started"))

    def on_stopped_before_start(self, at: float) -> None:
        """It was told to stop before its program ran; it never will."""
        self.phase = advance(self.phase, Trigger.EXITED)
        self.ended_at = at
        self._set_reason(because(Code.CANCELLED, error="stopped before the program was started", why=self.stop_reason))

    def on_exited(self, ended: WorkerExit, message: str) -> None:
        self.phase = advance(self.phase, Trigger.EXITED)
        self.started_at = self.started_at or ended.started_at_ns / 1e9
        self.ended_at, self.message = ended.ended_at_ns / 1e9, message
        self.exit_code = ended.exit_code if ended.exit_code >= 0 else None
        self.signal = ended.signal or None
        if ended.is_lost:
            self._set_reason(because(Code.WORKER_LOST, error=ended.lost_reason))
        elif ended.stop_reason in OWN_STOPS:
            # Whatever code a program leaves with then, its work was cut short by the node: neither done nor its fault.
            self._set_reason(because(Code.WORKER_LOST, error=OWN_STOPS[ended.stop_reason]))
        elif ended.out_of_memory:
            self._set_reason(because(Code.PROGRAM_FAILED, out_of_memory=True, max_rss_kib=ended.max_rss_kib))

    def on_released(self) -> None:
        self.phase = advance(self.phase, Trigger.RELEASED)

    def _set_reason(self, reason: Reason) -> None:
        self.reason = reason.model_dump(mode="json")

    # -- what is told of it

    def reports(self) -> Iterator[Report]:
        """All that is known of it so far, in order; equal each time, so that repeats have no effect."""
        if self.started_at:
            yield self.started_report()
        if self.phase in (Phase.EXITED, Phase.RELEASED):
            yield self.exited_report()
        if self.phase is Phase.RELEASED:
            yield self.released_report()

    def started_report(self) -> WorkerStarted:
        return WorkerStarted(**self._named(), pid=self.pid, started_at=_instant(self.started_at))

    def exited_report(self) -> WorkerExited:
        return WorkerExited(
            **self._named(),
            exit_code=self.exit_code,
            signal=self.signal,
            reason=None if self.reason is None else Reason.model_validate(self.reason),
            message=self.message,
            ended_at=_instant(self.ended_at),
        )

    def released_report(self) -> WorkerReleased:
        return WorkerReleased(**self._named())

    def _named(self) -> _Named:
        return {
            "job_id": self.job_id,
            "attempt": self.attempt,
            "fence": self.fence,
            "worker": self.worker,
            "node": self.node,
            "epoch": self.epoch,
        }


LEASE: Final = "lease"
"""Stop reason of a worker whose node lost its lease; set by supervisors as well."""
AGENT_ENDS: Final = "agent ends its work"
NOT_KEPT: Final = "not kept"
OWN_STOPS: Final[Mapping[str, str]] = {
    LEASE: "lease ran out, the node stopped its own work",
    AGENT_ENDS: "the agent was told to end its work",
    NOT_KEPT: "the platform did not count on it any more",
}
"""Stops that no `StopWorkers` asked for, and what is told of them."""


def _instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
