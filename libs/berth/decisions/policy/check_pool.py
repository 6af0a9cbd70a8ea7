"""Whether reservations, health codes and the settings of the whole pool make sense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime

from berth.contracts.base import format_duration
from berth.decisions.policy.document import Policy
from berth.decisions.policy.problem import Problem, repeated, unknown_types

HIGHEST_XID = 199
"""NVIDIA's catalogue of Xid errors (docs.nvidia.com/deploy/xid-errors) has no higher code; some room is left for new ones."""


def problems(policy: Policy) -> Iterator[Problem]:
    """What refuses a document."""
    for index, reservation in enumerate(policy.reservations):
        where = f"reservations.{index}"
        if reservation.to <= reservation.from_:
            yield Problem(f"{where}.to", "ends before it begins", "make to later than from")
        if reservation.tenant not in policy.tenants:
            yield Problem(
                f"{where}.tenant", f"tenant {reservation.tenant} is not under tenants", "add the tenant or mend it"
            )
        yield from unknown_types(reservation.gpus, policy.card_types, f"{where}.gpus")
    for name, times in repeated(reservation.name for reservation in policy.reservations):
        yield Problem("reservations", f"{times} reservations are called {name}", "give each its own name")
    both = sorted(set(policy.health.fatal_xids) & set(policy.health.harmless_xids))
    if both:
        yield Problem(
            "health",
            f"fault codes {', '.join(map(str, both))} are both fatal and harmless",
            "leave each in one of the lists",
        )


def beyond_installed(policy: Policy, installed: Mapping[str, int]) -> Iterator[Problem]:
    """Reservations above the installed cards: one alone, or with those that overlap it."""
    for index, reservation in enumerate(policy.reservations):
        for card_type, count in reservation.gpus.items():
            have = installed.get(card_type, 0)
            earlier = [r for r in policy.reservations[:index] if r.gpus.get(card_type)]
            moments = [reservation.from_, *(r.from_ for r in earlier if reservation.from_ < r.from_ < reservation.to)]
            others = max(sum(r.gpus[card_type] for r in earlier if r.from_ <= at < r.to) for at in moments)
            if count and count + others > have:
                together = f" (with {others} of others at the same time)" if others else ""
                yield Problem(
                    f"reservations.{index}.gpus.{card_type}",
                    f"reserves {count} {card_type}{together}, {have} are installed",
                    f"lower it to {max(have - others, 0)} or add nodes first",
                )


def doubts(policy: Policy, *, now: datetime | None) -> Iterator[Problem]:
    """What is allowed but hardly meant."""
    for index, reservation in enumerate(policy.reservations):
        where = f"reservations.{index}"
        if now is not None and reservation.to <= now:
            yield Problem(where, f"reservation {reservation.name} is over", "remove it")
        if reservation.announced is not None and reservation.announced >= reservation.from_:
            yield Problem(f"{where}.announced", "is announced only when it has begun", "make it earlier than from")
        if reservation.clear_before and reservation.running == "let_finish":
            yield Problem(
                f"{where}.clear_before", "has no effect where running jobs finish", "set running: preempt or remove it"
            )
        if not any(reservation.gpus.values()):
            yield Problem(f"{where}.gpus", "reserves nothing", "say how many GPUs of which card type")
    for field in ("fatal_xids", "harmless_xids"):
        codes = getattr(policy.health, field)
        for code, times in repeated(codes):
            yield Problem(f"health.{field}", f"lists {code} {times} times", "list each code once")
        unknown = sorted({code for code in codes if not 1 <= code <= HIGHEST_XID})
        if unknown:
            yield Problem(
                f"health.{field}",
                f"{', '.join(map(str, unknown))} {'is no Xid' if len(unknown) == 1 else 'are no Xids'} of NVIDIA's catalogue",
                "look for a slip; codes of other makers have no effect",
            )
    if policy.cleaning.kill_unknown and policy.cleaning.wait is None:
        yield Problem("cleaning.kill_unknown", "has no effect without wait", "set cleaning.wait, for example to 1m")
    yield from _stale(policy)


def _stale(policy: Policy) -> Iterator[Problem]:
    stale = policy.telemetry.stale_after
    levels = [("defaults", policy.defaults)] + [(f"classes.{c}", policy.for_class(c)) for c in policy.classes]
    for where, settings in levels:
        timeout = settings.idle.timeout
        if timeout is not None and stale is not None and stale >= timeout:
            yield Problem(
                f"{where}.idle.timeout",
                f"readings of {format_duration(stale)} ago still count, so an idle job is found out only after that",
                "make telemetry.stale_after shorter than idle.timeout",
            )
