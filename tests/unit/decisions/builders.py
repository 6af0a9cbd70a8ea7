"""Builders and a small driver for decision cores: events in, emissions and records out, on a clock that tests set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import orjson

from berth.contracts.envelope import Envelope, Fact, Order
from berth.contracts.events import (
    AttemptEnded,
    AttemptOutcome,
    JobAdmitted,
    JobCancelRequested,
    JobPlaced,
    JobRequeued,
    JobWaiting,
    NodeChanged,
    PolicyActivated,
)
from berth.contracts.jobs import JobSpec
from berth.contracts.nodes import GpuDescription, GpuHealthState, MigLayout, NodeState
from berth.contracts.reasons import Code, because
from berth.decisions.core import Core
from berth.decisions.placement.core import PlacementCore

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
CORE = TypeVar("CORE", bound=Core)
FACT = TypeVar("FACT", bound=Fact)


def a_spec(name: str = "job", **fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": name, "tenant": "lab", "class": "training", "command": ["true"], **fields})


def a_node(
    name: str,
    *,
    type: str = "H100-80G",
    gpus: int = 8,
    version: int = 1,
    state: NodeState = NodeState.READY,
    cordoned: bool = False,
    bad: Sequence[int] = (),
    links: Sequence[Sequence[int]] = (),
    domain: Mapping[str, str] | None = None,
    shareable: bool = False,
    mig: Mapping[int, MigLayout] | None = None,
) -> NodeChanged:
    return NodeChanged(
        node=name,
        node_version=version,
        epoch=1,
        state=state,
        cordoned=cordoned,
        gpus=tuple(
            GpuDescription(
                uuid=f"GPU-{name}-{index}",
                index=index,
                card_type=type,
                memory_mib=81920,
                health=GpuHealthState.QUARANTINED if index in bad else GpuHealthState.HEALTHY,
                mig=(mig or {}).get(index),
            )
            for index in range(gpus)
        ),
        link_groups=tuple(tuple(group) for group in links),
        domain=dict(domain or {}),
        shareable=shareable,
    )


def a_policy(**fields: Any) -> dict[str, Any]:
    return {"tenants": {"lab": {}}, **fields}


class Driver:
    """Feeds one core and keeps what it said and stored, as a shell would."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.now = START
        self.said: list[Fact | Order] = []
        self.store: dict[tuple[str, str], Any] = {}
        self.ids: list[str] = []
        self._events = 0

    def tell(self, *facts: Fact, settle: bool = True) -> list[Fact | Order]:
        for fact in facts:
            self._events += 1
            envelope: Envelope[Any] = Envelope(
                id=f"e{self._events}", type=fact.TYPE, source="/berth/main/test", subject="s", time=self.now, data=fact
            )
            self.core.apply(envelope, now=self.now)
        return self.settle() if settle else []

    def settle(self) -> list[Fact | Order]:
        settled = self.core.settle(now=self.now)
        for record in settled.records:
            if record.body is None:
                self.store.pop((record.kind, record.key), None)
            else:
                self.store[record.kind, record.key] = orjson.loads(orjson.dumps(record.body))
        said = [emission.data for emission in settled.emissions]
        self.ids += [f"{e.entity}.{e.version}.{type(e.data).__name__}" for e in settled.emissions]
        self.said += said
        return said

    def after(self, **delta: float) -> list[Fact | Order]:
        """Let time pass, with every timer on the way."""
        until = self.now + timedelta(**delta)
        said: list[Fact | Order] = []
        while (timer := self.core.next_timer()) is not None and timer <= until:
            self.now = max(timer, self.now)
            said += self.settle()
        self.now = until
        return said + self.settle()

    def restarted(self) -> Driver:
        """The same service after its process was killed: a new core from the stored records."""
        core = type(self.core)()
        core.restore([(kind, key, body) for (kind, key), body in self.store.items()], now=self.now)
        again = Driver(core)
        again.now, again.store, again._events = self.now, dict(self.store), self._events
        return again


class Pool(Driver):
    """A placement core with a policy and nodes, told about jobs in short words."""

    core: PlacementCore

    def __init__(self, *nodes: NodeChanged, policy: dict[str, Any] | None = None) -> None:
        super().__init__(PlacementCore())
        self.set_policy(policy or a_policy())
        self.tell(*nodes)

    def set_policy(self, document: dict[str, Any]) -> list[Fact | Order]:
        version = self.core.policy_version + 1
        return self.tell(PolicyActivated(policy_version=version, document=document, author="user:op"))

    def submit(self, name: str, *, settle: bool = True, **fields: Any) -> list[Fact | Order]:
        return self.tell(
            JobAdmitted(
                job_id=name,
                spec=a_spec(name, **fields),
                submitted_at=self.now,
                submitted_by="user:u",
                policy_version=1,
            ),
            settle=settle,
        )

    def end(
        self, name: str, outcome: AttemptOutcome = AttemptOutcome.SUCCEEDED, *, workers: Sequence[int] | None = None
    ) -> list[Fact | Order]:
        job = self.core.jobs[name]
        return self.tell(
            AttemptEnded(
                job_id=name,
                attempt=job.attempt,
                fence=job.fence,
                outcome=outcome,
                ended_at=self.now,
                workers=None if workers is None else tuple(workers),
            )
        )

    def requeue(self, name: str, *, seconds: float = 0) -> list[Fact | Order]:
        return self.tell(
            JobRequeued(
                job_id=name,
                after_attempt=self.core.jobs[name].attempt,
                not_before=self.now + timedelta(seconds=seconds),
                cause=because(Code.PROGRAM_FAILED),
            )
        )

    def cancel(self, name: str) -> list[Fact | Order]:
        return self.tell(JobCancelRequested(job_id=name, requested_by="user:u"))

    def nodes_of(self, name: str) -> list[str]:
        job = self.core.jobs.get(name)
        return sorted({held.node for held in job.held}) if job else []

    def why(self, name: str) -> dict[str, dict[str, Any]]:
        return {reason.code.value: reason.facts for reason in self.core.explain(name, self.now).reasons}

    def used(self, tenant: str = "lab", card_type: str = "H100-80G") -> float:
        lines = self.core.quota(tenant, self.now).lines
        return next((line.used for line in lines if line.card_type == card_type), 0)


def of_type(said: Sequence[Fact | Order], kind: type[FACT]) -> list[FACT]:
    return [fact for fact in said if isinstance(fact, kind)]


def placed(said: Sequence[Fact | Order]) -> list[str]:
    return [fact.job_id for fact in of_type(said, JobPlaced)]


def told_waiting(said: Sequence[Fact | Order]) -> dict[str, list[str]]:
    return {fact.job_id: [reason.code.value for reason in fact.reasons] for fact in of_type(said, JobWaiting)}
