"""Models of the REST API: what the gateway answers. Requests are `JobSpec` and the small bodies at the end."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from berth.contracts.base import DisplayName, Instant, JobClass, Strict, Wire
from berth.contracts.events import Assignment
from berth.contracts.jobs import CardType, JobSpec, JobState
from berth.contracts.nodes import NodeState
from berth.contracts.reasons import Reason
from berth.contracts.requests import PolicyEffects


class Problem(Wire):
    """RFC 9457 problem document. code: stable, for programs. field: path of what is wrong. remedy: what to do about it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""
    instance: str = ""
    code: str
    field: str | None = None
    value: str | None = None
    remedy: str = ""
    errors: tuple[dict[str, Any], ...] = ()


class AttemptView(Wire):
    """One try of a job."""

    attempt: int
    fence: int
    assignments: tuple[Assignment, ...] = ()
    placed_at: Instant | None = None
    started_at: Instant | None = None
    ended_at: Instant | None = None
    outcome: str | None = None
    cause: Reason | None = None
    exit_code: int | None = None
    message: str = ""


class JobView(Wire):
    """A job as its tenant sees it. `summary`: one line: never fits / waits because ... / runs on ..."""

    job_id: str
    name: str
    tenant: str
    job_class: JobClass
    priority: int
    state: JobState
    reasons: tuple[Reason, ...] = ()
    summary: str = ""
    submitted_at: Instant
    submitted_by: str = ""
    started_at: Instant | None = None
    ended_at: Instant | None = None
    waited_seconds: float | None = None
    gpus: int = 0
    workers: int = 1
    attempt: int = 0
    restarts_charged: int = 0
    nodes: tuple[str, ...] = ()
    cancel_requested: bool = False
    message: str = ""
    trace_id: str = ""
    spec: JobSpec | None = None
    attempts: tuple[AttemptView, ...] = ()


class JobList(Wire):
    """A page of jobs, newest first; `next` continues after it."""

    jobs: tuple[JobView, ...]
    next: str | None = None


class Submitted(Wire):
    """Answer to a submission. `is_repeat`: the idempotency key was known, this is the first job."""

    job_id: str
    name: str
    state: JobState = JobState.SUBMITTED
    is_repeat: bool = False


class SubmittedBatch(Wire):
    """Answer to a batch, in the order asked."""

    jobs: tuple[Submitted, ...]


class WhyView(Wire):
    """Why a job waits, now. `text`: the reasons as a person would say them, in order of weight."""

    job_id: str
    state: JobState
    reasons: tuple[Reason, ...] = ()
    text: tuple[str, ...] = ()
    place: int | None = None
    waiting: int | None = None
    policy_version: int | None = None
    as_of: Instant


class GpuView(Wire):
    """One card: what it is, how it is, who holds it."""

    uuid: str
    node: str
    index: int
    card_type: str
    memory_mib: int
    health: str
    utilization_percent: float | None = None
    memory_used_mib: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    readings_at: Instant | None = None
    held_by: tuple[str, ...] = ()


class NodeView(Wire):
    """One node."""

    node: str
    state: NodeState
    cordoned: bool = False
    hostname: str = ""
    address: str = ""
    card_types: dict[str, int] = Field(default_factory=dict)
    gpus: int = 0
    gpus_usable: int = 0
    gpus_held: int = 0
    driver_version: str = ""
    epoch: int = 0
    last_heard: Instant | None = None
    link_groups: tuple[tuple[int, ...], ...] = ()
    link_matrix: tuple[tuple[str, ...], ...] = ()
    domain: dict[str, str] = Field(default_factory=dict)


class EventView(Wire):
    """One event as subscribers see it; `sequence` is what `Last-Event-ID` resumes from."""

    sequence: int
    id: str
    type: str
    time: Instant
    subject: str
    tenant: str = ""
    actor: str = ""
    data: dict[str, Any] = Field(default_factory=dict)


class TenantView(Wire):
    """A tenant and its standing."""

    tenant: str
    quota: dict[str, float] = Field(default_factory=dict)
    used: dict[str, float] = Field(default_factory=dict)
    jobs_waiting: int = 0
    jobs_running: int = 0


class CancelRequest(Strict):
    """Body of a cancel; may be empty."""

    why: Annotated[str, Field(max_length=1000)] = ""


Why = Annotated[str, Field(max_length=1000)]


class PolicyProposal(Strict):
    """Body of a policy change. based_on: the version it was made from; refused when another is in force by then."""

    document: dict[str, Any]
    why: Why = ""
    based_on: Annotated[int, Field(ge=0, strict=True)] | None = None


class PolicyDiffRequest(Strict):
    """Body of a comparison: with a document, or with a version. base: the version to compare with; None: the one in force."""

    document: dict[str, Any] | None = None
    version: Annotated[int, Field(ge=1, strict=True)] | None = None
    base: Annotated[int, Field(ge=1, strict=True)] | None = None


class PolicyDecision(Strict):
    """Body of an approval of a held proposal, or of turning it down."""

    why: Why = ""


class QuotaChange(Strict):
    """Body of a quota change: GPUs by card type; null takes the limit of a type away. Types left out stay as they are."""

    quota: Annotated[
        dict[CardType, Annotated[float, Field(allow_inf_nan=False, strict=True)] | None],
        Field(min_length=1, max_length=100),
    ]
    why: Why = ""


class PolicyChangeView(Wire):
    """One difference between two policies. text: in words."""

    path: str
    before: Any = None
    after: Any = None
    text: str


class PolicyDiffView(Wire):
    """What differs, whether it may be activated, and what would follow at once.

    to_version None: a document. effects: only against the version in force and where the document is right.
    """

    from_version: int
    to_version: int | None = None
    changes: tuple[PolicyChangeView, ...] = ()
    problems: tuple[dict[str, str], ...] = ()
    warnings: tuple[dict[str, str], ...] = ()
    needs_approval: bool = False
    effects: PolicyEffects | None = None


class PolicyVersionView(Wire):
    """One version: when, by whom, why, and what changed in short."""

    version: int
    activated_at: Instant
    author: str
    approver: str = ""
    why: str = ""
    changed: str = ""
    changes: int = 0


class PolicyHistoryView(Wire):
    """Versions, newest first. next: pass it as `before` for older ones."""

    versions: tuple[PolicyVersionView, ...] = ()
    next: int | None = None


class HeldProposalView(Wire):
    """A proposal that waits for a second operator."""

    proposal_id: str
    author: str
    why: str = ""
    proposed_at: Instant
    based_on: int
    required_for: str
    changes: tuple[PolicyChangeView, ...] = ()


class HeldProposalList(Wire):
    """Proposals that wait for a second operator, oldest first."""

    proposals: tuple[HeldProposalView, ...] = ()


class CordonRequest(Strict):
    """Body of cordon and uncordon."""

    cordoned: bool
    why: Annotated[str, Field(max_length=1000)] = ""


class TokenRequest(Strict):
    """Body of a new token: for whom, with which role."""

    user: DisplayName
    tenant: DisplayName | None = None
    role: Annotated[str, Field(pattern="^(member|tenant_admin|viewer|operator)$")] = "member"
