"""Whether the settings of classes make sense, alone and together."""

from __future__ import annotations

from collections.abc import Iterator

from berth.contracts.base import JobClass, format_duration
from berth.decisions.policy.document import ClassSettings, Policy
from berth.decisions.policy.problem import Problem, repeated

HOUR = 3600
LONGEST_GRACE = HOUR
"""Longer than any checkpoint takes; whoever waits for the room waits as long."""
LONGEST_MIN_RUNTIME = 86400

_OF_THE_POOL = ("suspect_after", "lost_after", "quarantine")


def problems(policy: Policy, *, shortest_lost_after: int) -> Iterator[Problem]:
    """What refuses a document."""
    yield from _silence(policy, shortest_lost_after)
    for where, settings in _levels(policy):
        yield from _times(settings, where)
        for criterion, _ in repeated(settings.preemption.victim_order):
            yield Problem(f"{where}.preemption.victim_order", f"names {criterion} twice", "name each criterion once")
    for job_class, settings in policy.classes.items():
        for field in _OF_THE_POOL:
            if field in settings.recovery.model_fields_set:
                yield Problem(
                    f"classes.{job_class}.recovery.{field}",
                    "belongs to nodes, which all classes share",
                    f"set it under defaults.recovery.{field}",
                )
    for job_class, times in repeated(policy.class_order):
        yield Problem("class_order", f"class {job_class} is listed {times} times", "list each class once")


def _levels(policy: Policy) -> list[tuple[str, ClassSettings]]:
    """Where settings stand, each with what is in force there."""
    return [("defaults", policy.defaults)] + [(f"classes.{c}", policy.for_class(c)) for c in policy.classes]


def _silence(policy: Policy, shortest: int) -> Iterator[Problem]:
    recovery = policy.defaults.recovery
    suspect, lost = recovery.suspect_after, recovery.lost_after
    if suspect is not None and lost is not None and lost <= suspect:
        yield Problem(
            "defaults.recovery.lost_after",
            f"a node would be lost after {lost}s, no later than it is suspect after {suspect}s",
            "make lost_after longer than suspect_after",
        )
    if lost is not None and lost < shortest:
        yield Problem(
            "defaults.recovery.lost_after",
            f"{lost}s leave a node that is cut off no time to stop its own work before its cards are given away",
            f"make it at least {shortest}s",
        )


def _times(settings: ClassSettings, where: str) -> Iterator[Problem]:
    backoff, idle, lifetime = settings.recovery.backoff, settings.idle, settings.lifetime
    if backoff.max is not None and backoff.max < backoff.first:
        yield Problem(
            f"{where}.recovery.backoff.max",
            f"the longest pause {backoff.max}s is shorter than the first {backoff.first}s",
            "make max at least first",
        )
    if idle.timeout is not None and idle.warn_before >= idle.timeout:
        yield Problem(
            f"{where}.idle.warn_before",
            f"warns {idle.warn_before}s before a timeout of only {idle.timeout}s",
            "make warn_before shorter than timeout",
        )
    if idle.timeout is not None and not idle.counts:
        yield Problem(
            f"{where}.idle.counts",
            "counts no activity, so every job would be idle from its start",
            "list kernel_busy, execution, terminal_busy or gpu_util, or remove timeout",
        )
    if lifetime.max is not None and lifetime.warn_before >= lifetime.max:
        yield Problem(
            f"{where}.lifetime.warn_before",
            f"warns {lifetime.warn_before}s before an end after only {lifetime.max}s",
            "make warn_before shorter than max",
        )


def doubts(policy: Policy) -> Iterator[Problem]:
    """What is allowed but hardly meant."""
    for where, settings in _levels(policy):
        yield from _void(settings, where)
        yield from _absurd(settings, where)
    yield from _half_life(policy)
    yield from _without_cohort(policy)
    yield from _order(policy)


def _void(settings: ClassSettings, where: str) -> Iterator[Problem]:
    """Settings that another one makes void."""
    queue, lifetime, idle = settings.queue, settings.lifetime, settings.idle
    if queue.discipline == "strict" and queue.reserve_after is not None:
        yield Problem(
            f"{where}.queue.reserve_after", "has no effect where nobody overtakes", "remove it or use backfill"
        )
    if lifetime.extensions and not lifetime.extend_by:
        yield Problem(
            f"{where}.lifetime.extend_by", "extensions of no length extend nothing", "say by how much, for example 2h"
        )
    if lifetime.extend_by and not lifetime.extensions:
        yield Problem(
            f"{where}.lifetime.extensions", "no extension is ever granted", "say how many, or remove extend_by"
        )
    if lifetime.max is None and (lifetime.warn_before or lifetime.extensions):
        yield Problem(f"{where}.lifetime", "has no effect without max", "set lifetime.max or remove the rest")
    if idle.timeout is None and idle.warn_before:
        yield Problem(f"{where}.idle.warn_before", "has no effect without timeout", "set idle.timeout or remove it")
    if "gpu_util_at_least" in idle.model_fields_set and "gpu_util" not in idle.counts:
        yield Problem(
            f"{where}.idle.gpu_util_at_least", "has no effect unless gpu_util counts", "add gpu_util to idle.counts"
        )


def _half_life(policy: Policy) -> Iterator[Problem]:
    """What a tenant has had fades alike, whichever class asks."""
    fades = "half_life" in policy.defaults.fair_share.model_fields_set
    if fades and not any(policy.for_class(job_class).fair_share.basis == "history" for job_class in JobClass):
        yield Problem(
            "defaults.fair_share.half_life",
            "has no effect unless basis is history",
            "set basis: history, here or for a class, or remove it",
        )
    for job_class, settings in policy.classes.items():
        if "half_life" in settings.fair_share.model_fields_set:
            yield Problem(
                f"classes.{job_class}.fair_share.half_life",
                "has no effect: what a tenant has had fades alike for all classes",
                "set it under defaults.fair_share.half_life",
            )


def _absurd(settings: ClassSettings, where: str) -> Iterator[Problem]:
    """Times that are hardly meant."""
    preemption, recovery = settings.preemption, settings.recovery
    if preemption.grace is not None and preemption.grace > LONGEST_GRACE:
        yield Problem(
            f"{where}.preemption.grace",
            f"whoever needs the room may wait {format_duration(preemption.grace)} for it",
            f"use what a checkpoint takes, at most {format_duration(LONGEST_GRACE)}",
        )
    if preemption.grace == 0:
        yield Problem(
            f"{where}.preemption.grace", "programs are stopped without time for a checkpoint", "use 30s or more"
        )
    if preemption.min_runtime > LONGEST_MIN_RUNTIME:
        yield Problem(
            f"{where}.preemption.min_runtime",
            f"nobody is stopped within {format_duration(preemption.min_runtime)} of a start",
            f"use a time in which a job gets useful work done, at most {format_duration(LONGEST_MIN_RUNTIME)}",
        )
    if recovery.max_restarts and not recovery.backoff.first:
        yield Problem(
            f"{where}.recovery.backoff.first",
            f"a program that fails at its start is started {recovery.max_restarts + 1} times without a pause",
            "set it, for example to 10s",
        )


def _without_cohort(policy: Policy) -> Iterator[Problem]:
    if any(tenant.cohort is not None for tenant in policy.tenants.values()):
        return
    for where, settings in _levels(policy):
        for field in ("reclaim", "fair"):
            if getattr(settings.preemption, field) != "off":
                yield Problem(
                    f"{where}.preemption.{field}",
                    "has no effect: no tenant is in a cohort, so nothing is lent",
                    "put tenants into a cohort or set it off",
                )


def _order(policy: Policy) -> Iterator[Problem]:
    if not policy.class_order:
        return
    missing = [job_class for job_class in JobClass if job_class not in policy.class_order]
    if missing:
        yield Problem(
            "class_order",
            f"{', '.join(missing)} {'has' if len(missing) == 1 else 'have'} no place in the order, so any class may preempt "
            f"{'it' if len(missing) == 1 else 'them'}, and the reverse",
            "add what is missing",
        )
