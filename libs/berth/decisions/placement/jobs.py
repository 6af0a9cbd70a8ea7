"""A job as placement knows it, and its record."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from fractions import Fraction
from typing import Any

from berth.contracts.reasons import Code
from berth.decisions.placement.claim import Amount, Claim, claim_from_json
from berth.decisions.placement.parts import Part

MICROSECONDS = 1_000_000
ALL = -1
"""Stands for every worker in `Job.leaving`."""


def micros(moment: datetime) -> int:
    """Microseconds since 1970; exact, so that order and equality survive a record."""
    return round(moment.timestamp() * MICROSECONDS)


def moment(microseconds: int) -> datetime:
    """The reverse of `micros`, in UTC."""
    return datetime.fromtimestamp(microseconds / MICROSECONDS, UTC)


class Phase(StrEnum):
    """Where a job is, for placement.

    waiting: competes. resting: competes from `not_before` on. placed: holds GPUs. between: its attempt has ended and
    lifecycle has yet to say whether it comes again. withdrawn: admission took its admission back.
    """

    WAITING = "waiting"
    RESTING = "resting"
    PLACED = "placed"
    BETWEEN = "between"
    WITHDRAWN = "withdrawn"


@dataclass(slots=True)
class Held:
    """What one worker of a placed job holds. part: of its only card; None: whole cards. fence: of its placement."""

    worker: int
    node: str
    gpus: tuple[str, ...]
    card_type: str
    role: str = ""
    amount: Amount = 0
    part: Part | None = None
    memory_mib: int = 0
    fence: int = 0


@dataclass(slots=True, eq=False)
class Job:
    """Times in microseconds; 0: not yet.

    told: reason codes of the last JobWaiting. missing: workers of a placed job that still want a place. leaving: workers
    told to stop (`ALL`: the whole attempt), as far as placement knows or has asked for it. wake_at: when a rule that is
    in the way now ends by itself.
    """

    id: str
    claim: Claim
    submitted: int
    trace: str = ""
    phase: Phase = Phase.WAITING
    attempt: int = 0
    fence: int = 0
    placed_at: int = 0
    started_at: int = 0
    not_before: int = 0
    held: list[Held] = field(default_factory=list)
    told: tuple[Code, ...] | None = None
    missing: tuple[int, ...] = ()
    leaving: frozenset[int] = frozenset()
    wake_at: int = 0
    cause: str = ""

    @property
    def amount(self) -> Amount:
        """GPUs held."""
        return sum(held.amount for held in self.held)

    @property
    def is_leaving(self) -> bool:
        """Whether the whole attempt was told to stop."""
        return ALL in self.leaving

    def leaves(self, worker: int) -> bool:
        """Whether what this worker holds is coming free."""
        return ALL in self.leaving or worker in self.leaving

    @property
    def since(self) -> int:
        """When its latest start was: told by lifecycle, or as good as the placement."""
        return self.started_at or self.placed_at

    def to_json(self, emitted: int) -> dict[str, Any]:
        """The record; `emitted`: how many events about the job were sent."""
        body: dict[str, Any] = {
            "claim": self.claim.to_json(),
            "submitted": self.submitted,
            "phase": self.phase.value,
            "n": emitted,
        }
        if self.trace:
            body["trace"] = self.trace
        if self.attempt:
            body["attempt"] = self.attempt
            body["fence"] = self.fence
        if self.held:
            body["held"] = [held_to_json(held) for held in self.held]
            body["placed_at"] = self.placed_at
        if self.started_at:
            body["started_at"] = self.started_at
        if self.not_before:
            body["not_before"] = self.not_before
        if self.told is not None:
            body["told"] = [code.value for code in self.told]
        if self.missing:
            body["missing"] = list(self.missing)
        if self.leaving:
            body["leaving"] = sorted(self.leaving)
        if self.wake_at:
            body["wake_at"] = self.wake_at
        return body


def held_to_json(held: Held) -> list[Any]:
    """The compact form that records hold."""
    amount: int | str = int(held.amount) if held.amount.denominator == 1 else str(held.amount)
    body: list[Any] = [held.worker, held.node, list(held.gpus), held.card_type, held.role, amount, held.fence]
    if held.part is not None:
        share = None if held.part.share is None else str(held.part.share)
        body += [share, held.part.slice, held.memory_mib]
    return body


def held_from_json(body: list[Any]) -> Held:
    """The reverse of `held_to_json`."""
    worker, node, gpus, card_type, role, amount, fence = body[:7]
    held = Held(
        worker,
        node,
        tuple(gpus),
        card_type,
        role,
        amount if isinstance(amount, int) else Fraction(amount),
        fence=fence,
    )
    if len(body) > 7:
        share, profile, held.memory_mib = body[7:]
        held.part = Part(None if share is None else Fraction(share), profile)
    return held


def job_from_json(job_id: str, body: dict[str, Any], claims: dict[Claim, Claim]) -> Job:
    """The job in a record; `claims` makes equal claims one object."""
    claim = claim_from_json(body["claim"])
    return Job(
        id=job_id,
        claim=claims.setdefault(claim, claim),
        submitted=body["submitted"],
        trace=body.get("trace", ""),
        phase=Phase(body["phase"]),
        attempt=body.get("attempt", 0),
        fence=body.get("fence", 0),
        placed_at=body.get("placed_at", 0),
        started_at=body.get("started_at", 0),
        not_before=body.get("not_before", 0),
        held=[held_from_json(entry) for entry in body.get("held", ())],
        told=tuple(Code(code) for code in body["told"]) if "told" in body else None,
        missing=tuple(body.get("missing", ())),
        leaving=frozenset(body.get("leaving", ())),
        wake_at=body.get("wake_at", 0),
    )
