"""Time that passes only when told to."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import datetime


class SimClock:
    """The platform's clock in a simulation, with alarms in order of time, then of setting."""

    def __init__(self, start: datetime) -> None:
        self.now = start
        self._alarms: list[tuple[datetime, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, when: datetime, do: Callable[[], None]) -> None:
        """Call `do` at `when`; in the past means at once when alarms are next rung."""
        self._count += 1
        heapq.heappush(self._alarms, (when, self._count, do))

    def next_alarm(self) -> datetime | None:
        """When the first alarm is due."""
        return self._alarms[0][0] if self._alarms else None

    def ring(self) -> bool:
        """Call what is due now, also what that adds; whether there was anything."""
        rang = False
        while self._alarms and self._alarms[0][0] <= self.now:
            heapq.heappop(self._alarms)[2]()
            rang = True
        return rang

    def advance(self, to: datetime) -> None:
        """Let time pass up to `to`; never backwards."""
        self.now = max(self.now, to)
