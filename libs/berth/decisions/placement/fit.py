"""Where a gang of whole-card workers fits: pure search over free counts, nothing is taken here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from berth.decisions.placement.claim import WorkerKind
from berth.decisions.placement.fleet import _RANKS, Card, Node, TypePool

Row = int


@dataclass(frozen=True, slots=True)
class Seat:
    """`workers` workers (numbers in the gang) of one kind on one node."""

    row: Row
    workers: tuple[int, ...]
    gpus: int
    role: str


def seat_workers(
    pool: TypePool,
    kinds: Sequence[WorkerKind],
    free: NDArray[np.int64],
    *,
    is_packed: bool,
    first_worker: int = 0,
    open_rows: NDArray[np.bool_] | None = None,
) -> list[Seat] | None:
    """Seats for all workers of `kinds`, or None where not all of them fit.

    Larger workers choose first, so that small ones do not break the room they need. Pack takes the fullest node that
    fits, for each worker; since a node that was chosen is fuller than before, that means filling nodes in order of
    free cards. Ties end on the node's name. Cost: one sort of the nodes for each kind.

    Args:
        free: free cards by row, as this job may use them (not changed).
        first_worker: number of the first worker.
        open_rows: nodes that workers without GPUs may use; None: those that take work.
    """
    if open_rows is None:
        open_rows = pool.usable > 0
    numbers: dict[int, range] = {}
    number = first_worker
    for position, kind in enumerate(kinds):
        numbers[position] = range(number, number + kind.count)
        number += kind.count
    if len(kinds) == 1 and kinds[0].count == 1:
        row = _one(pool, kinds[0].gpus, free, open_rows, is_packed=is_packed)
        return None if row is None else [Seat(row, (first_worker,), kinds[0].gpus, kinds[0].role)]
    left = free.copy()
    seats: list[Seat] = []
    for position in sorted(range(len(kinds)), key=lambda p: -kinds[p].gpus):
        kind = kinds[position]
        rows = _many(pool, kind, left, open_rows, is_packed=is_packed)
        if rows is None:
            return None
        waiting = iter(numbers[position])
        for row, count in rows:
            left[row] -= count * kind.gpus
            seats.append(Seat(row, tuple(next(waiting) for _ in range(count)), kind.gpus, kind.role))
    return seats


def _one(
    pool: TypePool, gpus: int, free: NDArray[np.int64], open_rows: NDArray[np.bool_], *, is_packed: bool
) -> Row | None:
    if not len(free):
        return None
    key = (free if is_packed else -free) * _RANKS + pool.rank
    fits = free >= gpus if gpus else open_rows
    row = int(np.where(fits, key, np.iinfo(np.int64).max).argmin())
    return row if fits[row] else None


def _many(
    pool: TypePool, kind: WorkerKind, free: NDArray[np.int64], open_rows: NDArray[np.bool_], *, is_packed: bool
) -> list[tuple[Row, int]] | None:
    candidates = np.flatnonzero(free >= kind.gpus if kind.gpus else open_rows)
    if not len(candidates):
        return None
    if kind.gpus == 0:
        best = candidates[np.argmin(free[candidates] * _RANKS + pool.rank[candidates])]
        return [(int(best), kind.count)]
    if not is_packed:
        return _spread(pool, kind, free, candidates)
    order = candidates[np.argsort(free[candidates] * _RANKS + pool.rank[candidates], kind="stable")]
    room = free[order] // kind.gpus
    filled = np.cumsum(room)
    if filled[-1] < kind.count:
        return None
    last = int(np.searchsorted(filled, kind.count))
    chosen = [(int(order[i]), int(room[i])) for i in range(last + 1)]
    row, count = chosen[last]
    chosen[last] = (row, count - (int(filled[last]) - kind.count))
    return chosen


def _spread(
    pool: TypePool, kind: WorkerKind, free: NDArray[np.int64], candidates: NDArray[np.int64]
) -> list[tuple[Row, int]] | None:
    import heapq

    heap = [(-int(free[row]), int(pool.rank[row]), int(row)) for row in candidates]
    heapq.heapify(heap)
    chosen: dict[Row, int] = {}
    for _ in range(kind.count):
        if not heap or -heap[0][0] < kind.gpus:
            return None
        negative, rank, row = heap[0]
        chosen[row] = chosen.get(row, 0) + 1
        heapq.heapreplace(heap, (negative + kind.gpus, rank, row))
    return list(chosen.items())


def choose_cards(node: Node, free: Sequence[Card], count: int, *, keeps_links_whole: bool) -> list[Card]:
    """Which `count` of a node's free cards a worker gets: linked ones together, whole link groups left alone.

    A worker of several cards goes into the link group it leaves least room in. One card, or what no group can hold,
    comes from broken groups first where links are to be kept whole, else from the lowest index.
    """
    if count == 0:
        return []
    if (count == 1 and not keeps_links_whole) or count == len(free):
        return list(free[:count])
    group_of = {index: number for number, group in enumerate(node.groups) for index in group}
    groups: dict[int, list[Card]] = {}
    for card in free:
        groups.setdefault(group_of.get(card.index, -1 - card.index), []).append(card)
    size = {number: len(node.groups[number]) if number >= 0 else 1 for number in groups}
    if count > 1:
        fitting = [number for number, cards in groups.items() if len(cards) >= count]
        if fitting:
            best = min(fitting, key=lambda number: (len(groups[number]), groups[number][0].index))
            return groups[best][:count]

    def order(number: int) -> tuple[bool, int, int]:
        is_whole = len(groups[number]) == size[number] and size[number] > 1
        return (is_whole, len(groups[number]) if count == 1 else -len(groups[number]), groups[number][0].index)

    chosen: list[Card] = []
    for number in sorted(groups, key=order):
        chosen += groups[number][: count - len(chosen)]
        if len(chosen) == count:
            break
    return sorted(chosen, key=lambda card: card.index)
