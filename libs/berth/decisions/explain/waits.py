"""Answers about waiting jobs and standings, computed when asked, with current numbers."""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime
from typing import TYPE_CHECKING

from berth.contracts.reasons import Code, Reason, because
from berth.contracts.requests import JobExplained, QuotaAnswer, QuotaLine
from berth.decisions.placement.claim import Amount, plain
from berth.decisions.placement.jobs import Job, Phase, moment
from berth.decisions.placement.turn import take_turn

if TYPE_CHECKING:
    from berth.decisions.placement.core import PlacementCore

BLOCKERS_NAMED = 20
"""Jobs named as holding what is missing, at most."""

WEIGHT: dict[Code, int] = {code: place for place, code in enumerate(Code)}


def explain_job(core: PlacementCore, job_id: str, now: datetime) -> JobExplained:
    """All blockers of a waiting job, with numbers, who holds what is missing, and its place in the queue."""
    job = core.jobs.get(job_id)
    common = {"policy_version": core.policy_version, "state_version": core.state_version, "as_of": now}
    if job is None:
        return JobExplained(job_id=job_id, is_known=False, **common)
    if job.phase is Phase.RESTING:
        reasons: tuple[Reason, ...] = (
            because(
                Code.BACKOFF,
                until=moment(job.not_before).isoformat(),
                remedy="wait, or cancel it and mend the program",
            ),
        )
    elif job.phase is Phase.WAITING:
        reasons = waiting_reasons(core, job)
    else:
        return JobExplained(job_id=job_id, is_known=True, state=job.phase.value, **common)
    return JobExplained(
        job_id=job_id,
        is_known=True,
        state="waiting",
        reasons=reasons,
        place=place_in_queue(core, job) if job.phase is Phase.WAITING else None,
        waiting=core.waiting.size,
        **common,
    )


def waiting_reasons(core: PlacementCore, job: Job) -> tuple[Reason, ...]:
    """Current reasons, each with the jobs that hold what is missing."""
    turn = take_turn(job.claim, core.books, core.policy)
    return tuple(
        reason.model_copy(update={"blocked_by": _holders(core, job, reason)}) if not reason.blocked_by else reason
        for reason in turn.reasons
    )


def _holders(core: PlacementCore, job: Job, reason: Reason) -> tuple[str, ...]:
    card_type = reason.facts.get("card_type")
    own_only = reason.code in (Code.QUOTA_FULL, Code.BORROW_LIMIT)
    held: list[tuple[Amount, str]] = []
    for other in core.books.placed.values():
        if own_only and other.claim.tenant != job.claim.tenant:
            continue
        amount = sum(entry.amount for entry in other.held if entry.card_type == card_type)
        if amount:
            held.append((-amount, other.id))
    return tuple(job_id for _, job_id in sorted(held)[:BLOCKERS_NAMED])


def place_in_queue(core: PlacementCore, job: Job) -> int:
    """Waiting jobs that are served before this one, plus one."""
    before = 0
    for group in core.waiting.groups():
        if group.claim.priority > job.claim.priority:
            before += len(group.jobs)
        elif group.claim.priority == job.claim.priority:
            before += bisect_left(group.jobs, (job.submitted, job.id))
    return before + 1


def quota_answer(core: PlacementCore, tenant: str | None, now: datetime | None) -> QuotaAnswer:
    """Standing of one tenant, or of all, on every card type they have a limit on or hold."""
    book = core.books.quota
    pairs = {(name, card_type) for name, card_type, _ in book.used_lines()}
    for name, settings in core.policy.tenants.items():
        pairs |= {(name, card_type) for card_type in settings.quota}
    wanted: dict[tuple[str, str], Amount] = {}
    for group in core.waiting.groups():
        for card_type in group.claim.shape.types[:1]:
            key = (group.claim.tenant, card_type)
            wanted[key] = wanted.get(key, 0) + group.claim.shape.gpus * len(group.jobs)
    lines = []
    for name, card_type in sorted(pairs | set(wanted)):
        if tenant is not None and name != tenant:
            continue
        standing = book.of(name, card_type)
        lines.append(
            QuotaLine(
                tenant=name,
                card_type=card_type,
                quota=None if standing.quota is None else plain(standing.quota),
                used=plain(standing.used),
                borrowed=plain(standing.borrowed),
                can_borrow=plain(book.can_borrow(name, card_type)) if standing.cohort else None,
                waiting=plain(wanted.get((name, card_type), 0)),
            )
        )
    return QuotaAnswer(lines=tuple(lines), policy_version=core.policy_version, as_of=now)
