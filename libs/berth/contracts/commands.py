"""Orders to node agents, imperative.

Each carries the node's session epoch and an expiry; launches and stops carry a fence too.
"""

from __future__ import annotations

from pydantic import Field

from berth.contracts.base import Instant, Token, Wire
from berth.contracts.envelope import Order


class WorkerPlan(Wire):
    """One worker to start on this node: its number in the gang, its cards and what is particular to it."""

    worker: int
    gpus: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    command: tuple[str, ...] = ()
    gpu_milli: int = 1000
    memory_mib: int | None = None
    slice: str | None = None


class LaunchWorkers(Order, verb="launch_workers"):
    """Start these workers. `env` is common; a worker's own goes on top. A plan without `command` runs the common one.

    secret_env: names whose values the agent asks the gateway for at start.
    """

    node: Token
    epoch: int
    expires_at: Instant
    job_id: Token
    attempt: int
    fence: int
    tenant: str
    job_class: str
    name: str
    command: tuple[str, ...]
    env: dict[str, str] = Field(default_factory=dict)
    secret_env: tuple[str, ...] = ()
    workdir: str | None = None
    workers: tuple[WorkerPlan, ...]
    grace_seconds: int


class StopWorkers(Order, verb="stop_workers"):
    """Stop these workers (None: all of the attempt on this node): TERM, grace, KILL, nothing left behind."""

    node: Token
    epoch: int
    expires_at: Instant
    job_id: Token
    attempt: int
    fence: int
    workers: tuple[int, ...] | None = None
    grace_seconds: int
    cause: str = ""


class KeptWorker(Wire):
    """A worker that the platform wants to go on."""

    job_id: Token
    attempt: int
    fence: int
    worker: int


class ReconcileNode(Order, verb="reconcile_node"):
    """First order of a session: these workers go on, all else this node runs is stopped; then it takes other orders."""

    node: Token
    epoch: int
    expires_at: Instant
    keep: tuple[KeptWorker, ...] = ()
