"""One job's turn: where it starts now, or everything that is in its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from berth.contracts.events import Assignment
from berth.contracts.nodes import GpuHealthState
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.placement.claim import Amount, Claim, Shape, Unit, WorkerKind, exact_ratio, plain
from berth.decisions.placement.fit import (
    LINKS_LEVEL,
    NODE_LEVEL,
    Numbered,
    Seat,
    choose_cards,
    largest_in_domain,
    number_workers,
    seat_shape,
    seat_workers,
)
from berth.decisions.placement.fit_parts import find_parts, part_amount, parts_free
from berth.decisions.placement.fleet import Card, Fleet, Ints, TypePool
from berth.decisions.placement.jobs import Held, Job, micros
from berth.decisions.placement.scene import Scene
from berth.decisions.policy.document import Policy

CANDIDATES = 3
"""Runners-up that a receipt keeps."""

ADD_NODES = "wait until a node with such cards joins, or name another card type"
REPAIR = "wait until the node or card is back, or ask the operator"
WAIT_FOR_ROOM = "wait until running jobs end, ask for fewer GPUs, or name another card type"
OWN_LIMITS = frozenset({Code.QUOTA_FULL, Code.BORROW_LIMIT, Code.LEND_LIMIT, Code.NOTHING_TO_BORROW})
"""Codes for which the tenant's limits, and no lack of cards, are in the way."""


@dataclass(slots=True)
class Turn:
    """What a turn found: `held` (starts), or reasons. filtered: nodes each filter removed."""

    held: list[Held] | None = None
    reasons: list[Reason] = field(default_factory=list)
    candidates: list[dict[str, Any]] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)


def options(shape: Shape, fleet: Fleet, policy: Policy) -> list[str]:
    """Card types to consider, in order: those asked for, or all the pool has by preference."""
    if shape.types:
        return list(shape.types)
    if len(fleet.pools) == 1:
        return list(fleet.pools)

    def order(card_type: str) -> tuple[int, str]:
        settings = policy.card_types.get(card_type)
        return (settings.preference if settings else 100, card_type)

    return sorted(fleet.pools, key=order)


def could_fit(shape: Shape, fleet: Fleet, policy: Policy) -> bool:
    """Whether free cards alone could let such a job start; quick, may say yes too often, never no wrongly."""
    if shape.unit is not Unit.WHOLE or shape.mix_types:
        return True
    least = 1 if not shape.is_gang else shape.min_workers
    for card_type in options(shape, fleet, policy):
        pool = fleet.pools.get(card_type)
        if pool is None:
            continue
        if least is not None:
            if pool.slots(min(kind.gpus for kind in shape.kinds)) >= least:
                return True
        elif pool.free_total >= shape.gpus and all(pool.slots(kind.gpus) >= kind.count for kind in shape.kinds):
            return True
    return False


def take_turn(
    claim: Claim,
    scene: Scene,
    *,
    types: Sequence[str] | None = None,
    job: Job | None = None,
    worker: int | None = None,
) -> Turn:
    """Find the first card type on which the job fits within every limit; nothing is taken.

    A gang is seated whole, an elastic gang with as many workers as fit, at least its fewest. Reasons are given for
    every type, most preferred first.

    Args:
        types: card types to look at; None: all that the claim accepts.
        job: given where workers join those that run: they stay on its card type and in its domain.
        worker: which of the job's workers; None: all that have no place.
    """
    shape = claim.shape
    numbered = _numbered(shape, job, worker)
    if shape.mix_types:
        return _mixed_turn(claim, scene, numbered)
    turn = Turn()
    if types is None:
        types = options(shape, scene.books.fleet, scene.policy)
    if job is not None and job.held:
        types = [job.held[0].card_type]
    for card_type in types:
        found = _on_type(claim, scene, card_type, numbered, turn, job)
        if found is None and shape.min_workers is not None and job is None:
            found = _fewer(claim, scene, card_type, numbered, turn)
        if found is not None:
            turn.held, turn.reasons = found, []
            return turn
    if not turn.reasons:
        turn.reasons.append(because(Code.TYPE_UNAVAILABLE, needed=shape.gpus, free=0, remedy=ADD_NODES))
    turn.reasons = distinct(turn.reasons)
    return turn


def _numbered(shape: Shape, job: Job | None, worker: int | None) -> Numbered:
    numbered = number_workers(shape.kinds)
    if worker is None and (job is None or not job.missing):
        return numbered
    wanted = {worker} if worker is not None else set(job.missing) if job is not None else set()
    kept = [(kind, tuple(number for number in numbers if number in wanted)) for kind, numbers in numbered]
    return [(replace(kind, count=len(numbers)), numbers) for kind, numbers in kept if numbers]


def _fewer(claim: Claim, scene: Scene, card_type: str, numbered: Numbered, turn: Turn) -> list[Held] | None:
    """Most workers, at least the fewest allowed, with which an elastic gang fits; taken from its last kind first."""
    least, most = claim.shape.min_workers or 1, claim.shape.workers - 1
    best: list[Held] | None = None
    while least <= most:
        middle = (least + most) // 2
        found = _on_type(claim, scene, card_type, _first_workers(numbered, middle), Turn(), None)
        if found is None:
            most = middle - 1
        else:
            best, least = found, middle + 1
    return best


def _first_workers(numbered: Numbered, count: int) -> Numbered:
    kept: list[tuple[WorkerKind, tuple[int, ...]]] = []
    for kind, numbers in numbered:
        some = numbers[: max(count, 0)]
        count -= len(some)
        if some:
            kept.append((replace(kind, count=len(some)), some))
    return kept


def _gpus(numbered: Numbered) -> int:
    return sum(kind.count * kind.gpus for kind, _ in numbered)


def _on_type(
    claim: Claim, scene: Scene, card_type: str, numbered: Numbered, turn: Turn, job: Job | None
) -> list[Held] | None:
    """Places on one card type, or None with the reasons added to the turn."""
    pool = scene.books.fleet.pools.get(card_type)
    shape = claim.shape
    if pool is None or not _has_cards(pool, shape):
        needed: Amount = _gpus(numbered) if shape.unit is Unit.WHOLE else sum(kind.count for kind, _ in numbered)
        turn.reasons.append(
            because(Code.TYPE_UNAVAILABLE, card_type=card_type, needed=plain(needed), free=0, remedy=ADD_NODES)
        )
        return None
    if shape.unit is not Unit.WHOLE:
        return _parts_on(claim, scene, pool, numbered, turn)
    needed = _gpus(numbered)
    found = _limits(claim, scene, pool, needed)
    if shape.gpus and claim.tenant:
        memory = scene.books.quota.memory_blocker(claim.tenant, needed * _card_memory(pool))
        found += [memory] if memory is not None else []
    free = _allowed_free(claim, scene, pool, job)
    settings = scene.policy.for_class(claim.job_class).placement
    is_packed = settings.strategy == "pack"
    if pool.free_total < needed:
        found += _no_room(claim, scene, pool, needed)
    elif not found:
        seats = seat_shape(pool, shape, numbered, free, scene.books.fleet, is_packed=is_packed)
        if seats is not None:
            _remember(turn, pool, seats, claim)
            return _hold(pool, seats, scene.books.fleet, keeps_links_whole=settings.keep_links_whole)
    if pool.free_total >= needed:
        found += _geometry(claim, scene, pool, numbered, free, needed)
    turn.reasons += found
    return None


def _has_cards(pool: TypePool, shape: Shape) -> bool:
    if shape.unit is Unit.WHOLE:
        return pool.total_cards > 0
    wants_slices = shape.unit is Unit.SLICE
    return any(
        card.card_type == pool.card_type and (card.mig is not None) is wants_slices
        for node in pool.nodes
        if wants_slices or node.changed.shareable
        for card in node.cards
    )


def _card_memory(pool: TypePool) -> int:
    for node in pool.nodes:
        for card in node.cards:
            if card.card_type == pool.card_type:
                return card.memory_mib
    return 0


def _allowed_free(claim: Claim, scene: Scene, pool: TypePool, job: Job | None) -> Ints:
    """Free cards by row, less what planned starts need while this job would run; in the domain of its other workers."""
    free = pool.free
    ends = None
    for shadow in scene.shadows.get(pool.card_type, ()):
        ends = scene.ends(claim) if ends is None else ends
        if ends > shadow.start and (job is None or job.id != shadow.job_id):
            free = np.minimum(free, np.maximum(shadow.spare[: len(free)], 0))
    within = claim.shape.within
    if job is not None and job.held and within is not None and claim.shape.is_required and claim.shape.is_gang:
        home = scene.books.fleet.nodes[job.held[0].node]
        name = home.name if within in (NODE_LEVEL, LINKS_LEVEL) else home.domain(within)
        same = [
            node.name == name if within in (NODE_LEVEL, LINKS_LEVEL) else node.domain(within) == name
            for node in pool.nodes
        ]
        free = np.where(np.array(same), free, 0)
    return free


def _limits(claim: Claim, scene: Scene, pool: TypePool, needed: Amount) -> list[Reason]:
    """Order, quota and kept capacity."""
    found: list[Reason] = []
    head = scene.heads.get(pool.card_type) or scene.tenant_heads.get((pool.card_type, claim.tenant))
    if head is not None and scene.policy.for_class(claim.job_class).queue.discipline == "strict":
        found.append(
            because(
                Code.BEHIND_IN_QUEUE,
                card_type=pool.card_type,
                needed=plain(needed),
                blocked_by=(head,),
                remedy="wait until the job ahead has started, or name another card type",
            )
        )
    over = scene.books.quota.blocker(claim.tenant, pool.card_type, needed)
    if over is not None:
        found.append(over)
    if scene.keeper.keeps_anything and needed:
        found += _kept(claim, scene, pool, needed)
    return found


def _kept(claim: Claim, scene: Scene, pool: TypePool, needed: Amount) -> list[Reason]:
    kept = scene.kept_from(claim, pool.card_type)
    total = sum(amount for _, amount in kept)
    found = []
    if kept and pool.free_total - needed < total:
        found = [_kept_reason(keep.code, keep.name, pool, needed, amount) for keep, amount in kept]
    ends = scene.ends(claim)
    for opening in scene.keeper.openings(scene.now):
        keep = opening.keep
        if (
            opening.card_type != pool.card_type
            or opening.blocks_from > scene.now
            or keep.covers(claim.tenant, claim.job_class)
            or ends <= micros(opening.at)
        ):
            continue
        at = micros(opening.at)
        coming = sum(
            entry.amount
            for other in scene.running(pool.card_type)
            if scene.end_of(other) <= at
            for entry in other.held
            if entry.card_type == pool.card_type and entry.part is None
        )
        short = scene.unfilled(keep, pool.card_type)
        others = sum(amount for other_keep, amount in kept if other_keep.name != keep.name)
        if pool.free_total + coming - needed < short + others:
            found.append(_kept_reason(keep.code, keep.name, pool, needed, short, until=opening.at.isoformat()))
    return found


def _kept_reason(
    code: Code, name: str, pool: TypePool, needed: Amount, kept: Amount, until: str | None = None
) -> Reason:
    return because(
        code,
        card_type=pool.card_type,
        needed=plain(needed),
        free=pool.free_total,
        kept=plain(kept),
        line=name,
        until=until,
        remedy="set a time limit that ends before the window opens, or wait until it is over"
        if until
        else "wait, ask for fewer GPUs, or name another card type",
    )


def _no_room(claim: Claim, scene: Scene, pool: TypePool, needed: int) -> list[Reason]:
    found = [
        because(
            Code.NO_FREE_GPUS,
            card_type=pool.card_type,
            needed=needed,
            free=pool.free_total,
            largest_on_one_node=pool.largest_free(),
            remedy=WAIT_FOR_ROOM,
        )
    ]
    on_hold = scene.books.on_hold.get(pool.card_type, 0)
    if on_hold and pool.free_total + on_hold >= needed:
        found.append(
            because(
                Code.HELD_FOR_PREEMPTOR,
                card_type=pool.card_type,
                needed=needed,
                free=pool.free_total,
                held=on_hold,
                blocked_by=tuple(sorted(p.job_id for p in scene.plans.values() if pool.card_type in p.needs)),
                remedy="wait until the job that the room was made for has started",
            )
        )
    out = _out_of_service(pool, scene.books.fleet)
    if out and pool.free_total + sum(count for _, count in out) >= needed:
        found += [
            because(code, card_type=pool.card_type, needed=needed, free=pool.free_total, out=count, remedy=REPAIR)
            for code, count in out
        ]
    if not fits_when_empty(claim.shape, pool, scene.books.fleet):
        found.append(never_reason(claim.shape, pool))
    return found


def never_reason(shape: Shape, pool: TypePool) -> Reason:
    """More than all installed cards of a type, empty and healthy, could hold."""
    largest = int(pool.total.max()) if len(pool.total) else 0
    installed = int(pool.total.sum())
    return because(
        Code.NEVER_FITS,
        card_type=pool.card_type,
        needed=shape.gpus or None,
        installed=installed,
        largest_on_one_node=largest,
        per_worker=shape.largest or None,
        remedy=f"ask for at most {largest} GPUs for each worker and {installed} in all",
    )


def fits_when_empty(shape: Shape, pool: TypePool, fleet: Fleet) -> bool:
    """Whether the installed cards of a type, all of them empty and healthy, could hold the job (at its smallest)."""
    known = pool.ever.get(shape)
    if known is None:
        known = pool.ever[shape] = _fits_when_empty(shape, pool, fleet)
    return known


def _fits_when_empty(shape: Shape, pool: TypePool, fleet: Fleet) -> bool:
    workers = 1 if not shape.is_gang else shape.min_workers
    numbered = number_workers(shape.kinds)
    if workers is not None:
        numbered = list(_first_workers(numbered, workers))
    if shape.unit is not Unit.WHOLE:
        count = sum(kind.count for kind, _ in numbered)
        return find_parts(fleet, pool, shape, count, is_packed=True, recuts=True, when_empty=True) is not None
    opens = pool.total > 0
    if shape.within is not None and not shape.is_required:
        return seat_workers(pool, numbered, pool.total, is_packed=True, open_rows=opens) is not None
    seats = seat_shape(pool, shape, numbered, pool.total, fleet, is_packed=True, open_rows=opens, when_empty=True)
    return seats is not None


def _out_of_service(pool: TypePool, fleet: Fleet) -> list[tuple[Code, int]]:
    """Cards nobody holds that take no work, by the reason why."""
    if pool.usable_cards == pool.total_cards:
        return []
    unhealthy, unclean = 0, 0
    for node in pool.nodes:
        for card in node.cards:
            if card.card_type != pool.card_type or card.owner or card.parts or card.mig is not None:
                continue
            if card.health is GpuHealthState.NOT_CLEAN:
                unclean += 1
            elif not fleet.is_free(node, card):
                unhealthy += 1
    return [(c, n) for c, n in ((Code.GPU_NOT_CLEAN, unclean), (Code.NODE_UNHEALTHY, unhealthy)) if n]


def _geometry(claim: Claim, scene: Scene, pool: TypePool, numbered: Numbered, free: Ints, needed: int) -> list[Reason]:
    """Enough cards are free, yet not where they are needed: broken up, in several domains, or kept for a later start."""
    shape, fleet = claim.shape, scene.books.fleet
    facts: dict[str, Any] = {
        "card_type": pool.card_type,
        "needed": needed,
        "free": pool.free_total,
        "largest_on_one_node": pool.largest_free(),
    }
    found: list[Reason] = []
    if free is not pool.free and seat_shape(pool, shape, numbered, pool.free, fleet, is_packed=True) is not None:
        shadows = scene.shadows.get(pool.card_type, ())
        found.append(
            because(
                Code.WOULD_DELAY_RESERVED_JOB,
                blocked_by=tuple(shadow.job_id for shadow in shadows),
                remedy="set a time limit that ends before the planned start",
                **facts,
            )
        )
        return found
    if seat_shape(pool, shape, numbered, free, fleet, is_packed=True) is not None:
        return found
    if shape.within is not None and shape.is_required:
        found.append(
            because(
                Code.TOPOLOGY,
                within=shape.within,
                largest_in_domain=largest_in_domain(pool, shape.within, fleet),
                remedy=f"make {shape.within} preferred instead of required, or ask for fewer GPUs",
                **facts,
            )
        )
    if seat_workers(pool, numbered, pool.free, is_packed=True) is None:
        largest = pool.largest_free()
        found.append(
            because(
                Code.FRAGMENTED,
                per_worker=shape.largest,
                remedy=f"ask for at most {largest} GPUs for each worker",
                **facts,
            )
        )
    if not fits_when_empty(shape, pool, fleet):
        found.append(never_reason(shape, pool))
    return found


def _parts_on(claim: Claim, scene: Scene, pool: TypePool, numbered: Numbered, turn: Turn) -> list[Held] | None:
    """Places for parts of cards, or None with the reasons added to the turn."""
    shape, fleet = claim.shape, scene.books.fleet
    settings = scene.policy.for_class(claim.job_class)
    workers = [(kind.role, number) for kind, numbers in numbered for number in numbers]
    each = part_amount(shape, pool)
    found = _limits(claim, scene, pool, each * len(workers))
    memory = int(each * _card_memory(pool)) * len(workers)
    over = scene.books.quota.memory_blocker(claim.tenant, memory)
    found += [over] if over is not None else []
    recuts = settings.mig.repartition == "idle_room"
    places = find_parts(
        fleet, pool, shape, len(workers), is_packed=settings.placement.strategy == "pack", recuts=recuts
    )
    if places is None:
        found.append(_part_reason(shape, fleet, pool, len(workers), recuts=recuts))
        if not fits_when_empty(shape, pool, fleet):
            found.append(never_reason(shape, pool))
    if places is None or found:
        turn.reasons += found
        return None
    turn.candidates = [{"node": node.name, "gpu": card.uuid, "chosen": True} for node, card, _ in places[:CANDIDATES]]
    return [
        Held(
            number,
            node.name,
            (card.uuid,),
            pool.card_type,
            role,
            each,
            part=part,
            memory_mib=shape.memory_mib or int(each * card.memory_mib),
        )
        for (role, number), (node, card, part) in zip(workers, places, strict=True)
    ]


def _part_reason(shape: Shape, fleet: Fleet, pool: TypePool, workers: int, *, recuts: bool) -> Reason:
    total, largest = parts_free(fleet, pool, shape, recuts=recuts)
    if shape.unit is Unit.SLICE:
        return because(
            Code.SLICE_UNAVAILABLE,
            card_type=pool.card_type,
            needed=workers,
            free=plain(total),
            slice=shape.slice,
            remedy="wait until a slice is free, or ask for another profile",
        )
    if shape.unit is Unit.MEMORY:
        return because(
            Code.MEMORY_FULL,
            card_type=pool.card_type,
            needed=plain(exact_ratio((shape.memory_mib or 0) * workers, 1024)),
            free=plain(total),
            largest_on_one_card=plain(largest),
            unit="GiB",
            remedy=f"ask for at most {float(largest):g} GiB, or wait until others on the card end",
        )
    code = Code.FRAGMENTED if total >= (shape.share or 0) * workers else Code.NO_FREE_GPUS
    return because(
        code,
        card_type=pool.card_type,
        needed=plain((shape.share or 0) * workers),
        free=plain(total),
        largest_on_one_card=plain(largest),
        remedy=WAIT_FOR_ROOM,
    )


def _mixed_turn(claim: Claim, scene: Scene, numbered: Numbered) -> Turn:
    """Seat as many workers as fit on each type in order, until all are seated."""
    turn = Turn()
    held: list[Held] = []
    left = numbered
    for card_type in options(claim.shape, scene.books.fleet, scene.policy):
        low, high = 0, sum(kind.count for kind, _ in left)
        best: list[Held] = []
        while low < high:
            middle = (low + high + 1) // 2
            found = _on_type(claim, scene, card_type, _first_workers(left, middle), turn, None)
            if found is None:
                high = middle - 1
            else:
                low, best = middle, found
        held += best
        done = {entry.worker for entry in held}
        kept = [(kind, tuple(n for n in numbers if n not in done)) for kind, numbers in left]
        left = [(replace(kind, count=len(numbers)), numbers) for kind, numbers in kept if numbers]
        if not left:
            turn.held, turn.reasons = sorted(held, key=lambda entry: entry.worker), []
            return turn
    turn.reasons = distinct(turn.reasons)
    return turn


def distinct(reasons: list[Reason]) -> list[Reason]:
    """Each code once for each card type, in the order given."""
    seen: dict[tuple[Code, object], Reason] = {}
    for reason in reasons:
        seen.setdefault((reason.code, reason.facts.get("card_type")), reason)
    return list(seen.values())


def _hold(pool: TypePool, seats: list[Seat], fleet: Fleet, *, keeps_links_whole: bool) -> list[Held]:
    taken: dict[int, list[Card]] = {}
    held: list[Held] = []
    for seat in seats:
        node = pool.nodes[seat.row]
        free = taken.get(seat.row)
        if free is None:
            free = fleet.free_cards(node, pool.card_type)
        for worker in seat.workers:
            offered = free
            if seat.group is not None:
                indices = set(node.groups[seat.group]) if seat.group >= 0 else {-1 - seat.group}
                offered = [card for card in free if card.index in indices]
            cards = choose_cards(node, offered, seat.gpus, keeps_links_whole=keeps_links_whole)
            if len(free) == len(cards):
                free = []
            elif cards:
                chosen = {card.uuid for card in cards}
                free = [card for card in free if card.uuid not in chosen]
            held.append(
                Held(
                    worker,
                    node.name,
                    tuple(card.uuid for card in cards),
                    pool.card_type,
                    seat.role,
                    seat.gpus,
                    memory_mib=sum(card.memory_mib for card in cards),
                )
            )
        taken[seat.row] = free
    held.sort(key=lambda entry: entry.worker)
    return held


def _remember(turn: Turn, pool: TypePool, seats: list[Seat], claim: Claim) -> None:
    """Winner and a few runners-up, with the free cards they had."""
    chosen = list(dict.fromkeys(seat.row for seat in seats))[:CANDIDATES]
    turn.candidates = [{"node": pool.nodes[row].name, "free": int(pool.free[row]), "chosen": True} for row in chosen]
    by_rank = pool.by_rank
    fits = by_rank[pool.free[by_rank] >= claim.shape.largest]
    for row in fits[: 2 * CANDIDATES].tolist() if len(chosen) < CANDIDATES else ():
        if row not in chosen and len(turn.candidates) < CANDIDATES:
            turn.candidates.append({"node": pool.nodes[row].name, "free": int(pool.free[row]), "chosen": False})
    turn.filtered = {"too_full": len(pool.nodes) - len(fits)}


def to_assignments(held: Sequence[Held]) -> tuple[Assignment, ...]:
    """Held cards as they stand in events."""
    return tuple(
        Assignment(worker=h.worker, node=h.node, gpus=h.gpus, card_type=h.card_type, role=h.role)
        if h.part is None
        else Assignment(
            worker=h.worker,
            node=h.node,
            gpus=h.gpus,
            card_type=h.card_type,
            role=h.role,
            gpu_milli=max(int(h.amount * 1000), 1),
            memory_mib=h.memory_mib,
            slice=h.part.slice,
        )
        for h in held
    )


__all__ = ["Turn", "could_fit", "fits_when_empty", "never_reason", "options", "take_turn", "to_assignments"]
