"""Capacity that is kept from a job: protection lines, and reservations that run or are to come.

Lines and reservations keep amounts, not particular cards: of what is free (now, and at each moment a window opens while
the job would still run) so much must be left as their owners are short of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from berth.contracts.base import JobClass
from berth.contracts.reasons import Code
from berth.decisions.policy.document import Policy, ProtectionLine, Reservation
from berth.decisions.policy.windows import is_open, next_change, next_opening

FAR = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Keep:
    """So much of a card type is for a class or tenant. lends: others may use it until it is wanted."""

    name: str
    code: Code
    reserved: int
    job_class: JobClass | None
    tenant: str | None
    lends: bool
    preempts_lower: bool = False

    def covers(self, tenant: str, job_class: JobClass) -> bool:
        """Whether a job of this tenant and class may use it."""
        return self.tenant in (None, tenant) and self.job_class in (None, job_class)


@dataclass(frozen=True, slots=True)
class Opening:
    """A window or reservation that begins at `at`; those in its way get notice at `clear_at`.

    blocks_from: from when on work that would run into it may not start.
    """

    keep: Keep
    card_type: str
    at: datetime
    clear_at: datetime
    blocks_from: datetime
    clears: bool


class Keeper:
    """What a policy keeps, by card type and time."""

    def __init__(self, policy: Policy) -> None:
        """For one policy."""
        self._policy = policy
        self.keeps_anything = bool(policy.protection or policy.reservations)
        self.lends = any(line.lend_when_idle and line.reserved for line in policy.protection)
        self._cache: tuple[datetime, dict[str, list[Keep]], list[Opening], datetime] | None = None

    def _at(self, now: datetime) -> tuple[datetime, dict[str, list[Keep]], list[Opening], datetime]:
        """What holds at an instant; worked out anew when a window has opened or closed since."""
        if self._cache is None or not self._cache[0] <= now < self._cache[3]:
            self._cache = (now, self._active(now), list(self._openings(now)), self.next_change(now) or FAR)
        return self._cache

    def active(self, card_type: str, now: datetime) -> list[Keep]:
        """What is kept of a card type at an instant."""
        return self._at(now)[1].get(card_type, []) if self.keeps_anything else []

    def openings(self, now: datetime) -> list[Opening]:
        """Windows and reservations to come, the next opening of each."""
        return self._at(now)[2] if self.keeps_anything else []

    def open_names(self, now: datetime) -> list[str]:
        """Lines with windows, and reservations, that are open at an instant."""
        lines = [line.name for line in self._policy.protection if line.windows and is_open(line.windows, now)]
        return lines + [r.name for r in self._policy.reservations if r.from_ <= now < r.to]

    def _active(self, now: datetime) -> dict[str, list[Keep]]:
        found: dict[str, list[Keep]] = {}
        for line in self._policy.protection:
            if is_open(line.windows, now):
                for card_type, keep in _of_line(line):
                    found.setdefault(card_type, []).append(keep)
        for reservation in self._policy.reservations:
            if reservation.from_ <= now < reservation.to:
                for card_type, keep in _of_reservation(reservation):
                    found.setdefault(card_type, []).append(keep)
        return found

    def _openings(self, now: datetime) -> Iterator[Opening]:
        for line in self._policy.protection:
            if not line.windows or line.lend_when_idle:
                continue
            opens = next_opening(line.windows, now)
            if opens is not None:
                clear = opens - timedelta(seconds=line.clear_before)
                for card_type, keep in _of_line(line):
                    yield Opening(keep, card_type, opens, clear, clear, clears=True)
        for r in self._policy.reservations:
            if r.from_ > now and (r.announced is None or r.announced <= now):
                clear = r.from_ - timedelta(seconds=r.clear_before)
                for card_type, keep in _of_reservation(r):
                    yield Opening(keep, card_type, r.from_, clear, now, clears=r.running == "preempt")

    def clearings(self, now: datetime) -> list[Opening]:
        """Openings whose room is to be cleared now: from their notice on until they begin."""
        if not self.keeps_anything:
            return []
        found = [opening for opening in self.openings(now) if opening.clears and opening.clear_at <= now]
        just = now - timedelta(microseconds=1)
        if self._at(now)[0] == now:
            found += [o for o in self._openings(just) if o.clears and o.at == now]
        return found

    def next_change(self, after: datetime) -> datetime | None:
        """The next instant at which something opens, closes, is announced or wants its room cleared."""
        found: list[datetime] = []
        for line in self._policy.protection:
            change = next_change(line.windows, after)
            if change is not None:
                found.append(change)
            opens = next_opening(line.windows, after)
            if opens is not None:
                found.append(opens - timedelta(seconds=line.clear_before))
        for r in self._policy.reservations:
            found += [r.from_, r.to, r.from_ - timedelta(seconds=r.clear_before)]
            found += [r.announced] if r.announced is not None else []
        return min((at.astimezone(UTC) for at in found if at > after), default=None)


def _of_line(line: ProtectionLine) -> Iterator[tuple[str, Keep]]:
    for card_type, reserved in line.reserved.items():
        yield (
            card_type,
            Keep(
                line.name,
                Code.PROTECTION_LINE,
                reserved,
                line.job_class,
                line.tenant,
                line.lend_when_idle,
                line.when_unmet == "preempt_lower_class",
            ),
        )


def _of_reservation(reservation: Reservation) -> Iterator[tuple[str, Keep]]:
    for card_type, reserved in reservation.gpus.items():
        yield card_type, Keep(reservation.name, Code.RESERVED_WINDOW, reserved, None, reservation.tenant, lends=False)
