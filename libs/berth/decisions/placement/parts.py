"""Parts of a card: shares (or GiB) of a shareable one, slices of a partitioned one. All arithmetic is exact."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from berth.contracts.nodes import MigLayout

if TYPE_CHECKING:
    from berth.decisions.placement.fleet import Card

_PROFILE = re.compile(r"^(\d+)g\.")
SLICES_OF_A_CARD = 7
"""Compute slices of a whole card on all partitionable cards so far (NVIDIA MIG user guide, supported profiles)."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a worker has of a card: a share of it, or one slice of a profile."""

    share: Fraction | None = None
    slice: str | None = None


def slice_amount(profile: str) -> Fraction:
    """GPUs that a slice counts for: its compute slices of all of a card."""
    found = _PROFILE.match(profile)
    return Fraction(min(int(found.group(1)), SLICES_OF_A_CARD), SLICES_OF_A_CARD) if found else Fraction(1)


@dataclass(frozen=True, slots=True)
class SliceRoom:
    """What may still be had of a partitioned card.

    A fixed layout has so many slices of each profile. A card that is cut on demand has compute and memory slices, of
    which each cut slice takes its profile's; an idle slice stays cut unless `recuts`.
    """

    layout: MigLayout
    used: dict[str, int]
    cut: dict[str, int]

    def free(self, profile: str, *, recuts: bool) -> int:
        """Slices of a profile that a new worker could get."""
        fixed = self.layout.slices.get(profile, 0) - self.used.get(profile, 0)
        if not self.layout.profiles or profile not in self.layout.profiles:
            return max(fixed, 0)
        idle = max(self.cut.get(profile, 0) - self.used.get(profile, 0), 0)
        standing = self.used if recuts else self.cut
        return max(fixed, 0) + (0 if recuts else idle) + self._uncut(profile, standing)

    def _uncut(self, profile: str, standing: dict[str, int]) -> int:
        compute, memory = self.layout.profiles[profile]
        left_compute = self.layout.compute_slices - self._taken(standing, 0)
        left_memory = self.layout.memory_slices - self._taken(standing, 1)
        rooms = [left // each for left, each in ((left_compute, compute), (left_memory, memory)) if each]
        return max(min(rooms, default=0), 0)

    def _taken(self, standing: dict[str, int], which: int) -> int:
        return sum(count * self.layout.profiles[p][which] for p, count in standing.items() if p in self.layout.profiles)

    def trim(self, card: Card) -> None:
        """Forget idle cuts that a newer one was made from: what stands cut never exceeds the card."""
        if not self.layout.profiles:
            return
        for which, have in ((0, self.layout.compute_slices), (1, self.layout.memory_slices)):
            for profile in sorted(card.cut):
                idle = card.cut[profile] - self.used.get(profile, 0)
                while idle > 0 and self._taken(card.cut, which) > have:
                    card.cut[profile] -= 1
                    idle -= 1


def slice_room(card: Card) -> SliceRoom:
    """The room of a partitioned card.

    Raises:
        ValueError: the card is not partitioned.
    """
    if card.mig is None:
        raise ValueError(f"gpu {card.uuid} is not partitioned")
    used: dict[str, int] = {}
    for part in card.parts.values():
        if part.slice is not None:
            used[part.slice] = used.get(part.slice, 0) + 1
    return SliceRoom(card.mig, used, card.cut)
