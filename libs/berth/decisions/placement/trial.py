"""What a change of policy would do at once, tried on a core rebuilt from the stored records.

Between two passes a state is settled: nothing can follow by itself. So whatever the first pass under another policy does
is what the change would do, found by the very code that would do it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from berth.contracts.envelope import Envelope
from berth.contracts.events import JobPlaced, PolicyActivated, PreemptionPlanned
from berth.contracts.reasons import Code, Reason, because
from berth.contracts.requests import AffectedJob, LineEffect, NeverStarts, PolicyEffects, QuotaCut
from berth.decisions.placement.claim import Claim, plain
from berth.decisions.placement.core import PlacementCore
from berth.decisions.placement.jobs import Job
from berth.decisions.placement.state import State
from berth.decisions.placement.turn import fits_when_empty, never_reason, options
from berth.decisions.policy.document import Policy, ProtectionLine, Reservation
from berth.decisions.policy.windows import is_open, next_change
from berth.decisions.quota.book import QuotaBook

LISTED = 200
"""Jobs that an answer names of each kind, at most."""
TRIED_UP_TO = 50_000
"""Jobs up to which a pass is tried: choosing among so many may take seconds, and takes them from the service."""


def policy_effects(records: Iterable[tuple[str, str, Any]], document: dict[str, Any], now: datetime) -> PolicyEffects:
    """What would follow at once if this document (right in form) were in force.

    records: of placement, as stored: kind, key, body. Costs rebuilding the state and one pass.
    """
    core = PlacementCore()
    core.restore(records, now=now)
    state, policy = core.state, core.policy
    version, state_version = state.policy_version, state.state_version
    new = Policy.from_document(document)
    book = _book_under(new, state)
    cuts = list(_cuts(state, book))
    never = list(_never(state, new, book))
    is_tried = len(state.jobs) <= TRIED_UP_TO
    stops, starts = _tried(core, document, now) if is_tried else ([], [])
    return PolicyEffects(
        policy_version=version,
        state_version=state_version,
        as_of=now,
        is_tried=is_tried,
        cuts=tuple(_with_stops(cut, stops) for cut in cuts),
        stops=tuple(stops[:LISTED]),
        stops_more=max(len(stops) - LISTED, 0),
        starts=tuple(starts[:LISTED]),
        starts_more=max(len(starts) - LISTED, 0),
        never=tuple(never[:LISTED]),
        never_more=max(len(never) - LISTED, 0),
        lines=tuple(_lines(policy, new, now)),
    )


# ------------------------------------------------------------------------------------------------------- one pass
def _tried(core: PlacementCore, document: dict[str, Any], now: datetime) -> tuple[list[AffectedJob], list[AffectedJob]]:
    """Who is told to stop and who starts in the first pass under the document; the core is used up by it."""
    core.settle(now=now)
    jobs = {job_id: _affected(job) for job_id, job in core.jobs.items()}
    activated = PolicyActivated(policy_version=core.policy_version + 1, document=document, author="")
    core.apply(
        Envelope[PolicyActivated](
            id="trial", type=PolicyActivated.TYPE, source="/trial", subject="trial", time=now, data=activated
        ),
        now=now,
    )
    stops: dict[str, AffectedJob] = {}
    starts: dict[str, AffectedJob] = {}
    for emission in core.settle(now=now).emissions:
        data = emission.data
        if isinstance(data, PreemptionPlanned):
            for victim in data.victims:
                workers = None if victim.workers is None else len(victim.workers)
                stopped = {"gpus": victim.gpus, "rule": data.rule, "workers": workers}
                stops[victim.job_id] = jobs[victim.job_id].model_copy(update=stopped)
        elif isinstance(data, JobPlaced):
            starts[data.job_id] = jobs[data.job_id]
    return list(stops.values()), list(starts.values())


def _affected(job: Job, rule: str = "") -> AffectedJob:
    claim = job.claim
    return AffectedJob(
        job_id=job.id,
        tenant=claim.tenant,
        job_class=claim.job_class.value,
        gpus=plain(job.amount or claim.shape.gpus),
        rule=rule,
    )


# ---------------------------------------------------------------------------------------------------------- quota
def _book_under(policy: Policy, state: State) -> QuotaBook:
    """What tenants hold, under the limits of another policy."""
    book = QuotaBook()
    book.set_policy(policy)
    for (card_type, tenant, _), amount in state.books.class_held.items():
        book.of(tenant, card_type).used += amount
    for job in state.books.placed.values():
        for entry in job.held:
            if job.leaves(entry.worker):
                book.of(job.claim.tenant, entry.card_type).leaving += entry.amount
    return book


def _cuts(state: State, book: QuotaBook) -> Iterator[QuotaCut]:
    """Tenants that would hold more than they may, with all of it draining."""
    for tenant, card_type in sorted({(t, c) for (c, t, _), amount in state.books.class_held.items() if amount}):
        over = book.excess(tenant, card_type)
        if over <= 0 or over <= state.books.quota.excess(tenant, card_type):
            continue
        standing = book.of(tenant, card_type)
        jobs = [job for job in _running(state, card_type) if job.claim.tenant == tenant]
        jobs.sort(key=lambda job: (-job.since, job.id))
        held = standing.used - standing.leaving
        yield QuotaCut(
            tenant=tenant,
            card_type=card_type,
            held=plain(held),
            may_hold=plain(max(held - over, 0)),
            over=plain(over),
            draining=plain(over),
            jobs=tuple(_affected(job) for job in jobs),
        )


def _with_stops(cut: QuotaCut, stops: Sequence[AffectedJob]) -> QuotaCut:
    """Of what is over, what would be stopped; jobs are cut to the bound."""
    told = {job.job_id: job for job in stops if job.rule == "quota_cut"}
    stopped = sum(told[job.job_id].gpus for job in cut.jobs if job.job_id in told)
    jobs = tuple(told.get(job.job_id, job) for job in cut.jobs[:LISTED])
    return cut.model_copy(update={"stopped": stopped, "draining": max(cut.over - stopped, 0), "jobs": jobs})


def _running(state: State, card_type: str) -> Iterator[Job]:
    for members in state.books.crews.get(card_type, {}).values():
        yield from (job for job in members.values() if not job.is_leaving)


# ------------------------------------------------------------------------------------------------- what never fits
def _never(state: State, new: Policy, book: QuotaBook) -> Iterator[NeverStarts]:
    """Waiting jobs that could start one day now and never under the new policy."""
    answers: dict[Claim, tuple[Reason, ...]] = {}
    for job in sorted(state.jobs.values(), key=lambda job: (job.submitted, job.id)):
        if job.held:
            continue
        if job.claim not in answers:
            was = _why_never(job.claim, state, state.policy, state.books.quota)
            answers[job.claim] = () if was else tuple(_why_never(job.claim, state, new, book))
        if answers[job.claim]:
            yield NeverStarts(job=_affected(job), reasons=answers[job.claim])


def _why_never(claim: Claim, state: State, policy: Policy, book: QuotaBook) -> list[Reason]:
    if policy.tenants and claim.tenant not in policy.tenants:
        return [because(Code.UNKNOWN_TENANT, tenant=claim.tenant, remedy="keep the tenant, or cancel its jobs")]
    fleet, shape = state.books.fleet, claim.shape
    reasons: list[Reason] = []
    for card_type in options(shape, fleet, policy):
        pool = fleet.pools.get(card_type)
        ceiling = book.ceiling(claim.tenant, card_type)
        if pool is None:
            reasons.append(because(Code.TYPE_UNAVAILABLE, card_type=card_type, needed=shape.gpus, free=0))
        elif ceiling is not None and shape.gpus > ceiling:
            reasons.append(
                because(
                    Code.QUOTA_FULL,
                    card_type=card_type,
                    needed=shape.gpus,
                    quota=plain(ceiling),
                    tenant=claim.tenant,
                    remedy=f"leave a quota (and borrowing) of {shape.gpus}, or have the job ask for less",
                )
            )
        elif not (shape.mix_types or fits_when_empty(shape, pool, fleet)):
            reasons.append(never_reason(shape, pool))
        else:
            return []
    return reasons


# ---------------------------------------------------------------------------------------------------------- lines
@dataclass(frozen=True, slots=True)
class _Kept:
    """A line or a reservation: what it says, and when it holds."""

    kind: str
    value: ProtectionLine | Reservation

    def is_open(self, at: datetime) -> bool:
        if isinstance(self.value, ProtectionLine):
            return is_open(self.value.windows, at)
        return self.value.from_ <= at < self.value.to

    def next_change(self, after: datetime) -> datetime | None:
        if isinstance(self.value, ProtectionLine):
            return next_change(self.value.windows, after) if self.value.windows else None
        return min((at for at in (self.value.from_, self.value.to) if at > after), default=None)


def _kept(policy: Policy) -> dict[tuple[str, str], _Kept]:
    lines = {("line", line.name): _Kept("line", line) for line in policy.protection}
    return lines | {("reservation", r.name): _Kept("reservation", r) for r in policy.reservations}


def _lines(old: Policy, new: Policy, now: datetime) -> Iterator[LineEffect]:
    before, after = _kept(old), _kept(new)
    for key in [*before, *(key for key in after if key not in before)]:
        was, will = before.get(key), after.get(key)
        if was == will:
            continue
        yield LineEffect(
            name=key[1],
            kind=key[0],
            change="new" if was is None else "removed" if will is None else "changed",
            was_open=was is not None and was.is_open(now),
            is_open=will is not None and will.is_open(now),
            next_change=None if will is None else will.next_change(now + timedelta(microseconds=1)),
        )
