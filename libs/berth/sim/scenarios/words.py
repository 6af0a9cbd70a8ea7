"""The audit's words for events: what the record says in the language of the scenarios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from berth.contracts import events as e
from berth.contracts.envelope import Envelope
from berth.contracts.events import AttemptOutcome
from berth.sim.scenarios.views import NOTICES, Views

PLAIN: Mapping[str, str] = {
    "JobSubmitted": "submitted",
    "JobRefused": "refused",
    "JobAdmitted": "queued",
    "JobRequeued": "requeued",
    "JobSucceeded": "succeeded",
    "JobFailed": "failed",
    "JobCancelled": "cancelled",
    "JobReclaimed": "reclaimed",
    "JobExtended": "extended",
    "IdleWarned": "idle_warned",
    "LifetimeWarned": "lifetime_warned",
    "StaleReportIgnored": "stale_event_ignored",
    "NodeSuspect": "node_suspect",
    "NodeLost": "node_lost",
    "NodeBack": "node_back",
    "NodeQuarantined": "quarantined",
    "GpuOut": "gpu_out",
    "GpuReturned": "gpu_back",
    "OrphanFound": "orphan_found",
    "OrphanRemoved": "orphan_removed",
    "ServiceScaled": "scaled",
    "RolloutStarted": "rollout_started",
    "RolloutRefused": "rollout_refused",
    "RolloutWithdrawn": "rolled_back",
    "WindowOpened": "window_opened",
    "WindowClosed": "window_closed",
    "AccessDenied": "access_denied",
}
ALERTS: Mapping[str, str] = {
    "ClockSkewFound": "clock_skew",
    "GpuOut": "gpu_out",
    "NodeQuarantined": "node_quarantined",
    "TelemetryStale": "telemetry_stale",
    "WindowShort": "window_short",
    "ProtectionLineUnmet": "protection_line_unmet",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One record in the scenarios' words. reasons: codes and rules it may be called by."""

    word: str
    at: datetime
    job: str = ""
    node: str = ""
    tenant: str = ""
    by: str = ""
    reasons: frozenset[str] = frozenset()
    facts: Mapping[str, Any] = field(default_factory=dict)


def entries(event: Envelope[Any], at: datetime, views: Views, previous: Mapping[str, Any]) -> Iterable[Entry]:
    """What one event says; `views` and `previous` (policy document) are as before it."""
    data = event.data
    name = type(data).__name__
    if isinstance(data, e.JobRunning):
        yield from _started(event, at, views)
    elif isinstance(data, e.JobStopping) and data.cause.code in NOTICES:
        yield _entry("notice_given", event, at)
    elif isinstance(data, e.AttemptEnded) and data.outcome is AttemptOutcome.PREEMPTED and data.workers is None:
        yield _entry("preempted", event, at)
    elif isinstance(data, e.NodeCordonRequested) and data.cordoned:
        yield _entry("cordoned", event, at)
    elif isinstance(data, e.PolicyActivated):
        yield from _policy(event, at, previous)
    elif name in PLAIN:
        yield _entry(PLAIN[name], event, at)


def alerts(event: Envelope[Any]) -> str | None:
    """The alarm that an event raises."""
    if isinstance(event.data, e.OrphanFound):
        return "gpu_not_clean" if event.data.after_job else "foreign_process"
    return ALERTS.get(type(event.data).__name__)


def _started(event: Envelope[Any], at: datetime, views: Views) -> Iterable[Entry]:
    job = views.jobs.get(event.data.job_id)
    if job is None or job.running_attempt == event.data.attempt:
        return
    yield _entry("started", event, at)
    if job.was_stopped and job.spec.checkpoint:
        yield _entry("resumed", event, at)


def _policy(event: Envelope[Any], at: datetime, previous: Mapping[str, Any]) -> Iterable[Entry]:
    before, after = previous.get("tenants", {}), event.data.document.get("tenants", {})
    by = event.data.author.rpartition(":")[2]
    for tenant in sorted(before.keys() | after.keys()):
        old, new = before.get(tenant, {}).get("quota", {}), after.get(tenant, {}).get("quota", {})
        if old != new:
            yield Entry("quota_changed", at, tenant=tenant, by=by, facts={"before": old, "after": new})
    if _without_quota(previous) != _without_quota(event.data.document):
        yield Entry("policy_changed", at, by=by, facts={"policy_version": event.data.policy_version})


def _without_quota(document: Mapping[str, Any]) -> Mapping[str, Any]:
    tenants = {
        name: {key: value for key, value in tenant.items() if key != "quota"}
        for name, tenant in document.get("tenants", {}).items()
    }
    return {**document, "tenants": tenants}


def _entry(word: str, event: Envelope[Any], at: datetime) -> Entry:
    data = event.data.model_dump(by_alias=True)
    cause = data.get("cause") or data.get("reason") or {}
    facts = {key: value for key, value in data.items() if value is not None}
    if isinstance(cause, dict):
        facts |= cause.get("facts", {})
    facts |= data.get("evidence") or {}
    names = {str(cause["code"])} if isinstance(cause, dict) and cause else set()
    names |= {str(facts[key]) for key in ("rule", "code") if key in facts}
    by = str(facts.get("preemptor") or facts.get("by") or facts.get("requested_by") or event.actor)
    return Entry(
        word,
        at,
        job=str(data.get("job_id", "")),
        node=str(data.get("node", "")),
        tenant=event.tenant,
        by=by.rpartition(":")[2],
        reasons=frozenset(names),
        facts=facts,
    )
