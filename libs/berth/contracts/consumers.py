"""Which service takes in which events: the filters of the durable consumers. A test holds the cores to it."""

from __future__ import annotations

from berth.contracts import events, subjects
from berth.contracts.envelope import Fact

CONSUMES: dict[str, tuple[type[Fact], ...]] = {
    "inventory": (
        events.NodeCordonRequested,
        events.GpuConditionReported,
        events.StartFailed,
        events.PolicyActivated,
    ),
    "admission": (
        events.JobSubmitted,
        events.JobCancelRequested,
        events.JobCancelled,
        events.PolicyApproved,
        events.PolicyProposed,
        events.PolicyWithdrawn,
        events.NodeChanged,
    ),
    "placement": (
        events.JobAdmitted,
        events.AdmissionWithdrawn,
        events.JobCancelRequested,
        events.JobCancelled,
        events.JobFailed,
        events.JobReclaimed,
        events.JobRequeued,
        events.JobRunning,
        events.JobStopping,
        events.AttemptEnded,
        events.NodeChanged,
        events.PolicyActivated,
    ),
    "serving": (
        events.ServiceAdmitted,
        events.ServiceLoadReported,
        events.JobCancelRequested,
        events.JobPlaced,
        events.WorkerReady,
        events.AttemptEnded,
        events.JobRequeued,
        events.JobSucceeded,
        events.JobFailed,
        events.JobCancelled,
        events.JobReclaimed,
        events.PolicyActivated,
        events.RolloutRequested,
        events.RollbackRequested,
        events.RolloutSettingsChanged,
    ),
    "lifecycle": (
        events.JobAdmitted,
        events.JobPlaced,
        events.JobCancelRequested,
        events.JobCancelled,
        events.JobExtendRequested,
        events.JobRerunRequested,
        events.PreemptionPlanned,
        events.ActivityReported,
        events.WorkerStarted,
        events.WorkerExited,
        events.WorkerReleased,
        events.CommandRefused,
        events.NodeRegistered,
        events.NodeSuspect,
        events.NodeBack,
        events.NodeLost,
        events.GpuOut,
        events.PolicyActivated,
    ),
    "gateway": (
        events.JobSubmitted,
        events.JobAdmitted,
        events.JobRefused,
        events.JobHeld,
        events.AdmissionWithdrawn,
        events.JobPlaced,
        events.JobWaiting,
        events.JobRunning,
        events.JobUnknown,
        events.JobStopping,
        events.AttemptEnded,
        events.JobRequeued,
        events.JobSucceeded,
        events.JobFailed,
        events.JobCancelled,
        events.JobReclaimed,
        events.PolicyActivated,
        events.PolicyHeld,
        events.PolicyProposed,
        events.PolicyRejected,
        events.NodeChanged,
    ),
}
"""Audit takes in everything. The gateway's views need two thirds of what there is; subscribers to events read the stream
without a consumer."""


def consumer_filters(pool: str) -> dict[str, list[str]]:
    """Service -> subjects of its durable consumer."""
    filters = {service: [subjects.event_filter(pool, fact) for fact in facts] for service, facts in CONSUMES.items()}
    return {**filters, "audit": [subjects.all_events(pool)]}
