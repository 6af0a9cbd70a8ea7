"""Idle and lifetime clocks of interactive jobs: what counts as work, when to warn, when to reclaim.

A verdict needs fresh evidence. A report whose stamp did not move on, or that leaves a counted sign unknown, proves
nothing; while evidence is stale nobody is warned or reclaimed on its word, and that time does not count as idle.
The stamps are the node's own and only compared with each other; all durations are on the platform's clock.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from berth.contracts.base import JobClass
from berth.contracts.events import (
    Activity,
    ActivityReported,
    IdleWarned,
    JobExtended,
    JobExtendRefused,
    JobExtendRequested,
    LifetimeWarned,
    TelemetryStale,
)
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.lifecycle.attempts import stop
from berth.decisions.lifecycle.book import Book
from berth.decisions.lifecycle.model import Evidence, JobRun, StopKind
from berth.decisions.policy.document import IdleSettings, LifetimeSettings


def idle_rules(book: Book, run: JobRun) -> IdleSettings | None:
    """The idle rules for a job: those of its class where it is interactive or its class sets its own; None: off."""
    rules = book.settings(run.job_id).idle
    return rules if rules.timeout is not None and _applies(book, run, "idle") else None


def lifetime_rules(book: Book, run: JobRun) -> LifetimeSettings | None:
    """The lifetime rules for a job; None: off."""
    rules = book.settings(run.job_id).lifetime
    return rules if rules.max is not None and _applies(book, run, "lifetime") else None


def _applies(book: Book, run: JobRun, word: str) -> bool:
    """A default that was meant for notebooks must not end somebody's training."""
    spec = book.specs.get(run.job_id)
    if spec is None:
        return False
    own = book.policy.classes.get(spec.job_class)
    return spec.job_class is JobClass.INTERACTIVE or (own is not None and word in own.model_fields_set)


# ---------------------------------------------------------------------------------------------------------------- idle
def on_activity(book: Book, event: ActivityReported) -> None:
    """Count what a worker was seen doing."""
    run = book.jobs.get(event.job_id)
    worker = run.worker(event.worker) if run is not None and event.attempt == run.attempt else None
    if run is None or worker is None or worker.fence != event.fence:
        return
    rules = idle_rules(book, run)
    if rules is None or not run.has_attempt:
        return
    evidence = run.evidence
    if evidence is None:
        evidence = run.evidence = Evidence(last_activity=book.now)
    key = str(event.worker)
    stamp = evidence.stamps.get(key)
    is_active = _is_active(rules, event)
    if is_active is None or (stamp is not None and event.sampled_at <= stamp):
        return
    evidence.stamps[key] = event.sampled_at
    _pass_idle_time(book, evidence)
    evidence.active = [w for w in evidence.active if w != event.worker] + ([event.worker] if is_active else [])
    was_active, evidence.was_active = evidence.was_active, bool(evidence.active)
    if was_active or evidence.was_active:
        evidence.last_activity, evidence.idle_seconds, evidence.is_warned = book.now, 0, False
    evidence.is_stale = False
    book.mark(run)
    for due in idle_dues(book, run):
        book.wake(run, due)


def _is_active(rules: IdleSettings, event: ActivityReported) -> bool | None:
    """Whether anything that counts is going on; None: cannot be told."""
    if any(sign.value in rules.counts for sign in event.active):
        return True
    if Activity.GPU_UTIL.value not in rules.counts:
        return False
    if event.gpu_utilization is None:
        return None
    return event.gpu_utilization >= rules.gpu_util_at_least


def _pass_idle_time(book: Book, evidence: Evidence) -> None:
    """Add the time since the last fresh evidence, unless it was a gap."""
    stale_after = book.policy.telemetry.stale_after
    if evidence.fresh_at is not None and not evidence.was_active:
        since = (book.now - evidence.fresh_at).total_seconds()
        if stale_after is None or since <= stale_after:
            evidence.idle_seconds += since
    evidence.fresh_at = book.now


def idle_dues(book: Book, run: JobRun) -> list[datetime]:
    """When to look at the evidence again: it gets stale, a warning is due, or the job is to be reclaimed."""
    rules, evidence = idle_rules(book, run), run.evidence
    if rules is None or rules.timeout is None or evidence is None or evidence.fresh_at is None:
        return []
    if not run.has_attempt or run.stop is not None or evidence.is_stale:
        return []
    dues = []
    stale_after = book.policy.telemetry.stale_after
    if stale_after is not None:
        dues.append(evidence.fresh_at + timedelta(seconds=stale_after))
    if not evidence.was_active:
        left = rules.timeout - evidence.idle_seconds
        dues.append(evidence.fresh_at + timedelta(seconds=left))
        if not evidence.is_warned and rules.warn_before:
            dues.append(evidence.fresh_at + timedelta(seconds=left - rules.warn_before))
    return dues


def judge_idle(book: Book, run: JobRun) -> None:
    """Warn, reclaim, or note that the evidence is stale, if that is due."""
    rules, evidence = idle_rules(book, run), run.evidence
    if rules is None or rules.timeout is None or evidence is None or evidence.fresh_at is None:
        return
    if not run.has_attempt or run.stop is not None or evidence.is_stale:
        return
    since = (book.now - evidence.fresh_at).total_seconds()
    idle = 0.0 if evidence.was_active else evidence.idle_seconds + since
    if not evidence.was_active and idle >= rules.timeout:
        stop(book, run, StopKind.RECLAIM, _idle_cause(rules, evidence, idle), by="platform")
        return
    if not evidence.was_active and rules.warn_before and idle >= rules.timeout - rules.warn_before:
        _warn_idle(book, run, rules, evidence, idle)
    stale_after = book.policy.telemetry.stale_after
    if stale_after is not None and since >= stale_after:
        evidence.is_stale = True
        book.emit(run, TelemetryStale(job_id=run.job_id, attempt=run.attempt, fresh_until=evidence.fresh_at))


def _warn_idle(book: Book, run: JobRun, rules: IdleSettings, evidence: Evidence, idle: float) -> None:
    if evidence.is_warned or rules.timeout is None:
        return
    evidence.is_warned = True
    warned = IdleWarned(
        job_id=run.job_id,
        attempt=run.attempt,
        last_activity=evidence.last_activity,
        timeout_seconds=rules.timeout,
        reclaim_at=book.after(rules.timeout - idle),
    )
    book.emit(run, warned)


def _idle_cause(rules: IdleSettings, evidence: Evidence, idle: float) -> Reason:
    return because(
        Code.IDLE,
        last_activity=evidence.last_activity.isoformat(),
        timeout=rules.timeout,
        idle_seconds=round(idle, 3),
        counts=list(rules.counts),
    )


# ------------------------------------------------------------------------------------------------------------ lifetime
def lifetime_ends_at(book: Book, run: JobRun) -> datetime | None:
    """When the job's lifetime is over; it counts from the first start, whatever became of that attempt."""
    rules = lifetime_rules(book, run)
    if rules is None or rules.max is None or run.first_started_at is None:
        return None
    return run.first_started_at + timedelta(seconds=rules.max + run.extensions * rules.extend_by)


def lifetime_dues(book: Book, run: JobRun) -> list[datetime]:
    """When to warn and when to end."""
    ends_at, rules = lifetime_ends_at(book, run), lifetime_rules(book, run)
    if ends_at is None or rules is None or not run.has_attempt or run.stop is not None:
        return []
    warned = not rules.warn_before or (run.warned_of is not None and run.warned_of >= ends_at)
    return [ends_at] if warned else [ends_at - timedelta(seconds=rules.warn_before), ends_at]


def judge_lifetime(book: Book, run: JobRun) -> None:
    """Warn or reclaim, if that is due."""
    ends_at, rules = lifetime_ends_at(book, run), lifetime_rules(book, run)
    if ends_at is None or rules is None or not run.has_attempt or run.stop is not None:
        return
    if book.now >= ends_at:
        cause = because(Code.LIFETIME, max_seconds=rules.max, extensions=run.extensions, ended_at=ends_at.isoformat())
        stop(book, run, StopKind.RECLAIM, cause, by="platform")
    elif rules.warn_before and book.now >= ends_at - timedelta(seconds=rules.warn_before) and run.warned_of != ends_at:
        run.warned_of = ends_at
        left = max(rules.extensions - run.extensions, 0)
        book.emit(run, LifetimeWarned(job_id=run.job_id, attempt=run.attempt, ends_at=ends_at, extensions_left=left))


def on_extend_requested(book: Book, event: JobExtendRequested) -> None:
    """Let a job live longer, as often as policy allows."""
    run = book.jobs.get(event.job_id)
    if run is None:
        return
    rules = lifetime_rules(book, run)
    ids = {"job_id": event.job_id, "request_id": event.request_id, "requested_by": event.requested_by}
    if run.state.is_final or rules is None:
        reason = because(Code.UNSUPPORTED, remedy="nothing to do: the job has no lifetime that could be extended")
        book.emit(run, JobExtendRefused(**ids, reason=reason), actor=event.requested_by)
        return
    if run.extensions >= rules.extensions:
        reason = because(
            Code.OVER_LIMIT,
            remedy="save your work and submit a new job, or ask the operator for more extensions",
            extensions=run.extensions,
            allowed=rules.extensions,
        )
        book.emit(run, JobExtendRefused(**ids, reason=reason), actor=event.requested_by)
        return
    run.extensions += 1
    until = lifetime_ends_at(book, run) or book.after((rules.max or 0) + run.extensions * rules.extend_by)
    book.emit(run, JobExtended(**ids, until=until, extensions=run.extensions), actor=event.requested_by)
    for due in lifetime_dues(book, run):
        book.wake(run, due)
