"""A job's way through the platform as its events tell it. Pure: events in, one small mutable record out.

Events of different senders may arrive late or out of order. A step of an attempt counts only if it lies ahead of what
is known, by (attempt, phase); a final state has no way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import orjson

from berth.contracts import events as ev
from berth.contracts.base import Wire
from berth.contracts.envelope import Envelope
from berth.contracts.jobs import FINAL_STATES, JobState
from berth.contracts.reasons import Code, Reason, because

WAITING_PHASE: Final = 0
PLACED_PHASE: Final = 1
RUNNING_PHASE: Final = 2
STOPPING_PHASE: Final = 3
ENDED_PHASE: Final = 4
REQUEUED_PHASE: Final = 5
MAX_ATTEMPTS_KEPT: Final = 50

_FINAL: Final[Mapping[type, JobState]] = {
    ev.JobRefused: JobState.REFUSED,
    ev.JobSucceeded: JobState.SUCCEEDED,
    ev.JobFailed: JobState.FAILED,
    ev.JobCancelled: JobState.CANCELLED,
    ev.JobReclaimed: JobState.RECLAIMED,
}


@dataclass(slots=True)
class JobProgress:
    """What has become of a job. Times are ISO texts, as they stood in the events.

    waits_since: None while it does not wait. attempts: the last `MAX_ATTEMPTS_KEPT`, as `AttemptView` in JSON.
    nodes: where the attempt at hand runs.
    """

    state: str = JobState.SUBMITTED.value
    attempt: int = 0
    phase: int = WAITING_PHASE
    reasons: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    waits_since: str | None = None
    waited_seconds: float = 0.0
    started_at: str | None = None
    ended_at: str | None = None
    charged: int = 0
    message: str = ""

    @classmethod
    def from_json(cls, body: bytes) -> JobProgress:
        """Read back what `to_json` wrote; a field that is missing has its default."""
        return cls(**orjson.loads(body))

    def to_json(self) -> bytes:
        """As stored."""
        return orjson.dumps(self)

    @property
    def is_final(self) -> bool:
        """Whether it can never change again."""
        return self.state in FINAL_STATES

    # --- events -----------------------------------------------------------------------------------------------------

    def apply(self, event: Envelope[Any]) -> bool:
        """Take in one event about this job; whether anything changed."""
        data = event.data
        if self.is_final and not isinstance(data, ev.AttemptEnded):
            return False
        handler = _HANDLERS.get(type(data))
        return handler is not None and bool(handler(self, data, event.time))

    def _advance(self, attempt: int, phase: int) -> bool:
        if (attempt, phase) <= (self.attempt, self.phase):
            return False
        self.attempt, self.phase = attempt, phase
        return True

    def _wait(self, reasons: Sequence[Reason], since: datetime) -> None:
        self.state = JobState.WAITING.value
        self.reasons = _json(reasons)
        if self.waits_since is None:
            self.waits_since = since.isoformat()

    def _stop_waiting(self, at: datetime) -> None:
        if self.waits_since is not None:
            self.waited_seconds += max(0.0, (at - datetime.fromisoformat(self.waits_since)).total_seconds())
            self.waits_since = None

    def _attempt(self, number: int) -> dict[str, Any]:
        known: dict[str, Any]
        for known in reversed(self.attempts):
            if known["attempt"] == number:
                return known
        made: dict[str, Any] = {"attempt": number, "fence": 0}
        self.attempts.append(made)
        self.attempts.sort(key=lambda attempt: int(attempt["attempt"]))
        del self.attempts[:-MAX_ATTEMPTS_KEPT]
        return made

    def _on_waiting(self, data: ev.JobWaiting | ev.JobHeld | ev.AdmissionWithdrawn, at: datetime) -> bool:
        if self.phase not in {WAITING_PHASE, REQUEUED_PHASE}:
            return False
        self._wait(data.reasons, at)
        return True

    def admit(self) -> bool:
        """It competes from now on. It has been waiting since it was submitted."""
        if self.phase != WAITING_PHASE or self.attempt or self.is_final or self.state == JobState.WAITING:
            return False
        self.state = JobState.WAITING.value
        return True

    def _on_placed(self, data: ev.JobPlaced, at: datetime) -> bool:
        attempt = self._attempt(data.attempt)
        placed = {a["worker"]: a for a in attempt.get("assignments", ())}
        for assignment in data.assignments:  # a second word on a live attempt adds workers to it
            placed[assignment.worker] = assignment.model_dump(mode="json", exclude_defaults=True)
        attempt["assignments"] = [placed[worker] for worker in sorted(placed)]
        attempt["fence"] = max(attempt["fence"], data.fence)
        attempt.setdefault("placed_at", at.isoformat())
        if self._advance(data.attempt, PLACED_PHASE):
            self.state = JobState.STARTING.value
            self.reasons = []
            self._stop_waiting(at)
        if data.attempt == self.attempt and self.phase < ENDED_PHASE:
            self.nodes = sorted({a["node"] for a in attempt["assignments"]})
        return True

    def _on_running(self, data: ev.JobRunning, _: datetime) -> bool:
        started = data.started_at.isoformat()
        self._attempt(data.attempt).setdefault("started_at", started)
        if self.started_at is None:
            self.started_at = started
        is_heard_again = data.attempt == self.attempt and self.phase == RUNNING_PHASE
        if is_heard_again or self._advance(data.attempt, RUNNING_PHASE):
            self.state = JobState.RUNNING.value
        return True

    def _on_unknown(self, data: ev.JobUnknown, _: datetime) -> bool:
        if data.attempt != self.attempt or self.phase not in {PLACED_PHASE, RUNNING_PHASE}:
            return False
        self.state = JobState.UNKNOWN.value
        return True

    def _on_stopping(self, data: ev.JobStopping, _: datetime) -> bool:
        if data.workers is not None or not self._advance(data.attempt, STOPPING_PHASE):
            return False
        self.state = JobState.STOPPING.value
        self.reasons = _json([data.cause])
        return True

    def _on_attempt_ended(self, data: ev.AttemptEnded, _: datetime) -> bool:
        if data.workers is not None:
            return False
        attempt = self._attempt(data.attempt)
        attempt["ended_at"] = data.ended_at.isoformat()
        attempt["outcome"] = data.outcome.value
        attempt["fence"] = data.fence
        attempt["exit_code"] = data.exit_code
        attempt["message"] = data.message[-4000:]
        if data.cause is not None:
            attempt["cause"] = _dump(data.cause)
        if not self.is_final and self._advance(data.attempt, ENDED_PHASE):
            self.state = JobState.STOPPING.value
            self.nodes = []
        return True

    def _on_requeued(self, data: ev.JobRequeued, at: datetime) -> bool:
        self.charged = max(self.charged, data.charged)
        if not self._advance(data.after_attempt, REQUEUED_PHASE):
            return True
        self.nodes = []
        backoff = because(Code.BACKOFF, until=data.not_before.isoformat()) if data.not_before > at else None
        self._wait([data.cause, *([backoff] if backoff else [])], at)
        return True

    def _on_final(self, data: Any, at: datetime) -> bool:
        self._stop_waiting(at)
        self.state = _FINAL[type(data)].value
        self.nodes = []
        self.attempt = max(self.attempt, getattr(data, "attempt", 0))
        self.phase = ENDED_PHASE
        self.ended_at = getattr(data, "ended_at", at).isoformat()
        cause: Reason | None = getattr(data, "cause", None)
        self.reasons = _json(getattr(data, "reasons", ())) or ([_dump(cause)] if cause is not None else [])
        self.message = getattr(data, "message", "")[-4000:]
        return True


def _dump(reason: Wire) -> dict[str, Any]:
    return reason.model_dump(mode="json", exclude_defaults=True)


def _json(reasons: Sequence[Reason]) -> list[dict[str, Any]]:
    return [_dump(reason) for reason in reasons]


_HANDLERS: Final[Mapping[type, Any]] = {
    ev.JobWaiting: JobProgress._on_waiting,
    ev.JobHeld: JobProgress._on_waiting,
    ev.AdmissionWithdrawn: JobProgress._on_waiting,
    ev.JobPlaced: JobProgress._on_placed,
    ev.JobRunning: JobProgress._on_running,
    ev.JobUnknown: JobProgress._on_unknown,
    ev.JobStopping: JobProgress._on_stopping,
    ev.AttemptEnded: JobProgress._on_attempt_ended,
    ev.JobRequeued: JobProgress._on_requeued,
    **dict.fromkeys(_FINAL, JobProgress._on_final),
}
