"""When a window is open, and when that changes next; read in the window's own zone, whatever zone the host uses.

Begin and end are wall-clock times, so across a change of clocks a window is an hour longer or shorter. A time that the
clocks skip is taken as if they had not been changed yet; of a time that comes twice the first is meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from zoneinfo import ZoneInfo

from berth.decisions.policy.document import ALL_DAYS, Window

_HORIZON_DAYS = 9
"""A week and the days around it: every window that opens at all opens within it."""


@lru_cache(maxsize=64)
def _zone(name: str) -> ZoneInfo:
    return ZoneInfo(name)


def _at(day: date, text: str, zone: ZoneInfo) -> datetime:
    hours, minutes = int(text[:2]), int(text[3:])
    if hours == 24:
        day, hours = day + timedelta(days=1), 0
    return datetime.combine(day, time(hours, minutes), zone).astimezone(UTC)


def spans(window: Window, around: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Opening and closing instants (UTC) of a window, in order, from the day before `around` on for nine days."""
    zone = _zone(window.zone)
    first = around.astimezone(zone).date() - timedelta(days=1)
    for offset in range(_HORIZON_DAYS + 1):
        day = first + timedelta(days=offset)
        if ALL_DAYS[day.weekday()] not in window.days:
            continue
        over_night = window.to <= window.from_
        opens = _at(day, window.from_, zone)
        closes = _at(day + timedelta(days=1) if over_night else day, window.to, zone)
        if closes > opens:
            yield opens, closes


def is_open(windows: Sequence[Window], at: datetime) -> bool:
    """Whether any of the windows is open; without windows: always. The closing instant is outside."""
    return not windows or any(opens <= at < closes for window in windows for opens, closes in spans(window, at))


def next_opening(windows: Sequence[Window], after: datetime) -> datetime | None:
    """The next instant later than `after` at which one of the windows opens that is shut just before."""
    found = [
        opens
        for window in windows
        for opens, _ in spans(window, after)
        if opens > after and not is_open(windows, opens - timedelta(microseconds=1))
    ]
    return min(found, default=None)


def next_change(windows: Sequence[Window], after: datetime) -> datetime | None:
    """The next instant later than `after` at which a window opens or closes."""
    found = [at for window in windows for span in spans(window, after) for at in span if at > after]
    return min(found, default=None)
