"""Where parts of cards fit: shares and GiB on shareable cards, slices on partitioned ones."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from berth.contracts.nodes import GpuHealthState
from berth.decisions.placement.claim import Shape, Unit
from berth.decisions.placement.fleet import Card, Fleet, Node, TypePool
from berth.decisions.placement.parts import Part, slice_amount, slice_room


def share_on(shape: Shape, card: Card) -> Fraction:
    """The part of a card that a worker needs: its share, or its GiB of the card's."""
    if shape.share is not None:
        return shape.share
    return Fraction(shape.memory_mib or 0, max(card.memory_mib, 1))


def part_amount(shape: Shape, pool: TypePool) -> Fraction:
    """GPUs that one worker counts for on a card type (cards of one type are alike)."""
    if shape.unit is Unit.SLICE:
        return slice_amount(shape.slice or "")
    if shape.share is not None:
        return shape.share
    for node in pool.nodes:
        for card in node.cards:
            if card.card_type == pool.card_type:
                return share_on(shape, card)
    return Fraction(1)


def _offers(fleet: Fleet, pool: TypePool, *, of_slices: bool, when_empty: bool) -> Iterator[tuple[int, Node, Card]]:
    for row, node in enumerate(pool.nodes):
        if not when_empty and not node.takes_work:
            continue
        if not of_slices and not node.changed.shareable:
            continue
        for card in node.cards:
            if card.card_type != pool.card_type or (card.mig is None) is of_slices:
                continue
            if not when_empty and (card.owner or card.health is not GpuHealthState.HEALTHY):
                continue
            yield row, node, card


def find_parts(
    fleet: Fleet,
    pool: TypePool,
    shape: Shape,
    count: int,
    *,
    is_packed: bool,
    recuts: bool = False,
    when_empty: bool = False,
) -> list[tuple[Node, Card, Part]] | None:
    """A card for each of `count` workers, or None where not all of them fit.

    Pack takes the fullest card that fits on the fullest node, spread the emptiest; ties end on node name and index.
    """
    if shape.unit is Unit.SLICE:
        return _find_slices(fleet, pool, shape, count, is_packed=is_packed, recuts=recuts, when_empty=when_empty)
    left: dict[str, tuple[Fraction, int, Node, Card]] = {}
    for row, node, card in _offers(fleet, pool, of_slices=False, when_empty=when_empty):
        room = Fraction(1) if when_empty else 1 - card.shared_out
        if room >= share_on(shape, card):
            left[card.uuid] = (room, row, node, card)
    found: list[tuple[Node, Card, Part]] = []
    for _ in range(count):
        fitting = [entry for entry in left.values() if entry[0] >= share_on(shape, entry[3])]
        if not fitting:
            return None
        room, row, node, card = min(
            fitting,
            key=lambda entry: (
                entry[0] if is_packed else -entry[0],
                int(pool.free[entry[1]]) * (1 if is_packed else -1),
                int(pool.rank[entry[1]]),
                entry[3].index,
            ),
        )
        share = share_on(shape, card)
        left[card.uuid] = (room - share, row, node, card)
        found.append((node, card, Part(share=share)))
    return found


def _find_slices(
    fleet: Fleet, pool: TypePool, shape: Shape, count: int, *, is_packed: bool, recuts: bool, when_empty: bool
) -> list[tuple[Node, Card, Part]] | None:
    profile = shape.slice or ""
    rooms: list[tuple[int, int, int, Node, Card]] = []
    for row, node, card in _offers(fleet, pool, of_slices=True, when_empty=when_empty):
        room = slice_room(card)
        if when_empty:
            room = type(room)(room.layout, {}, {})
        free = room.free(profile, recuts=recuts or when_empty)
        if free:
            rooms.append((free if is_packed else -free, int(pool.rank[row]), card.index, node, card))
    found: list[tuple[Node, Card, Part]] = []
    for free, _, _, node, card in sorted(rooms, key=lambda entry: entry[:3]):
        found += [(node, card, Part(slice=profile))] * min(abs(free), count - len(found))
        if len(found) == count:
            return found
    return None


def parts_free(fleet: Fleet, pool: TypePool, shape: Shape, *, recuts: bool) -> tuple[Fraction, Fraction]:
    """What is left of what the shape asks for: in all, and most on one card. GPUs, GiB or slices."""
    total, largest = Fraction(0), Fraction(0)
    for _, _, card in _offers(fleet, pool, of_slices=shape.unit is Unit.SLICE, when_empty=False):
        if shape.unit is Unit.SLICE:
            room = Fraction(slice_room(card).free(shape.slice or "", recuts=recuts))
        else:
            room = 1 - card.shared_out
            if shape.unit is Unit.MEMORY:
                room = room * card.memory_mib / 1024
        total, largest = total + room, max(largest, room)
    return total, largest
