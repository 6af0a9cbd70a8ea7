"""What placement looked at, as candidates of receipts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from berth.decisions.placement.claim import Shape, plain
from berth.decisions.placement.fleet import Fleet
from berth.decisions.placement.jobs import Held
from berth.decisions.placement.turn import options
from berth.decisions.policy.document import Policy
from berth.decisions.preemption.victims import Piece

TYPES_SHOWN = 3
SPARED_SHOWN = 3


def types_considered(shape: Shape, fleet: Fleet, policy: Policy) -> list[dict[str, Any]]:
    """The first card types a waiting job was tried on, with what they had."""
    found: list[dict[str, Any]] = []
    for card_type in options(shape, fleet, policy)[:TYPES_SHOWN]:
        pool = fleet.pools.get(card_type)
        free, largest = (0, 0) if pool is None else (int(pool.free_total), int(pool.largest_free()))
        found.append({"card_type": card_type, "free": free, "largest_on_one_node": largest, "chosen": False})
    return found


def nodes_chosen(held: Sequence[Held]) -> list[dict[str, Any]]:
    """Nodes of a place that was decided on before: the room that was made for the job."""
    return [{"node": node, "chosen": True} for node in dict.fromkeys(entry.node for entry in held)]


def victims_considered(taken: Sequence[Piece], considered: Sequence[Piece]) -> list[dict[str, Any]]:
    """Who is stopped, then some who were spared; what speaks for and against each."""
    chosen = {id(piece) for piece in taken}
    spared = [piece for piece in considered if id(piece) not in chosen][:SPARED_SHOWN]
    return [_victim(piece, is_chosen=True) for piece in taken] + [_victim(piece, is_chosen=False) for piece in spared]


def _victim(piece: Piece, *, is_chosen: bool) -> dict[str, Any]:
    return {
        "job_id": piece.job.id,
        "gpus": plain(piece.total),
        "priority": piece.priority,
        "borrowed": piece.is_borrowed,
        "chosen": is_chosen,
    }
