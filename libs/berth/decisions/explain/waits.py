"""Answers about waiting jobs and standings, computed when asked, with current numbers."""

from __future__ import annotations

from bisect import bisect_left
from datetime import datetime

from berth.contracts.base import JobClass
from berth.contracts.reasons import Code, Reason, because
from berth.contracts.requests import JobExplained, QuotaAnswer, QuotaLine
from berth.decisions.placement.claim import Amount, Claim, Shape, WorkerKind, plain
from berth.decisions.placement.jobs import Job, Phase, moment
from berth.decisions.placement.round import waiting_for
from berth.decisions.placement.scene import Scene
from berth.decisions.placement.state import State
from berth.decisions.placement.turn import options, take_turn
from berth.decisions.preemption.plan import blocked_reasons, make_room

BLOCKERS_NAMED = 20
"""Jobs named as holding what is missing, at most."""

_OWN = frozenset({Code.QUOTA_FULL, Code.BORROW_LIMIT})
_LENT = frozenset({Code.LEND_LIMIT, Code.NOTHING_TO_BORROW})


def explain_job(state: State, job_id: str, now: datetime) -> JobExplained:
    """All blockers of a waiting job, with numbers, who holds what is missing, and its place in the queue."""
    job = state.jobs.get(job_id)
    common = {"policy_version": state.policy_version, "state_version": state.state_version, "as_of": now}
    if job is None:
        return JobExplained(job_id=job_id, is_known=False, **common)
    waits = job.phase is Phase.WAITING or (job.phase is Phase.PLACED and bool(job.missing))
    if job.phase is Phase.RESTING:
        reasons: tuple[Reason, ...] = (
            because(
                Code.BACKOFF,
                until=moment(job.not_before).isoformat(),
                remedy="wait, or cancel it and mend the program",
            ),
        )
    elif waits:
        reasons = waiting_reasons(state, job, now)
    else:
        return JobExplained(job_id=job_id, is_known=True, state=job.phase.value, **common)
    return JobExplained(
        job_id=job_id,
        is_known=True,
        state="waiting" if job.phase is not Phase.PLACED else job.phase.value,
        reasons=reasons,
        place=place_in_queue(state, job) if waits else None,
        waiting=state.waiting.size + len(state.plans),
        **common,
    )


def waiting_reasons(state: State, job: Job, now: datetime) -> tuple[Reason, ...]:
    """Current reasons, each with the jobs that hold what is missing."""
    state.now = max(now, state.now)
    scene = _scene_for(state, job)
    plan = state.plans.get(job.id)
    if plan is not None:
        return (waiting_for(plan, scene),)
    joins = job if job.held or not job.claim.shape.is_gang else None
    worker = None if joins is None or job.claim.shape.is_gang else min(job.missing or (0,))
    turn = take_turn(job.claim, scene, job=joins, worker=worker)
    if turn.held is not None:
        # It fits, so the order of the last pass is in the way: shares have moved on since, the pass has not.
        turn = take_turn(job.claim, _scene_for(state, job, as_it_was=True), job=joins, worker=worker)
    reasons = list(turn.reasons)
    if turn.held is not None:
        reasons = [because(code, remedy="wait for the next pass") for code in job.told or ()]
    if state.preempts(job.claim.job_class):
        types = options(job.claim.shape, state.books.fleet, state.policy)
        making = make_room(job, scene, state.caps(job.claim))
        reasons += blocked_reasons(making.blocked, types[0] if types else None, job.claim.shape.gpus)
    reasons += _overtaken(state, job)
    if not reasons:
        # the last pass had no cause to look at this queue: the answer it once gave still stands
        reasons = [because(code, remedy="wait for the next pass") for code in job.told or ()]
    return tuple(
        reason if reason.blocked_by else reason.model_copy(update={"blocked_by": _holders(state, job, reason)})
        for reason in reasons
    )


def _scene_for(state: State, job: Job, *, as_it_was: bool = False) -> Scene:
    """The last pass's view, less what the job itself laid claim to in it, and (by the order of now) those behind it."""
    scene = state.new_scene()
    last = state.scene
    if last is not None:
        scene.shadows = {
            card_type: [shadow for shadow in shadows if shadow.job_id != job.id]
            for card_type, shadows in last.shadows.items()
        }
        scene.heads = {card_type: head for card_type, head in last.heads.items() if head != job.id}
        scene.tenant_heads = {key: head for key, head in last.tenant_heads.items() if head != job.id}
        if as_it_was:
            return scene
        mine = state.order_of(job)
        heads = {*scene.heads.values(), *scene.tenant_heads.values()} & set(state.jobs)
        ahead = {other for other in heads if state.order_of(state.jobs[other]) < mine}
        scene.heads = {card_type: head for card_type, head in scene.heads.items() if head in ahead}
        scene.tenant_heads = {key: head for key, head in scene.tenant_heads.items() if head in ahead}
        scene.shadows = {
            card_type: [s for s in shadows if s.job_id in state.jobs and state.order_of(state.jobs[s.job_id]) < mine]
            for card_type, shadows in scene.shadows.items()
        }
    return scene


def _overtaken(state: State, job: Job) -> list[Reason]:
    """Where shares decide: another tenant of equal priority that came later and is served first."""
    claim = job.claim
    if state.policy.for_class(claim.job_class).fair_share.basis == "none":
        return []
    mine = state.share(claim)
    for group in state.waiting.groups():
        other = group.claim
        if other.priority != claim.priority or other.tenant == claim.tenant:
            continue
        share = state.share(other)
        if share < mine:
            return [
                because(
                    Code.FAIR_SHARE,
                    blocked_by=(group.head[1],),
                    share=round(mine, 6) if mine != float("inf") else None,
                    other_share=round(share, 6),
                    remedy="wait: tenants that had less are served first",
                )
            ]
    return []


def _holders(state: State, job: Job, reason: Reason) -> tuple[str, ...]:
    card_type = reason.facts.get("card_type")
    if reason.code in (Code.BACKOFF, Code.NEVER_FITS, Code.TYPE_UNAVAILABLE):
        return ()
    held: list[tuple[Amount, str]] = []
    cohort = state.books.quota.of(job.claim.tenant, str(card_type)).cohort
    for other in state.books.placed.values():
        tenant = other.claim.tenant
        if reason.code in _OWN and tenant != job.claim.tenant:
            continue
        if reason.code in _LENT and state.books.quota.of(tenant, str(card_type)).cohort != cohort:
            continue
        amount = sum(entry.amount for entry in other.held if card_type in (None, entry.card_type))
        if amount:
            held.append((-amount, other.id))
    return tuple(job_id for _, job_id in sorted(held)[:BLOCKERS_NAMED])


def place_in_queue(state: State, job: Job) -> int:
    """Waiting jobs that are served before this one, plus one."""
    mine = state.order_of(job)
    before = sum(state.order_of(state.jobs[other]) < mine for other in state.plans if other != job.id)
    for group in state.waiting.groups():
        other = (-group.claim.priority, state.share(group.claim))
        if other < mine[:2]:
            before += len(group.jobs)
        elif other == mine[:2]:
            before += bisect_left(group.jobs, (job.submitted, job.id))
    return before + 1


def quota_answer(state: State, tenant: str | None, now: datetime | None) -> QuotaAnswer:
    """Standing of one tenant, or of all, on every card type they have a limit on or hold."""
    book = state.books.quota
    pairs = {(name, card_type) for name, card_type, _ in book.used_lines()}
    for name, settings in state.policy.tenants.items():
        pairs |= {(name, card_type) for card_type in settings.quota}
    wanted: dict[tuple[str, str], Amount] = {}
    for group in state.waiting.groups():
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
    return QuotaAnswer(lines=tuple(lines), policy_version=state.policy_version, as_of=now)


_NOBODY = Claim("", JobClass.GENERAL, 0, Shape((WorkerKind("", 1, 1),)))
"""A job of no special claim: no line and no reservation is for it."""


def free_on_node(state: State, node_name: str, now: datetime) -> int:
    """Whole free cards on a node that are not held for anybody, less what must stay free for others in the pool."""
    node = state.books.fleet.nodes.get(node_name)
    if node is None:
        return 0
    state.now = max(now, state.now)
    scene = state.new_scene()
    total = 0
    for card_type in node.rows:
        free = len(state.books.fleet.free_cards(node, card_type))
        kept = sum(
            scene.unfilled(keep, card_type)
            for keep in state.keeper.active(card_type, state.now)
            if keep.job_class is not _NOBODY.job_class
        )
        total += max(min(free, state.books.fleet.pools[card_type].free_total - int(kept)), 0)
    return total
