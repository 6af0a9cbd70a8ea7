"""The nodes and cards of a pool, and which cards are free, kept so that a search costs one array operation.

A card is in one of these hands: nobody's, an attempt's, held for a job that others make room for, or shared out in
parts. Free counts cover whole cards that are nobody's, healthy, on a node that takes new work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from berth.contracts.events import NodeChanged
from berth.contracts.nodes import GpuDescription, GpuHealthState, MigLayout, NodeState
from berth.decisions.placement.parts import Part, slice_room

_PARTS = re.compile(r"(\d+)")
RANKS = 1 << 24
"""More nodes than any pool has; keys are `free * RANKS + rank`."""
Ints = NDArray[np.int64]


def natural_key(name: str) -> tuple[object, ...]:
    """Sorts n2 before n10."""
    return tuple(int(part) if part.isdigit() else part for part in _PARTS.split(name))


@dataclass(slots=True)
class Card:
    """One card. owner: job id of the attempt that holds it, or `hold:<job id>`; empty: nobody's. parts: who has which
    part of it, by `<job id>/<worker>`. cut: slices cut so far, in use or not."""

    uuid: str
    index: int
    card_type: str
    memory_mib: int
    health: GpuHealthState
    description: GpuDescription
    owner: str = ""
    parts: dict[str, Part] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    is_sound: bool = field(init=False)

    def __post_init__(self) -> None:
        """A card is offered whole where it is healthy and not partitioned."""
        self.is_sound = self.health is GpuHealthState.HEALTHY and self.description.mig is None

    @property
    def mig(self) -> MigLayout | None:
        """How it is partitioned, if it is."""
        return self.description.mig

    @property
    def shared_out(self) -> Fraction:
        """The part of it that is given out in shares."""
        return sum((part.share for part in self.parts.values() if part.share), Fraction(0))


@dataclass(slots=True)
class Node:
    """One node as last told."""

    name: str
    changed: NodeChanged
    cards: list[Card]
    groups: tuple[tuple[int, ...], ...]
    by_uuid: dict[str, Card]
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def takes_work(self) -> bool:
        """Whether it may get new work."""
        return self.changed.state is NodeState.READY and not self.changed.cordoned

    def domain(self, level: str) -> str:
        """Its place on a level; a node without one is its own domain."""
        return self.changed.domain.get(level, f"={self.name}")


@dataclass(slots=True)
class TypePool:
    """All nodes with cards of one type. Arrays are by row; a row is never reused for another node.

    total: cards that could be whole, whatever their state. version: grows with each change of `free`.
    """

    card_type: str
    nodes: list[Node] = field(default_factory=list)
    free: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    usable: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    total: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    free_total: int = 0
    total_cards: int = 0
    usable_cards: int = 0
    version: int = 0
    shape_version: int = 0
    _rank: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _by_rank: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    _domains: dict[str, tuple[int, dict[str, Ints]]] = field(default_factory=dict)
    _slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    ever: dict[object, bool] = field(default_factory=dict)
    """What could fit if all were empty, by shape: kept until a node changes."""

    def add_row(self, node: Node) -> int:
        """A row for a node that has just shown a card of this type."""
        self.nodes.append(node)
        for name in ("free", "usable", "total"):
            setattr(self, name, np.append(getattr(self, name), 0))
        return len(self.nodes) - 1

    @property
    def rank(self) -> Ints:
        """Place of each row's node among all names: ties end on it. Sorted anew only when nodes have joined."""
        if len(self._rank) != len(self.nodes):
            order = sorted(range(len(self.nodes)), key=lambda row: natural_key(self.nodes[row].name))
            self._rank = np.empty(len(order), dtype=np.int64)
            self._rank[order] = np.arange(len(order))
        return self._rank

    @property
    def by_rank(self) -> Ints:
        """Rows in order of the nodes' names."""
        if len(self._by_rank) != len(self.nodes):
            self._by_rank = np.argsort(self.rank)
        return self._by_rank

    def domains(self, level: str) -> dict[str, Ints]:
        """Rows of each domain of a level, in order of the domains' names."""
        known = self._domains.get(level)
        if known is None or known[0] != self.shape_version:
            rows: dict[str, list[int]] = {}
            for row, node in enumerate(self.nodes):
                rows.setdefault(node.domain(level), []).append(row)
            arrays = {name: np.array(rows[name], dtype=np.int64) for name in sorted(rows, key=natural_key)}
            known = self._domains[level] = (self.shape_version, arrays)
        return known[1]

    def slots(self, gpus: int) -> int:
        """Workers of `gpus` cards each that fit now, node by node. Asked often between changes, so kept."""
        if gpus == 0:
            return 1 << 40 if len(self.nodes) else 0
        known = self._slots.get(gpus)
        if known is None or known[0] != self.version:
            known = self._slots[gpus] = (self.version, int((self.free // gpus).sum()))
        return known[1]

    def largest_free(self) -> int:
        """Most free cards on one node."""
        return int(self.free.max()) if len(self.free) else 0


class Fleet:
    """All nodes of the pool, ever registered."""

    def __init__(self) -> None:
        """Without nodes."""
        self.nodes: dict[str, Node] = {}
        self.pools: dict[str, TypePool] = {}

    def change(self, changed: NodeChanged) -> bool:
        """Take over what is said of a node; False where something newer is known already."""
        known = self.nodes.get(changed.node)
        if known is not None and known.changed.node_version >= changed.node_version:
            return False
        node = known or Node(changed.node, changed, [], (), {})
        before = node.by_uuid
        cards = [
            Card(gpu.uuid, gpu.index, gpu.card_type, gpu.memory_mib, gpu.health, gpu)
            for gpu in sorted(changed.gpus, key=lambda gpu: gpu.index)
        ]
        for card in cards:
            old = before.get(card.uuid)
            if old is not None:
                card.owner, card.parts, card.cut = old.owner, old.parts, old.cut
        # A card that vanished while it is held stays on the books until its attempt has ended.
        present = {card.uuid for card in cards}
        ghosts = [card for card in node.cards if (card.owner or card.parts) and card.uuid not in present]
        for ghost in ghosts:
            ghost.health, ghost.is_sound = GpuHealthState.QUARANTINED, False
        node.changed, node.cards, node.groups = changed, cards + ghosts, changed.link_groups
        node.by_uuid = {card.uuid: card for card in node.cards}
        self.nodes[changed.node] = node
        for card_type in sorted({card.card_type for card in cards} | set(node.rows)):
            pool = self.pools.setdefault(card_type, TypePool(card_type))
            if card_type not in node.rows:
                node.rows[card_type] = pool.add_row(node)
            self._recount(pool, node)
        return True

    def _recount(self, pool: TypePool, node: Node) -> None:
        row = node.rows[pool.card_type]
        cards = [card for card in node.cards if card.card_type == pool.card_type]
        usable = [card for card in cards if card.is_sound]
        free = sum(not card.owner and not card.parts for card in usable) if node.takes_work else 0
        pool.free_total += free - int(pool.free[row])
        pool.free[row] = free
        open_cards = len(usable) if node.takes_work else 0
        pool.usable_cards += open_cards - int(pool.usable[row])
        pool.usable[row] = open_cards
        total = sum(card.mig is None for card in cards)
        pool.total_cards += total - int(pool.total[row])
        pool.total[row] = total
        pool.version += 1
        pool.shape_version += 1
        pool.ever = {}

    def is_free(self, node: Node, card: Card) -> bool:
        """Whether a new job could get this card as a whole."""
        return not card.owner and not card.parts and card.is_sound and node.takes_work

    def take(self, node_name: str, uuids: Iterable[str], owner: str) -> None:
        """Put whole cards into somebody's hands. They must be nobody's, or held for that job.

        Raises:
            ValueError: a card is somebody else's; nothing has changed then.
        """
        node = self.nodes[node_name]
        cards = [node.by_uuid[uuid] for uuid in uuids]
        for card in cards:
            if (card.owner and card.owner != f"hold:{owner}") or card.parts:
                raise ValueError(f"gpu {card.uuid} on {node_name} is held by {card.owner}, not free for {owner}")
        for card in cards:
            if self.is_free(node, card):
                self._count(node, card, -1)
            card.owner = owner

    def release(self, node_name: str, uuids: Iterable[str], owner: str) -> None:
        """Take whole cards out of `owner`'s hands; cards that are not in them are left alone."""
        node = self.nodes.get(node_name)
        if node is None:
            return
        for uuid in uuids:
            card = node.by_uuid.get(uuid)
            if card is None or card.owner != owner:
                continue
            card.owner = ""
            if self.is_free(node, card):
                self._count(node, card, 1)

    def take_part(self, node_name: str, uuid: str, key: str, part: Part) -> None:
        """Give a part of a card to a worker (`<job id>/<worker>`).

        Raises:
            ValueError: the card is held as a whole, or the part does not fit; nothing has changed then.
        """
        node = self.nodes[node_name]
        card = node.by_uuid[uuid]
        if card.owner:
            raise ValueError(f"gpu {uuid} on {node_name} is held as a whole by {card.owner}")
        if part.share is not None and card.shared_out + part.share > 1:
            raise ValueError(f"gpu {uuid} on {node_name} has {1 - card.shared_out} left, {part.share} are asked for")
        was_free = self.is_free(node, card)
        card.parts[key] = part
        if part.slice is not None:
            used = sum(other.slice == part.slice for other in card.parts.values())
            card.cut[part.slice] = max(card.cut.get(part.slice, 0), used)
            if card.mig is not None:
                slice_room(card).trim(card)
        if was_free:
            self._count(node, card, -1)

    def release_part(self, node_name: str, uuid: str, key: str) -> None:
        """Take a worker's part of a card back; nothing happens where it has none."""
        node = self.nodes.get(node_name)
        card = node.by_uuid.get(uuid) if node else None
        if node is None or card is None or card.parts.pop(key, None) is None:
            return
        if self.is_free(node, card):
            self._count(node, card, 1)

    def _count(self, node: Node, card: Card, by: int) -> None:
        pool = self.pools[card.card_type]
        pool.free[node.rows[card.card_type]] += by
        pool.free_total += by
        pool.version += 1

    def free_cards(self, node: Node, card_type: str) -> list[Card]:
        """Free whole cards of a type on a node, by index."""
        if not node.takes_work:
            return []
        return [
            card
            for card in node.cards
            if not card.owner and card.is_sound and not card.parts and card.card_type == card_type
        ]

    def all_cards(self) -> Iterator[tuple[Node, Card]]:
        """Every card with its node, in order of node names."""
        for name in sorted(self.nodes, key=natural_key):
            node = self.nodes[name]
            for card in node.cards:
                yield node, card

    def installed(self) -> dict[str, int]:
        """Cards of each type ever registered and not gone, whatever their state; partitioned ones too."""
        return {
            card_type: sum(card.card_type == card_type for node in pool.nodes for card in node.cards)
            for card_type, pool in sorted(self.pools.items())
        }
