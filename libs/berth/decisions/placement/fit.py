"""Where workers fit: pure search over free counts and cards, nothing is taken here."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from berth.decisions.placement.claim import Shape, WorkerKind
from berth.decisions.placement.fleet import RANKS, Card, Fleet, Ints, Node, TypePool

Row = int
NODE_LEVEL = "node"
LINKS_LEVEL = "links"


@dataclass(frozen=True, slots=True)
class Seat:
    """`workers` workers (numbers in the gang) of one kind on one node. group: link group they must stay in."""

    row: Row
    workers: tuple[int, ...]
    gpus: int
    role: str
    group: int | None = None


def number_workers(kinds: Sequence[WorkerKind]) -> list[tuple[WorkerKind, tuple[int, ...]]]:
    """Each kind with the numbers of its workers in the gang."""
    numbered, number = [], 0
    for kind in kinds:
        numbered.append((kind, tuple(range(number, number + kind.count))))
        number += kind.count
    return numbered


Numbered = Sequence[tuple[WorkerKind, tuple[int, ...]]]


def seat_shape(
    pool: TypePool,
    shape: Shape,
    numbered: Numbered,
    free: Ints,
    fleet: Fleet,
    *,
    is_packed: bool,
    open_rows: NDArray[np.bool_] | None = None,
    when_empty: bool = False,
) -> list[Seat] | None:
    """Seats for all workers, in the topology domain that the shape asks for.

    A domain is chosen like a node: the fullest that fits (or the emptiest, to spread). A preferred domain gives way to
    the next wider level of the nodes' domains, then to no domain at all.

    Args:
        when_empty: look at link groups as if no card were held (for what could ever fit).
    """
    if shape.within is None:
        return seat_workers(pool, numbered, free, is_packed=is_packed, open_rows=open_rows)
    levels: list[str | None] = [shape.within]
    if not shape.is_required:
        levels += [*_wider(pool, shape.within), None]
    for level in levels:
        if level is None:
            return seat_workers(pool, numbered, free, is_packed=is_packed, open_rows=open_rows)
        for masked, group in _domains(pool, level, numbered, free, fleet, is_packed=is_packed, when_empty=when_empty):
            seats = seat_workers(pool, numbered, masked, is_packed=is_packed, open_rows=open_rows)
            if seats is not None:
                return seats if group is None else [replace(seat, group=group) for seat in seats]
    return None


def _wider(pool: TypePool, level: str) -> list[str]:
    """Levels above one, nearest first: link groups lie in nodes, nodes in the narrowest named level, and so on."""
    named: list[str] = []
    for node in pool.nodes:
        named += [name for name in node.changed.domain if name not in named]
    if level == LINKS_LEVEL:
        return [NODE_LEVEL, *reversed(named)]
    if level == NODE_LEVEL:
        return list(reversed(named))
    return list(reversed(named[: named.index(level)])) if level in named else []


def _domains(
    pool: TypePool, level: str, numbered: Numbered, free: Ints, fleet: Fleet, *, is_packed: bool, when_empty: bool
) -> Iterator[tuple[Ints, int | None]]:
    """Free cards masked to each domain with enough of them, best domain first, with the link group where it is one."""
    needed = sum(kind.count * kind.gpus for kind, _ in numbered)
    if level in (NODE_LEVEL, LINKS_LEVEL):
        rows = np.flatnonzero(free >= needed)
        sign = 1 if is_packed else -1
        order = rows[np.argsort(sign * free[rows] * RANKS + pool.rank[rows], kind="stable")]
        for row in order.tolist():
            if level == NODE_LEVEL:
                yield _only(free, row, int(free[row])), None
                continue
            node = pool.nodes[row]
            for group, count in group_room(node, pool.card_type, fleet, when_empty=when_empty):
                if count >= needed:
                    yield _only(free, row, count), group
        return
    totals = [(int(free[rows].sum()), name, rows) for name, rows in pool.domains(level).items()]
    position = {name: at for at, (_, name, _) in enumerate(totals)}
    for total, _, rows in sorted(totals, key=lambda t: (t[0] if is_packed else -t[0], position[t[1]])):
        if total >= needed:
            masked = np.zeros_like(free)
            masked[rows] = free[rows]
            yield masked, None


def _only(free: Ints, row: Row, count: int) -> Ints:
    masked = np.zeros_like(free)
    masked[row] = count
    return masked


def group_room(node: Node, card_type: str, fleet: Fleet, *, when_empty: bool = False) -> list[tuple[int, int]]:
    """Link groups of a node with their free cards, fewest first: what is broken is used before what is whole."""
    if when_empty:
        cards = [card for card in node.cards if card.card_type == card_type and card.mig is None]
    else:
        cards = fleet.free_cards(node, card_type)
    group_of = {index: number for number, group in enumerate(node.groups) for index in group}
    counts: dict[int, int] = {}
    for card in cards:
        number = group_of.get(card.index, -1 - card.index)
        counts[number] = counts.get(number, 0) + 1
    return sorted(counts.items(), key=lambda entry: (entry[1], entry[0] < 0, entry[0]))


def largest_in_domain(pool: TypePool, level: str, fleet: Fleet) -> int:
    """Most free cards in one domain of a level."""
    if level == NODE_LEVEL:
        return pool.largest_free()
    if level == LINKS_LEVEL:
        rooms = [group_room(node, pool.card_type, fleet) for node in pool.nodes]
        return max((count for room in rooms for _, count in room), default=0)
    return max((int(pool.free[rows].sum()) for rows in pool.domains(level).values()), default=0)


def seat_workers(
    pool: TypePool,
    numbered: Numbered,
    free: Ints,
    *,
    is_packed: bool,
    open_rows: NDArray[np.bool_] | None = None,
) -> list[Seat] | None:
    """Seats for all workers, or None where not all of them fit.

    Larger workers choose first, so that small ones do not break the room they need. Pack takes the fullest node that
    fits, for each worker; since a node that was chosen is fuller than before, that means filling nodes in order of
    free cards. Ties end on the node's name. Cost: one sort of the nodes for each kind.

    Args:
        free: free cards by row, as this job may use them (not changed).
        open_rows: nodes that workers without GPUs may use; None: those that take work.
    """
    if open_rows is None:
        open_rows = pool.usable > 0
    if len(numbered) == 1 and numbered[0][0].count == 1:
        kind, workers = numbered[0]
        row = _one(pool, kind.gpus, free, open_rows, is_packed=is_packed)
        return None if row is None else [Seat(row, workers, kind.gpus, kind.role)]
    left = free.copy()
    seats: list[Seat] = []
    for kind, workers in sorted(numbered, key=lambda entry: -entry[0].gpus):
        rows = _many(pool, kind, left, open_rows, is_packed=is_packed)
        if rows is None:
            return None
        waiting = iter(workers)
        for row, count in rows:
            left[row] -= count * kind.gpus
            seats.append(Seat(row, tuple(next(waiting) for _ in range(count)), kind.gpus, kind.role))
    return seats


def _one(pool: TypePool, gpus: int, free: Ints, open_rows: NDArray[np.bool_], *, is_packed: bool) -> Row | None:
    if not len(free):
        return None
    key = (free if is_packed else -free) * RANKS + pool.rank
    fits = free >= gpus if gpus else open_rows
    row = int(np.where(fits, key, np.iinfo(np.int64).max).argmin())
    return row if fits[row] else None


def _many(
    pool: TypePool, kind: WorkerKind, free: Ints, open_rows: NDArray[np.bool_], *, is_packed: bool
) -> list[tuple[Row, int]] | None:
    candidates = np.flatnonzero(free >= kind.gpus if kind.gpus else open_rows)
    if not len(candidates):
        return None
    if kind.gpus == 0:
        best = candidates[np.argmin(free[candidates] * RANKS + pool.rank[candidates])]
        return [(int(best), kind.count)]
    if not is_packed:
        return _spread(pool, kind, free, candidates)
    order = candidates[np.argsort(free[candidates] * RANKS + pool.rank[candidates], kind="stable")]
    room = free[order] // kind.gpus
    filled = np.cumsum(room)
    if filled[-1] < kind.count:
        return None
    last = int(np.searchsorted(filled, kind.count))
    chosen = [(int(order[i]), int(room[i])) for i in range(last + 1)]
    row, count = chosen[last]
    chosen[last] = (row, count - (int(filled[last]) - kind.count))
    return chosen


def _spread(pool: TypePool, kind: WorkerKind, free: Ints, candidates: Ints) -> list[tuple[Row, int]] | None:
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
