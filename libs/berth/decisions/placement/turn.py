"""One job's turn: where it starts now, or everything that is in its way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from berth.contracts.events import Assignment
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.placement.claim import Claim, Shape
from berth.decisions.placement.fit import Seat, choose_cards, seat_workers
from berth.decisions.placement.fleet import Card, TypePool
from berth.decisions.placement.jobs import Held
from berth.decisions.placement.ledger import Ledger
from berth.decisions.policy.document import Policy

CANDIDATES = 3
"""Runners-up that a receipt keeps."""


@dataclass(slots=True)
class Turn:
    """What a turn found: `held` (starts), or reasons. filtered: nodes each filter removed."""

    held: list[Held] | None = None
    reasons: list[Reason] = field(default_factory=list)
    candidates: list[dict[str, Any]] = field(default_factory=list)
    filtered: dict[str, int] = field(default_factory=dict)


def options(shape: Shape, ledger: Ledger, policy: Policy) -> list[str]:
    """Card types to consider, in order: those asked for, or all the pool has by preference."""
    if shape.types:
        return list(shape.types)

    if len(ledger.fleet.pools) == 1:
        return list(ledger.fleet.pools)

    def order(card_type: str) -> tuple[int, str]:
        settings = policy.card_types.get(card_type)
        return (settings.preference if settings else 100, card_type)

    return sorted(ledger.fleet.pools, key=order)


def could_fit(shape: Shape, ledger: Ledger, policy: Policy) -> bool:
    """Whether free cards alone could let such a job start; quick, may say yes too often, never no wrongly."""
    for card_type in options(shape, ledger, policy):
        pool = ledger.fleet.pools.get(card_type)
        if pool is None or pool.free_total < shape.gpus:
            continue
        if all(pool.slots(kind.gpus) >= kind.count for kind in shape.kinds):
            return True
    return False


def take_turn(claim: Claim, ledger: Ledger, policy: Policy) -> Turn:
    """Find the first card type on which the whole gang fits within quota.

    Reasons are given for every type, most preferred first; nothing is taken.
    """
    turn = Turn()
    for card_type in options(claim.shape, ledger, policy):
        found = blockers(claim, card_type, ledger)
        if found:
            turn.reasons += found
            continue
        pool = ledger.fleet.pools[card_type]
        settings = policy.for_class(claim.job_class).placement
        seats = seat_workers(pool, claim.shape.kinds, pool.free, is_packed=settings.strategy == "pack")
        if seats is None:
            turn.reasons.append(_does_not_fit(claim, pool))
            continue
        turn.held = _hold(pool, seats, ledger, keeps_links_whole=settings.keep_links_whole)
        _remember(turn, pool, seats, claim)
        return turn
    if not turn.reasons:
        turn.reasons.append(because(Code.TYPE_UNAVAILABLE, needed=claim.shape.gpus, free=0, remedy=ADD_NODES))
    turn.reasons = distinct(turn.reasons)
    return turn


ADD_NODES = "wait until a node with such cards joins, or name another card type"


def distinct(reasons: list[Reason]) -> list[Reason]:
    """Each code once for each card type, in the order given."""
    seen: dict[tuple[Code, object], Reason] = {}
    for reason in reasons:
        seen.setdefault((reason.code, reason.facts.get("card_type")), reason)
    return list(seen.values())


def blockers(claim: Claim, card_type: str, ledger: Ledger) -> list[Reason]:
    """Everything but the nodes' geometry that keeps a job off a card type now."""
    needed = claim.shape.gpus
    pool = ledger.fleet.pools.get(card_type)
    if pool is None or not pool.total.any():
        return [because(Code.TYPE_UNAVAILABLE, card_type=card_type, needed=needed, free=0, remedy=ADD_NODES)]
    found: list[Reason] = []
    over = ledger.quota.blocker(claim.tenant, card_type, needed)
    if over is not None:
        found.append(over)
    if pool.free_total < needed:
        found.append(_no_free(claim, pool))
        out = _out_of_service(pool, ledger)
        if out and pool.free_total + sum(count for _, count in out) >= needed:
            found += [
                because(code, card_type=card_type, needed=needed, free=pool.free_total, out=count, remedy=REPAIR)
                for code, count in out
            ]
    elif over is not None and not all(pool.slots(kind.gpus) >= kind.count for kind in claim.shape.kinds):
        found.append(_does_not_fit(claim, pool))
    return found


REPAIR = "wait until the node or card is back, or ask the operator"


def _out_of_service(pool: TypePool, ledger: Ledger) -> list[tuple[Code, int]]:
    """Cards nobody holds that take no work, by the reason why."""
    unhealthy, unclean = 0, 0
    if int(pool.usable.sum()) == int(pool.total.sum()):
        return []
    from berth.contracts.nodes import GpuHealthState

    for node in pool.nodes:
        for card in node.cards:
            if card.card_type != pool.card_type or card.owner or card.description.mig is not None:
                continue
            if card.health is GpuHealthState.NOT_CLEAN:
                unclean += 1
            elif not ledger.fleet.is_free(node, card):
                unhealthy += 1
    return [(c, n) for c, n in ((Code.GPU_NOT_CLEAN, unclean), (Code.NODE_UNHEALTHY, unhealthy)) if n]


def _no_free(claim: Claim, pool: TypePool) -> Reason:
    return because(
        Code.NO_FREE_GPUS,
        card_type=pool.card_type,
        needed=claim.shape.gpus,
        free=pool.free_total,
        largest_on_one_node=pool.largest_free(),
        remedy="wait until running jobs end, ask for fewer GPUs, or name another card type",
    )


def _does_not_fit(claim: Claim, pool: TypePool) -> Reason:
    return because(
        Code.FRAGMENTED,
        card_type=pool.card_type,
        needed=claim.shape.gpus,
        free=pool.free_total,
        largest_on_one_node=pool.largest_free(),
        per_worker=claim.shape.largest,
        remedy=f"ask for at most {pool.largest_free()} GPUs for each worker",
    )


def _hold(pool: TypePool, seats: list[Seat], ledger: Ledger, *, keeps_links_whole: bool) -> list[Held]:
    taken: dict[int, list[Card]] = {}
    held: list[Held] = []
    for seat in seats:
        node = pool.nodes[seat.row]
        free = taken.get(seat.row)
        if free is None:
            free = ledger.fleet.free_cards(node, pool.card_type)
        for worker in seat.workers:
            cards = choose_cards(node, free, seat.gpus, keeps_links_whole=keeps_links_whole)
            chosen = {card.uuid for card in cards}
            free = [card for card in free if card.uuid not in chosen]
            held.append(
                Held(worker, node.name, tuple(card.uuid for card in cards), pool.card_type, seat.role, seat.gpus)
            )
        taken[seat.row] = free
    held.sort(key=lambda entry: entry.worker)
    return held


def _remember(turn: Turn, pool: TypePool, seats: list[Seat], claim: Claim) -> None:
    """Winner and a few runners-up, with the free cards they had."""
    chosen = list(dict.fromkeys(seat.row for seat in seats))[:CANDIDATES]
    turn.candidates = [{"node": pool.nodes[row].name, "free": int(pool.free[row]), "chosen": True} for row in chosen]
    fits = np.flatnonzero(pool.free >= claim.shape.largest)
    for row in fits[: 2 * CANDIDATES].tolist() if len(chosen) < CANDIDATES else ():
        if row not in chosen and len(turn.candidates) < CANDIDATES:
            turn.candidates.append({"node": pool.nodes[row].name, "free": int(pool.free[row]), "chosen": False})
    turn.filtered = {"too_full": len(pool.nodes) - len(fits)}


def to_assignments(held: list[Held]) -> tuple[Assignment, ...]:
    """Held cards as they stand in events."""
    return tuple(
        Assignment(worker=h.worker, node=h.node, gpus=h.gpus, card_type=h.card_type, role=h.role) for h in held
    )
