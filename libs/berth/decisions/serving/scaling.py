"""How many replicas a load needs, and when the number follows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from math import ceil

from berth.contracts.jobs import ServiceSpec

Demand = Sequence[tuple[datetime, int]]
"""(since, replicas needed from then on), oldest first."""


def needed(spec: ServiceSpec, load: float) -> int:
    """Load divided by the load of one replica, rounded up, within min and max; at least one where anything is asked."""
    if load <= 0:
        return spec.min
    # nine places: 0.3 / 0.1 is three replicas, not four
    by_load = ceil(round(load / spec.load_per_replica, 9)) if spec.load_per_replica else 1
    return min(max(by_load, spec.min, 1), spec.max)


def follow(spec: ServiceSpec, demand: Demand, *, wanted: int, now: datetime) -> int:
    """The number wanted from now on.

    Up when a higher number was needed for the whole of scale_up_after, to the lowest of them; down when a lower number
    was enough for the whole of scale_down_after, to the highest of them. Never to zero: that has a clock of its own.
    """
    up = _extreme(min, demand, now=now, window=spec.scale_up_after)
    if up is not None and up > wanted:
        return up
    down = _extreme(max, demand, now=now, window=spec.scale_down_after)
    if down is not None and down < wanted:
        return max(down, min(wanted, 1))
    return wanted


def next_look(spec: ServiceSpec, demand: Demand, *, wanted: int, now: datetime) -> datetime | None:
    """When the answer of `follow` may change though the load does not."""
    looks = [
        since + timedelta(seconds=window)
        for since, _ in demand
        for window in (spec.scale_up_after, spec.scale_down_after)
    ]
    return min((look for look in looks if look > now), default=None)


def forget(spec: ServiceSpec, demand: Demand, *, now: datetime) -> list[tuple[datetime, int]]:
    """The part of the history that still matters: the longest window, and what held when it began."""
    start = now - timedelta(seconds=max(spec.scale_up_after, spec.scale_down_after))
    later = [entry for entry in demand if entry[0] > start]
    before = [entry for entry in demand if entry[0] <= start]
    return [*before[-1:], *later]


def _extreme(choose: object, demand: Demand, *, now: datetime, window: int) -> int | None:
    """The lowest or highest number needed within the window up to now; None: the history does not reach back so far."""
    start = now - timedelta(seconds=window)
    before = [number for since, number in demand if since <= start]
    if not before:
        return None
    # what ended exactly when the window began was not needed within it
    values = [before[-1], *(number for since, number in demand if since > start)]
    return min(values) if choose is min else max(values)
