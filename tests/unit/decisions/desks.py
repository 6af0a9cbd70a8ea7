"""A desk in front of a core: feed facts, look at what it tells. Builders show only what matters."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Generic, TypeVar

import orjson

from berth.contracts.base import JobClass
from berth.contracts.envelope import Envelope, Fact, Order
from berth.contracts.events import (
    Assignment,
    JobAdmitted,
    JobCancelRequested,
    JobPlaced,
    NodeRegistered,
    PolicyActivated,
    WorkerExited,
    WorkerReleased,
    WorkerStarted,
)
from berth.contracts.jobs import JobSpec
from berth.contracts.nodes import GpuDescription, NodeDescription, WorkerReport
from berth.contracts.reasons import Reason
from berth.decisions.core import Core

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
C = TypeVar("C", bound=Core)
F = TypeVar("F", Fact, Order)


class Desk(Generic[C]):
    """Feeds a core and keeps all it told and stored, as a shell would."""

    def __init__(self, core: C) -> None:
        self.core = core
        self.now = START
        self.told: list[tuple[str, Any]] = []
        self.ids: list[str] = []
        self.records: dict[tuple[str, str], Any] = {}
        self._count = 0

    def feed(self, *facts: Fact, tenant: str = "research") -> list[Any]:
        """Apply facts as one batch and settle; what was told, in order."""
        for fact in facts:
            self._count += 1
            envelope = Envelope[Any](
                id=f"e.{self._count}.{type(fact).__name__}",
                type=fact.TYPE,
                source="/berth/test/somebody",
                subject="e",
                time=self.now,
                tenant=tenant,
                data=fact,
            )
            self.core.apply(envelope, now=self.now)
        return self.settle()

    def settle(self) -> list[Any]:
        """Fire what is due now."""
        settled = self.core.settle(now=self.now)
        for record in settled.records:
            key = (record.kind, record.key)
            if record.body is None:
                self.records.pop(key, None)
            else:
                self.records[key] = orjson.loads(orjson.dumps(record.body))
        new = [(e.entity, e.data) for e in settled.emissions]
        self.ids += [f"{e.entity}.{e.version}.{type(e.data).__name__}" for e in settled.emissions]
        self.told += new
        return [data for _, data in new]

    def wait(self, seconds: float) -> list[Any]:
        """Let time pass, timers firing when they fall due."""
        until = self.now + timedelta(seconds=seconds)
        told: list[Any] = []
        while (due := self.core.next_timer()) is not None and due <= until:
            self.now = max(self.now, due)
            told += self.settle()
        self.now = until
        return told

    def restart(self, core: C) -> None:
        """Go on with a fresh core rebuilt from the stored records."""
        core.restore(((kind, key, body) for (kind, key), body in self.records.items()), now=self.now)
        self.core = core

    def all(self, kind: type[F]) -> list[F]:
        """Everything of one type told so far."""
        return [data for _, data in self.told if isinstance(data, kind)]

    def last(self, kind: type[F]) -> F:
        """The newest of one type."""
        return self.all(kind)[-1]

    def command_id(self, kind: type[Order]) -> str:
        """The id of the newest command of one type."""
        return next(i for i in reversed(self.ids) if i.endswith("." + kind.__name__))


def a_spec(name: str = "train", *, job_class: str = "training", **more: Any) -> JobSpec:
    return JobSpec(name=name, tenant="research", job_class=JobClass(job_class), command=("true",), **more)


def admitted(job_id: str = "j1", spec: JobSpec | None = None) -> JobAdmitted:
    return JobAdmitted(
        job_id=job_id, spec=spec or a_spec(), submitted_at=START, submitted_by="user:a", policy_version=1
    )


def placed(job_id: str = "j1", *, attempt: int = 1, fence: int = 1, nodes: tuple[str, ...] = ("n1",)) -> JobPlaced:
    """Worker i on nodes[i], one card each."""
    return JobPlaced(
        job_id=job_id,
        attempt=attempt,
        fence=fence,
        assignments=tuple(
            Assignment(worker=i, node=node, gpus=(f"GPU-{node}-{i}",), card_type="H100-80G")
            for i, node in enumerate(nodes)
        ),
    )


def described(node: str, *, gpus: int = 8) -> NodeDescription:
    return NodeDescription(
        node=node,
        address=f"10.0.0.{node[1:]}",
        gpus=tuple(
            GpuDescription(uuid=f"GPU-{node}-{i}", index=i, card_type="H100-80G", memory_mib=81920) for i in range(gpus)
        ),
    )


def registered(node: str = "n1", *, epoch: int = 1, workers: tuple[WorkerReport, ...] = ()) -> NodeRegistered:
    return NodeRegistered(node=node, epoch=epoch, description=described(node), workers=workers)


def reported(job_id: str = "j1", *, attempt: int = 1, fence: int = 1, worker: int = 0) -> WorkerReport:
    return WorkerReport(job_id=job_id, attempt=attempt, fence=fence, worker=worker)


def _ids(job_id: str, attempt: int, fence: int, worker: int, node: str, epoch: int) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "attempt": attempt,
        "fence": fence,
        "worker": worker,
        "node": node,
        "epoch": epoch,
    }


def did_start(
    job_id: str = "j1", worker: int = 0, *, attempt: int = 1, fence: int = 1, node: str = "n1", epoch: int = 1
) -> WorkerStarted:
    return WorkerStarted(**_ids(job_id, attempt, fence, worker, node, epoch), pid=7, started_at=START)


def did_exit(
    job_id: str = "j1",
    worker: int = 0,
    *,
    code: int | None = 0,
    reason: Reason | None = None,
    message: str = "",
    attempt: int = 1,
    fence: int = 1,
    node: str = "n1",
    epoch: int = 1,
) -> WorkerExited:
    return WorkerExited(
        **_ids(job_id, attempt, fence, worker, node, epoch),
        exit_code=code,
        reason=reason,
        message=message,
        ended_at=START,
    )


def did_release(
    job_id: str = "j1", worker: int = 0, *, attempt: int = 1, fence: int = 1, node: str = "n1", epoch: int = 1
) -> WorkerReleased:
    return WorkerReleased(**_ids(job_id, attempt, fence, worker, node, epoch))


def cancel(job_id: str = "j1") -> JobCancelRequested:
    return JobCancelRequested(job_id=job_id, requested_by="user:a")


def policy(version: int = 1, **document: Any) -> PolicyActivated:
    """`defaults` of a document, by their words."""
    return PolicyActivated(policy_version=version, document={"defaults": document}, author="user:ops")


def kinds(told: list[Any]) -> list[str]:
    """Type names, in order."""
    return [type(data).__name__ for data in told]
