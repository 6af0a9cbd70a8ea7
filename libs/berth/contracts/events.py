"""Facts, past tense. The owner of each type is in its class line; DESIGN section 3 has the order they come in."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import ConfigDict, Field

from berth.contracts.base import Instant, Token, Wire
from berth.contracts.envelope import Fact
from berth.contracts.jobs import JobSpec
from berth.contracts.nodes import GpuDescription, NodeDescription, NodeState, WorkerReport
from berth.contracts.reasons import Reason


# ---------------------------------------------------------------------------------------------------- gateway
class JobSubmitted(Fact, kind="job", fact="submitted", owners="gateway"):
    """A user asked for a job and was answered. Secret values are not in `spec.env`."""

    job_id: Token
    spec: JobSpec
    submitted_at: Instant
    submitted_by: str


class JobCancelRequested(Fact, kind="job", fact="cancel_requested", owners="gateway serving"):
    """A user wants a job ended, or a service one of its replicas. Sticky: whoever holds the job now or later applies it."""

    job_id: Token
    requested_by: str
    why: str = ""


class JobExtendRequested(Fact, kind="job", fact="extend_requested", owners="gateway"):
    """A user wants a job to live longer; lifecycle answers with `JobExtended` or `JobExtendRefused`."""

    job_id: Token
    request_id: Token
    requested_by: str


class JobRerunRequested(Fact, kind="job", fact="rerun_requested", owners="gateway"):
    """A user wants all workers of a job again: what is left of the attempt is stopped, and it competes as a whole."""

    job_id: Token
    requested_by: str


class ServiceLoadReported(Fact, kind="service", fact="load", owners="gateway"):
    """Requests that a service has in hand: being answered, or waiting for a replica. Entity: the service's job.

    Told when it changes and every so often; sampled_at moves on with each fresh reading.
    """

    job_id: Token
    in_flight: float
    sampled_at: Instant


class RolloutRequested(Fact, kind="service", fact="rollout_requested", owners="gateway"):
    """A user wants another version of a service. canary: so many replicas of it and no more; None: all."""

    job_id: Token
    request_id: Token
    to_version: str
    canary: int | None = None
    requested_by: str


class RollbackRequested(Fact, kind="service", fact="rollback_requested", owners="gateway"):
    """A user wants the version before."""

    job_id: Token
    requested_by: str


class RolloutSettingsChanged(Fact, kind="service", fact="rollout_settings", owners="gateway"):
    """How far a rollout may go over the number wanted, or under it."""

    job_id: Token
    surge: int | None = None
    unavailable: int | None = None


class PolicyProposed(Fact, kind="policy", fact="proposed", owners="gateway"):
    """An operator handed in a policy document; admission answers with `PolicyActivated`, `PolicyHeld` or
    `PolicyRejected`. based_on: the version it was made from; rejected when another is in force. None: any."""

    proposal_id: Token
    document: dict[str, Any]
    author: str
    why: str = ""
    based_on: int | None = None


class PolicyApproved(Fact, kind="policy", fact="approved", owners="gateway"):
    """A second operator agrees to a held proposal."""

    proposal_id: Token
    approver: str
    why: str = ""


class PolicyWithdrawn(Fact, kind="policy", fact="withdrawn", owners="gateway"):
    """An operator (the author or another one) turns a held proposal down."""

    proposal_id: Token
    withdrawn_by: str
    why: str = ""


class NodeCordonRequested(Fact, kind="node", fact="cordon_requested", owners="gateway"):
    """An operator wants a node to take no new work (or to take it again); what runs there stays."""

    node: Token
    cordoned: bool
    requested_by: str
    why: str = ""


class AccessDenied(Fact, kind="access", fact="denied", owners="gateway"):
    """Somebody asked for what is not theirs. `action`: cancel_job, read_job, ..."""

    actor: str
    action: str
    target: str = ""
    at: Instant


class Receipt(Wire):
    """Why a decision came out as it did: versions it was made on, what was looked at (bounded), and a digest.

    state_version: number of events applied before it. candidates: the winner and runners-up with scores. filtered: how many
    nodes each filter removed. digest: of inputs and outcome; a re-run must give the same.
    """

    policy_version: int = 0
    state_version: int = 0
    decisions_version: str = ""
    candidates: tuple[dict[str, Any], ...] = ()
    filtered: dict[str, int] = Field(default_factory=dict)
    reasons: tuple[Reason, ...] = ()
    digest: str = ""


# -------------------------------------------------------------------------------------------------- admission
class JobRefused(Fact, kind="job", fact="refused", owners="admission"):
    """The job may never compete; final."""

    job_id: Token
    reasons: tuple[Reason, ...]
    policy_version: int
    receipt: Receipt = Receipt()


class JobHeld(Fact, kind="job", fact="held", owners="admission"):
    """The job may not compete yet: a gate, a budget or an approval is open."""

    job_id: Token
    reasons: tuple[Reason, ...]
    policy_version: int
    receipt: Receipt = Receipt()


class JobAdmitted(Fact, kind="job", fact="admitted", owners="admission serving"):
    """The job competes from now on, with this claim."""

    job_id: Token
    spec: JobSpec
    submitted_at: Instant
    submitted_by: str
    policy_version: int
    receipt: Receipt = Receipt()


class ServiceAdmitted(Fact, kind="service", fact="admitted", owners="admission"):
    """The service may run from now on; serving admits its replicas, each as a job of its own."""

    job_id: Token
    spec: JobSpec
    submitted_at: Instant
    submitted_by: str
    policy_version: int
    receipt: Receipt = Receipt()


class AdmissionWithdrawn(Fact, kind="job", fact="admission_withdrawn", owners="admission"):
    """Admission's own conditions have changed; the job stops competing until it is admitted again."""

    job_id: Token
    reasons: tuple[Reason, ...]


class PolicyActivated(Fact, kind="policy", fact="activated", owners="admission"):
    """A policy document is in force from here on; `policy_version` only grows."""

    policy_version: int
    document: dict[str, Any]
    author: str
    why: str = ""
    proposal_id: str = ""
    approver: str = ""


class PolicyHeld(Fact, kind="policy", fact="held", owners="admission"):
    """A proposed document is right, and has to be approved by an operator other than its author.

    based_on: the version in force; the proposal falls when another one is activated first.
    """

    proposal_id: Token
    author: str
    why: str = ""
    based_on: int
    required_for: str


class PolicyRejected(Fact, kind="policy", fact="rejected", owners="admission"):
    """A proposed document was wrong; the one in force stays. Every fault is listed with its path."""

    proposal_id: Token
    faults: tuple[Reason, ...] = ()
    problems: tuple[dict[str, str], ...] = ()
    author: str


# -------------------------------------------------------------------------------------------------- placement
class Assignment(Wire):
    """Where one worker runs. `gpu_milli`: thousandths of each card (1000: whole). `slice`: profile of a partitioned one."""

    worker: int
    node: Token
    gpus: tuple[str, ...]
    card_type: str = ""
    role: str = ""
    gpu_milli: int = 1000
    memory_mib: int | None = None
    slice: str | None = None


class JobPlaced(Fact, kind="job", fact="placed", owners="placement"):
    """GPUs and quota are taken, in one transaction, for this attempt. `fence` grows over the whole pool.

    Told again for a live attempt, with a newer fence, it adds workers to it (independent workers, replicas, a gang that
    grows back); the fence of the others stays as it was.
    """

    job_id: Token
    attempt: int
    fence: int
    assignments: tuple[Assignment, ...]
    receipt: Receipt = Receipt()


class JobWaiting(Fact, kind="job", fact="waiting", owners="placement"):
    """The set of reasons for which a job waits has changed. Numbers are computed when asked."""

    job_id: Token
    reasons: tuple[Reason, ...]
    attempt: int = 0
    receipt: Receipt = Receipt()


class Victim(Wire):
    """Whom a plan stops; `workers` None: the whole job."""

    job_id: Token
    attempt: int
    tenant: str = ""
    workers: tuple[int, ...] | None = None
    gpus: float = 0


class PreemptionPlanned(Fact, kind="plan", fact="preemption_planned", owners="placement"):
    """These jobs are to be stopped so that another can start or a rule be met; the room is held from now on.

    preemptor: job id, empty where no job but a rule wants the room.
    rule: priority, reclaim, fair, protection, window, quota_cut, reservation.
    """

    plan_id: Token
    preemptor: str = ""
    preemptor_tenant: str = ""
    victims: tuple[Victim, ...]
    rule: str
    grace_seconds: int
    reasons: tuple[Reason, ...] = ()
    receipt: Receipt = Receipt()


class WindowOpened(Fact, kind="window", fact="opened", owners="placement"):
    """The window of a protection line, or a reservation, has begun. Entity: `w-` and a digest of its name."""

    name: str
    at: Instant
    policy_version: int = 0


class WindowClosed(Fact, kind="window", fact="closed", owners="placement"):
    """The window of a protection line, or a reservation, is over."""

    name: str
    at: Instant
    policy_version: int = 0


class AllocationReleased(Fact, kind="allocation", fact="released", owners="placement"):
    """The GPUs and the quota of an attempt (or of some of its workers) are free again; told once. Entity: the job."""

    job_id: Token
    attempt: int
    fence: int
    workers: tuple[int, ...] | None = None
    gpus: float = 0


# -------------------------------------------------------------------------------------------------- lifecycle
class JobRunning(Fact, kind="job", fact="running", owners="lifecycle"):
    """All workers of the attempt run."""

    job_id: Token
    attempt: int
    started_at: Instant


class JobUnknown(Fact, kind="job", fact="unknown", owners="lifecycle"):
    """A node of the running attempt is silent; `JobRunning` follows when it is heard again."""

    job_id: Token
    attempt: int
    node: Token


class JobStopping(Fact, kind="job", fact="stopping", owners="lifecycle"):
    """The attempt was told to stop; it still holds its GPUs. `by`: the preemptor or the user."""

    job_id: Token
    attempt: int
    cause: Reason
    by: str = ""
    grace_seconds: int = 0
    workers: tuple[int, ...] | None = None
    receipt: Receipt = Receipt()


class AttemptOutcome(StrEnum):
    """How an attempt ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    RECLAIMED = "reclaimed"
    LOST = "lost"
    NEVER_STARTED = "never_started"


class AttemptEnded(Fact, kind="attempt", fact="ended", owners="lifecycle"):
    """No process of the attempt holds a GPU any more. Entity: the job.

    workers: None: the whole attempt; else only these left (elastic gangs), the rest goes on.
    """

    job_id: Token
    attempt: int
    fence: int
    outcome: AttemptOutcome
    cause: Reason | None = None
    exit_code: int | None = None
    message: str = ""
    ended_at: Instant
    workers: tuple[int, ...] | None = None


class JobRequeued(Fact, kind="job", fact="requeued", owners="lifecycle"):
    """The job competes again, at its old place, not before `not_before`. `charged`: restarts counted so far."""

    job_id: Token
    after_attempt: int
    not_before: Instant
    cause: Reason
    charged: int = 0


class JobSucceeded(Fact, kind="job", fact="succeeded", owners="lifecycle"):
    """Final."""

    job_id: Token
    attempt: int
    ended_at: Instant


class JobFailed(Fact, kind="job", fact="failed", owners="lifecycle"):
    """Final. `cause` says whose fault; `message` holds the end of the log."""

    job_id: Token
    attempt: int
    cause: Reason
    message: str = ""
    ended_at: Instant


class JobCancelled(Fact, kind="job", fact="cancelled", owners="admission placement lifecycle serving"):
    """Final; told by whoever held the job when the cancel request reached it."""

    job_id: Token
    attempt: int = 0
    requested_by: str = ""
    ended_at: Instant


class JobReclaimed(Fact, kind="job", fact="reclaimed", owners="lifecycle"):
    """Final: idle or past its lifetime. `evidence` is what the verdict rests on."""

    job_id: Token
    attempt: int
    cause: Reason
    evidence: dict[str, Any] = Field(default_factory=dict)
    ended_at: Instant


class JobExtended(Fact, kind="job", fact="extended", owners="lifecycle"):
    """The job may live longer. `extensions`: used so far."""

    job_id: Token
    request_id: Token
    until: Instant
    extensions: int
    requested_by: str = ""


class JobExtendRefused(Fact, kind="job", fact="extend_refused", owners="lifecycle"):
    """The job may not live longer."""

    job_id: Token
    request_id: Token
    reason: Reason
    requested_by: str = ""


class IdleWarned(Fact, kind="job", fact="idle_warned", owners="lifecycle"):
    """Nothing that counts has happened in a job for long; it is reclaimed at `reclaim_at` if that stays so."""

    job_id: Token
    attempt: int
    last_activity: Instant
    timeout_seconds: int
    reclaim_at: Instant


class LifetimeWarned(Fact, kind="job", fact="lifetime_warned", owners="lifecycle"):
    """A job's lifetime is over at `ends_at`. `extensions_left`: how often that can be put off."""

    job_id: Token
    attempt: int
    ends_at: Instant
    extensions_left: int


class TelemetryStale(Fact, kind="job", fact="telemetry_stale", owners="lifecycle serving"):
    """The evidence about a job has stopped being fresh; nothing is concluded from it. Told once for each gap."""

    job_id: Token
    attempt: int
    fresh_until: Instant


class StartFailed(Fact, kind="job", fact="start_failed", owners="lifecycle"):
    """A node could not start a worker; inventory counts these for quarantine."""

    job_id: Token
    attempt: int
    node: Token
    worker: int
    reason: Reason


class StaleReportIgnored(Fact, kind="job", fact="stale_report_ignored", owners="lifecycle"):
    """A report came late, twice or for an attempt that is settled; nothing changed."""

    job_id: Token
    attempt: int
    report: str
    why: str


# ---------------------------------------------------------------------------------------------------- serving
class ServiceScaled(Fact, kind="service", fact="scaled", owners="serving"):
    """Another number of replicas is wanted."""

    model_config = ConfigDict(serialize_by_alias=True)

    job_id: Token
    from_: int = Field(alias="from")
    to: int
    load: float
    reason: Reason | None = None


class RolloutStarted(Fact, kind="service", fact="rollout_started", owners="serving"):
    """A service begins to change its version."""

    model_config = ConfigDict(serialize_by_alias=True)

    job_id: Token
    request_id: str = ""
    from_: str = Field(alias="from")
    to: str
    canary: int | None = None


class RolloutRefused(Fact, kind="service", fact="rollout_refused", owners="serving"):
    """A version change cannot begin."""

    job_id: Token
    request_id: str = ""
    to: str
    reason: Reason


class RolloutFinished(Fact, kind="service", fact="rollout_finished", owners="serving"):
    """All replicas are of the new version."""

    job_id: Token
    version: str


class RolloutWithdrawn(Fact, kind="service", fact="rolled_back", owners="serving"):
    """The new version goes, the old one stays or comes back."""

    model_config = ConfigDict(serialize_by_alias=True)

    job_id: Token
    from_: str = Field(alias="from")
    to: str
    reason: Reason


# -------------------------------------------------------------------------------------------------- inventory
class NodeRegistered(Fact, kind="node", fact="registered", owners="inventory"):
    """An agent took up a node in a new session; lifecycle answers with `ReconcileNode` for that epoch."""

    node: Token
    epoch: int
    description: NodeDescription
    workers: tuple[WorkerReport, ...] = ()


class NodeChanged(Fact, kind="node", fact="changed", owners="inventory"):
    """All that placement needs to know of a node, whole, each time any of it changes. `node_version` grows per node."""

    node: Token
    node_version: int
    epoch: int
    state: NodeState
    cordoned: bool = False
    gpus: tuple[GpuDescription, ...]
    link_groups: tuple[tuple[int, ...], ...] = ()
    domain: dict[str, str] = Field(default_factory=dict)
    shareable: bool = False
    address: str = ""


class NodeSuspect(Fact, kind="node", fact="suspect", owners="inventory"):
    """Silent for longer than suspect_after: no new work, what runs there stays."""

    node: Token
    epoch: int
    silent_seconds: float


class NodeLost(Fact, kind="node", fact="lost", owners="inventory"):
    """Silent for so long that its lease has certainly run out and its agent has stopped its work."""

    node: Token
    epoch: int
    silent_seconds: float


class NodeBack(Fact, kind="node", fact="back", owners="inventory"):
    """A suspect or lost node is heard again."""

    node: Token
    epoch: int
    was: NodeState


class GpuOut(Fact, kind="gpu", fact="out", owners="inventory"):
    """A card left the pool. Entity: the node."""

    node: Token
    gpu: str
    index: int
    reason: Reason


class GpuReturned(Fact, kind="gpu", fact="returned", owners="inventory"):
    """A card may be used again. Entity: the node."""

    node: Token
    gpu: str
    index: int


class NodeQuarantined(Fact, kind="node", fact="quarantined", owners="inventory"):
    """Too many starts failed on a node; it takes no new work until it is uncordoned."""

    node: Token
    failures: int
    within_seconds: int


class OrphanFound(Fact, kind="gpu", fact="orphan_found", owners="inventory"):
    """Memory of a card is held though no job has it; the card takes no new work until it is clean. Entity: the node.

    after_job: a job of ours was the last on the card; else the process is foreign.
    """

    node: Token
    gpu: str
    index: int
    used_gib: float
    after_job: bool = False


class OrphanRemoved(Fact, kind="gpu", fact="orphan_removed", owners="inventory"):
    """The card is clean again. Entity: the node."""

    node: Token
    gpu: str
    index: int


class ClockSkewFound(Fact, kind="node", fact="clock_skew_found", owners="inventory"):
    """A node's clock is off by so much. Nothing is decided by it; told once until it is right again."""

    node: Token
    offset_seconds: float


# ------------------------------------------------------------------------------------------------- node agents
class WorkerStarted(Fact, kind="worker", fact="started", owners="node_agent"):
    """A worker's program runs. Entity: the job."""

    job_id: Token
    attempt: int
    fence: int
    worker: int
    node: Token
    epoch: int
    pid: int = 0
    started_at: Instant


class WorkerReady(Fact, kind="worker", fact="ready", owners="node_agent"):
    """A replica answers its health check, or no longer does. Entity: the job."""

    job_id: Token
    attempt: int
    fence: int
    worker: int
    node: Token
    epoch: int
    is_ready: bool = True


class WorkerExited(Fact, kind="worker", fact="exited", owners="node_agent"):
    """A worker's program ended, or could not be started (`reason` start_refused), or was found gone (`worker_lost`)."""

    job_id: Token
    attempt: int
    fence: int
    worker: int
    node: Token
    epoch: int
    exit_code: int | None = None
    signal: int | None = None
    reason: Reason | None = None
    message: str = ""
    ended_at: Instant


class WorkerReleased(Fact, kind="worker", fact="released", owners="node_agent"):
    """No process of the worker holds a card. Comes after `WorkerExited`."""

    job_id: Token
    attempt: int
    fence: int
    worker: int
    node: Token
    epoch: int


class Activity(StrEnum):
    """Signs of work in an interactive job; policy says which count."""

    KERNEL_BUSY = "kernel_busy"
    EXECUTION = "execution"
    TERMINAL_BUSY = "terminal_busy"
    GPU_UTIL = "gpu_util"


class ActivityReported(Fact, kind="worker", fact="activity", owners="node_agent"):
    """What a worker was seen doing, told when it changes and every so often. Entity: the job.

    active: signs present now, without GPU use. gpu_utilization: the busiest of its cards, 0 to 1; None: not known.
    sampled_at: the node's own stamp; only whether it moves on matters. Connections are no signs of work.
    """

    job_id: Token
    attempt: int
    fence: int
    worker: int
    node: Token
    epoch: int
    active: tuple[Activity, ...] = ()
    gpu_utilization: float | None = None
    sampled_at: Instant


class CommandRefused(Fact, kind="worker", fact="command_refused", owners="node_agent"):
    """A node did not carry out a command: other epoch, older fence, expired, not reconciled. Entity: job or node."""

    command_id: str
    command: str
    node: Token
    epoch: int
    job_id: str = ""
    attempt: int = 0
    fence: int = 0
    workers: tuple[int, ...] = ()
    reason: Reason


class GpuConditionReported(Fact, kind="worker", fact="gpu_condition", owners="node_agent"):
    """A node saw a fault code, leftover memory, or a passed check on a card; inventory decides. Entity: the node.

    memory_used_mib: memory in use while no worker of ours has the card; 0: clean again. after_job: a worker of ours was
    the last on it.
    """

    node: Token
    epoch: int
    gpu: str
    xid: int | None = None
    memory_used_mib: int | None = None
    after_job: bool = False
    passed_check: bool = False
    at: Instant
