"""Questions answered at once over the bus (core NATS request and reply), and their answers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from berth.contracts.base import Instant, Token, Wire
from berth.contracts.nodes import GpuReading, NodeDescription, NodeState
from berth.contracts.reasons import Reason


class ExplainJob(Wire):
    """To placement (`explain`): why does this job wait, with current numbers and its place in the queue?"""

    job_id: Token


class JobExplained(Wire):
    """Answer to `ExplainJob`. `place`: jobs that are served before it, plus one; None where it does not wait."""

    job_id: Token
    is_known: bool
    state: str = ""
    reasons: tuple[Reason, ...] = ()
    place: int | None = None
    waiting: int = 0
    policy_version: int = 0
    state_version: int = 0
    as_of: Instant | None = None


class QuotaQuestion(Wire):
    """To placement (`quota`): who holds what? None: every tenant."""

    tenant: str | None = None


class QuotaLine(Wire):
    """A tenant's standing on one card type, in GPUs; `quota` None: no limit."""

    tenant: str
    card_type: str
    quota: float | None
    used: float
    borrowed: float = 0
    can_borrow: float | None = None
    waiting: float = 0


class QuotaAnswer(Wire):
    """Answer to `QuotaQuestion`."""

    lines: tuple[QuotaLine, ...] = ()
    policy_version: int = 0
    as_of: Instant | None = None


class LedgerQuestion(Wire):
    """To placement (`ledger`): which GPUs are held, by whom?"""

    node: str | None = None


class Holding(Wire):
    """One card (or part of it) in somebody's hands."""

    node: Token
    gpu: str
    job_id: Token
    attempt: int
    fence: int
    worker: int
    tenant: str = ""
    gpu_milli: int = 1000


class LedgerAnswer(Wire):
    """Answer to `LedgerQuestion`."""

    holdings: tuple[Holding, ...] = ()
    state_version: int = 0


class PolicyCheckQuestion(Wire):
    """To admission (`check_policy`): is this document right for the cards of this pool?"""

    document: dict[str, Any]


class PolicyCheckAnswer(Wire):
    """Answer to `PolicyCheckQuestion`. problems: path, fault, remedy. warnings: the same shape, do not refuse."""

    is_valid: bool
    problems: tuple[dict[str, str], ...] = ()
    warnings: tuple[dict[str, str], ...] = ()


class PolicyEffectsQuestion(Wire):
    """To placement (`policy_effects`): what would follow at once if this document were in force?"""

    document: dict[str, Any]


class AffectedJob(Wire):
    """A job that a change of policy touches. rule: why it would be stopped (`quota_cut`, `protection`, ...); empty for
    jobs that go on or start. workers: how many of an elastic gang; None: the whole job."""

    job_id: Token
    tenant: str
    job_class: str
    gpus: float
    rule: str = ""
    workers: int | None = None


class QuotaCut(Wire):
    """A tenant that holds more than it would be entitled to. may_hold: quota and what it may borrow now.

    stopped: GPUs that jobs told to stop give back; draining: GPUs that stay over the limit until jobs end by themselves.
    jobs: running jobs of the tenant on the card type, newest first, bounded.
    """

    tenant: str
    card_type: str
    held: float
    may_hold: float
    over: float
    stopped: float = 0
    draining: float = 0
    jobs: tuple[AffectedJob, ...] = ()


class NeverStarts(Wire):
    """A waiting job that could start one day now and never under the new document."""

    job: AffectedJob
    reasons: tuple[Reason, ...]


class LineEffect(Wire):
    """A protection line or reservation that is new, changed or gone, or opens or closes with the document.

    next_change: when it opens or closes next under the new document; None: never.
    """

    name: str
    kind: str
    change: str
    was_open: bool
    is_open: bool
    next_change: Instant | None = None


class PolicyEffects(Wire):
    """Answer to `PolicyEffectsQuestion`: what the first pass under the document would do, tried on a copy.

    Lists are bounded; `stops_more`, `never_more` and `starts_more` count what is left out. is_tried: False where the
    pool is too large for a trial; then only cuts, never-starting jobs and lines are told.
    """

    policy_version: int
    state_version: int
    as_of: Instant
    is_tried: bool = True
    cuts: tuple[QuotaCut, ...] = ()
    stops: tuple[AffectedJob, ...] = ()
    stops_more: int = 0
    starts: tuple[AffectedJob, ...] = ()
    starts_more: int = 0
    never: tuple[NeverStarts, ...] = ()
    never_more: int = 0
    lines: tuple[LineEffect, ...] = ()


class LogQuestion(Wire):
    """To an agent (`logs`): bytes of a worker's output from `offset` (negative: that many from the end)."""

    job_id: Token
    attempt: int
    worker: int = 0
    offset: int = 0
    max_bytes: int = 262144


class LogAnswer(Wire):
    """Answer to `LogQuestion`; `text` is decoded with replacement. `is_over`: the worker has ended and all was read."""

    is_known: bool
    text: str = ""
    next_offset: int = 0
    is_over: bool = False


class SecretsQuestion(Wire):
    """To the gateway (`secrets`), by an agent that launches a job: values of its secret environment."""

    job_id: Token
    node: Token
    names: tuple[str, ...]


class SecretsAnswer(Wire):
    """Answer to `SecretsQuestion`; never logged."""

    is_known: bool
    values: dict[str, str] = Field(default_factory=dict, repr=False)


class NodesQuestion(Wire):
    """To inventory (`nodes`): latest state and readings."""

    node: str | None = None


class NodeStatus(Wire):
    """One node as inventory knows it now. description: with each card's health of now; readings: the latest, if any."""

    node: Token
    epoch: int
    state: NodeState
    cordoned: bool = False
    description: NodeDescription
    last_heard: Instant | None = None
    readings: tuple[GpuReading, ...] = ()
    readings_at: Instant | None = None


class NodesAnswer(Wire):
    """Answer to `NodesQuestion`, in the order of names; empty where the node is not known."""

    nodes: tuple[NodeStatus, ...] = ()
    as_of: Instant | None = None


class RecordQuestion(Wire):
    """To audit (`events`): recorded events behind number `after`, of one entity if given, oldest first."""

    entity: str | None = None
    after: int = 0
    limit: int = Field(100, ge=1, le=5000)


class UsageQuestion(Wire):
    """To audit (`usage`): who used and who waited between two instants."""

    since: Instant
    until: Instant


class ChainQuestion(Wire):
    """To audit (`verify`): does the hash chain hold from the first row to the last?"""


class RecordPageQuestion(Wire):
    """To audit (`page`): events behind stream sequence `after`, oldest first, about a mebibyte, with where the record
    ends by now."""

    after: int = 0


class CommitsQuestion(Wire):
    """To a deciding service (`commits`): its commit log behind number `after`, about a mebibyte."""

    after: int = 0


class CheckpointQuestion(Wire):
    """To a deciding service (`checkpoint`): where a replay can begin that covers `since` (None: as early as can be); or,
    with its commit_id, its records behind (kind, key), about a mebibyte. until: only commits up to it are of interest."""

    since: Instant | None = None
    until: Instant | None = None
    commit_id: int | None = None
    kind: str = ""
    key: str = ""
