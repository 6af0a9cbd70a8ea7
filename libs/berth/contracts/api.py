"""Models of the REST API: what the gateway answers. Requests are `JobSpec` and the small bodies at the end."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from berth.contracts.base import DisplayName, Instant, JobClass, Strict, Wire
from berth.contracts.events import Assignment
from berth.contracts.jobs import JobSpec, JobState
from berth.contracts.nodes import NodeState
from berth.contracts.reasons import Reason


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


class PolicyProposal(Strict):
    """Body of a policy change."""

    document: dict[str, Any]
    why: Annotated[str, Field(max_length=1000)] = ""


class CordonRequest(Strict):
    """Body of cordon and uncordon."""

    cordoned: bool
    why: Annotated[str, Field(max_length=1000)] = ""


class TokenRequest(Strict):
    """Body of a new token: for whom, with which role."""

    user: DisplayName
    tenant: DisplayName | None = None
    role: Annotated[str, Field(pattern="^(member|tenant_admin|viewer|operator)$")] = "member"
