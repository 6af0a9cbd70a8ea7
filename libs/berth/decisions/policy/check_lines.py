"""Whether protection lines and their windows make sense, alone, together and on the installed cards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations

from berth.contracts.base import JobClass
from berth.decisions.policy.document import Policy, ProtectionLine, Window
from berth.decisions.policy.problem import Problem, repeated, unknown_types
from berth.decisions.policy.windows import spans

_WEEKS = (datetime(2026, 1, 7, tzinfo=UTC), datetime(2026, 7, 8, tzinfo=UTC))
"""Windows repeat each week; in two weeks half a year apart the clocks of a zone stand both ways."""

Span = tuple[datetime, datetime]


def problems(policy: Policy) -> Iterator[Problem]:
    """What refuses a document."""
    for index, line in enumerate(policy.protection):
        where = f"protection.{index}"
        if line.job_class is None and line.tenant is None:
            yield Problem(where, f"line {line.name} says for no one what it keeps", "add class or tenant")
        if line.tenant is not None and line.tenant not in policy.tenants:
            yield Problem(f"{where}.tenant", f"tenant {line.tenant} is not under tenants", "add the tenant or mend it")
        if policy.class_order and line.job_class is not None and line.job_class not in policy.class_order:
            yield Problem(
                f"{where}.class",
                f"class {line.job_class} has no place in class_order, so nobody knows whom the line stands above",
                f"add {line.job_class} to class_order",
            )
        for field in ("reserved", "floor"):
            yield from unknown_types(getattr(line, field), policy.card_types, f"{where}.{field}")
        if line.job_class is not None and line.job_class in line.may_preempt:
            yield Problem(f"{where}.may_preempt", f"class {line.job_class} would preempt itself", "name other classes")
        yield from _windows(line, where)
    for name, times in repeated(line.name for line in policy.protection):
        yield Problem("protection", f"{times} lines are called {name}", "give each line its own name")
    for (first, one), (second, other) in combinations(enumerate(policy.protection), 2):
        yield from _contradiction(policy, f"protection.{second}", (first, one), other)


def _windows(line: ProtectionLine, where: str) -> Iterator[Problem]:
    for number, window in enumerate(line.windows):
        here = f"{where}.windows.{number}"
        if not window.days:
            yield Problem(f"{here}.days", "lists no day, so it never opens", "list days or leave days out")
        if window.from_ == "24:00":
            yield Problem(f"{here}.from", "no day has a minute after 24:00", 'write "00:00"')
        elif window.from_ == window.to:
            yield Problem(
                here,
                f"begins and ends at {window.to}, so it never opens",
                'write from: "00:00", to: "24:00" for a whole day',
            )


def _contradiction(
    policy: Policy, where: str, numbered: tuple[int, ProtectionLine], other: ProtectionLine
) -> Iterator[Problem]:
    """Two lines that hold at the same time and say opposite things."""
    first, one = numbered
    if not meet(one, other):
        return
    if _same_owner(one, other):
        shared = sorted(set(one.reserved) & set(other.reserved))
        for field in ("lend_when_idle", "when_unmet"):
            mine, theirs = getattr(one, field), getattr(other, field)
            if shared and mine != theirs:
                yield Problem(
                    f"{where}.{field}",
                    f"{_word(theirs)}, while line {one.name} (protection.{first}), which keeps {', '.join(shared)} for "
                    f"the same at the same time, says {_word(mine)}",
                    "make both say the same, join the lines, or give them windows that do not meet",
                )
    mutual = one.job_class in other.may_preempt and other.job_class in one.may_preempt
    if mutual and not (_ranked(policy, one) and _ranked(policy, other)):
        yield Problem(
            f"{where}.may_preempt",
            f"{other.job_class} and {one.job_class} (protection.{first}) may stop each other at the same time",
            "remove one of the two, or put both classes into class_order",
        )


def _same_owner(one: ProtectionLine, other: ProtectionLine) -> bool:
    return (one.job_class, one.tenant) == (other.job_class, other.tenant)


def _ranked(policy: Policy, line: ProtectionLine) -> bool:
    return line.job_class in policy.class_rank


def _word(value: object) -> str:
    return {True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool) else str(value)


# ------------------------------------------------------------------------------------------------------------ time
def _sound(windows: Sequence[Window]) -> list[Window]:
    return [window for window in windows if window.days and window.from_ not in (window.to, "24:00")]


def _spans(line: ProtectionLine, week: datetime) -> list[Span]:
    """When a line holds in the week that begins with this instant."""
    end = week + timedelta(days=7)
    if not line.windows:
        return [(week, end)]
    found = [span for window in _sound(line.windows) for span in spans(window, week)]
    return [(max(opens, week), min(closes, end)) for opens, closes in found if opens < end and closes > week]


def meet(one: ProtectionLine, other: ProtectionLine) -> bool:
    """Whether there is a time of the week at which both lines hold."""
    return any(
        a_opens < b_closes and b_opens < a_closes
        for week in _WEEKS
        for a_opens, a_closes in _spans(one, week)
        for b_opens, b_closes in _spans(other, week)
    )


# ------------------------------------------------------------------------------------------------- installed cards
def beyond_installed(policy: Policy, installed: Mapping[str, int]) -> Iterator[Problem]:
    """Guarantees above the installed cards: of one line, or of those that hold at the same time."""
    lines = policy.protection
    held = [[span for week in _WEEKS for span in _spans(line, week)] for line in lines]
    for index, line in enumerate(lines):
        for field in ("reserved", "floor"):
            for card_type, count in getattr(line, field).items():
                have = installed.get(card_type, 0)
                total, with_ = count, [line.name]
                if field == "reserved":
                    total, with_ = _most_at_once(lines, held, index, card_type)
                if total > have and count:
                    together = f" (lines {', '.join(with_)} hold at the same time)" if len(with_) > 1 else ""
                    yield Problem(
                        f"protection.{index}.{field}.{card_type}",
                        f"guarantees come to {total} {card_type}, {have} are installed{together}",
                        f"lower it to {max(have - (total - count), 0)} or add nodes first",
                    )


def _most_at_once(
    lines: Sequence[ProtectionLine], held: Sequence[Sequence[Span]], index: int, card_type: str
) -> tuple[int, list[str]]:
    """The most that this line and those before it keep of a type at one instant, and their names."""
    best, names = lines[index].reserved[card_type], [lines[index].name]
    for opens, closes in held[index]:
        moments = {opens, *(start for spans_ in held[:index] for start, _ in spans_ if opens < start < closes)}
        for at in moments:
            now = [n for n in range(index) if any(start <= at < end for start, end in held[n])]
            with_ = [n for n in now if lines[n].reserved.get(card_type)]
            total = lines[index].reserved[card_type] + sum(lines[n].reserved[card_type] for n in with_)
            if total > best:
                best, names = total, [*(lines[n].name for n in with_), lines[index].name]
    return best, names


# ---------------------------------------------------------------------------------------------------------- doubts
def doubts(policy: Policy) -> Iterator[Problem]:
    """What is allowed but hardly meant."""
    rank = policy.class_rank
    for index, line in enumerate(policy.protection):
        where = f"protection.{index}"
        for lower in line.may_preempt:
            if _outranks(rank, lower, line):
                yield Problem(
                    f"{where}.may_preempt",
                    f"{lower} stands above {line.job_class} in class_order, so this never applies",
                    f"remove {lower} or change class_order",
                )
        yield from _void(line, where)
        yield from _no_way_back(policy, line, where)
        yield from _unusable(policy, line, where)
        if line.when_unmet == "preempt_lower_class" and not policy.class_order:
            yield Problem(
                f"{where}.when_unmet", "without class_order every other class counts as lower", "set class_order"
            )
    for (first, one), (second, other) in combinations(enumerate(policy.protection), 2):
        shared = sorted(set(one.reserved) & set(other.reserved))
        if shared and _same_owner(one, other) and meet(one, other):
            yield Problem(
                f"protection.{second}.reserved",
                f"line {one.name} (protection.{first}) keeps {', '.join(shared)} for the same at the same time; others "
                "see both amounts kept",
                "join the lines, or give them windows that do not meet",
            )


def _outranks(rank: Mapping[JobClass, int], other: JobClass, line: ProtectionLine) -> bool:
    mine = rank.get(line.job_class) if line.job_class is not None else None
    theirs = rank.get(other)
    return mine is not None and theirs is not None and theirs < mine


def _void(line: ProtectionLine, where: str) -> Iterator[Problem]:
    keeps = any(line.reserved.values()) or any(line.floor.values())
    if not keeps and not line.may_preempt:
        yield Problem(where, f"line {line.name} keeps nothing and allows nothing", "add reserved, floor or may_preempt")
    if line.max_preempt_share is not None and not line.may_preempt:
        yield Problem(f"{where}.max_preempt_share", "has no effect without may_preempt", "add may_preempt or remove it")
    if line.max_preempt_share == 0:
        yield Problem(f"{where}.max_preempt_share", "a share of 0 lets nobody be stopped", "raise it")
    if line.clear_before and not line.windows:
        yield Problem(f"{where}.clear_before", "has no effect on a line that always holds", "add windows or remove it")
    if line.clear_before and line.lend_when_idle:
        yield Problem(
            f"{where}.clear_before",
            "has no effect: a line that lends while idle takes back only what is wanted",
            "remove it, or set lend_when_idle: false",
        )
    if line.when_unmet == "preempt_lower_class" and not any(line.reserved.values()):
        yield Problem(f"{where}.when_unmet", "has no effect where nothing is reserved", "add reserved or remove it")


def _no_way_back(policy: Policy, line: ProtectionLine, where: str) -> Iterator[Problem]:
    if not (line.lend_when_idle and any(line.reserved.values())) or line.may_preempt or line.job_class is None:
        return
    preemption = policy.for_class(line.job_class).preemption
    takes_back = preemption.by_priority != "off" or preemption.reclaim != "off" or preemption.fair != "off"
    if line.when_unmet == "wait" and not takes_back:
        yield Problem(
            f"{where}.lend_when_idle",
            f"nothing lets {line.job_class} take back what it lends: it waits until the others end by themselves",
            "add may_preempt or when_unmet: preempt_lower_class, or do not lend",
        )


def _unusable(policy: Policy, line: ProtectionLine, where: str) -> Iterator[Problem]:
    """More kept for a tenant than it may hold."""
    tenant = policy.tenants.get(line.tenant or "")
    if tenant is None or tenant.cohort is not None:
        return
    for card_type, count in line.reserved.items():
        quota = tenant.quota.get(card_type)
        if quota is not None and count > quota:
            yield Problem(
                f"{where}.reserved.{card_type}",
                f"keeps {count} for {line.tenant}, whose quota is {quota:g}",
                f"lower it to {quota:g} or raise the quota",
            )
