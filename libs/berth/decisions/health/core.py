"""The inventory core: which nodes are heard, which cards are healthy.

Silence is measured by arrival on the platform's clock and counts from the end of our own last deafness: after a restart
or an outage of the bus nobody has been silent for long. A node is declared lost only while we hear at least half of the
nodes that are not lost already, so that our own isolation never looks like theirs; agents keep the mirror of this rule.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar

from pydantic import TypeAdapter

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    ClockSkewFound,
    GpuConditionReported,
    GpuOut,
    GpuReturned,
    NodeBack,
    NodeChanged,
    NodeCordonRequested,
    NodeLost,
    NodeQuarantined,
    NodeRegistered,
    NodeSuspect,
    OrphanFound,
    OrphanRemoved,
    PolicyActivated,
    StartFailed,
)
from berth.contracts.nodes import (
    GpuDescription,
    GpuHealthState,
    LeaseRenewed,
    NodeAccepted,
    NodeDescription,
    NodeState,
    RegisterNode,
    RegistrationRefused,
    TelemetryFrame,
)
from berth.contracts.reasons import Code, Reason, because
from berth.contracts.requests import NodesAnswer, NodeStatus
from berth.decisions.core import Core, Outbox, Record, Settled
from berth.decisions.health.model import Card, Hearing, NodeRecord
from berth.decisions.policy.document import Policy

DEFAULT_SUSPECT_AFTER = 30.0
DEFAULT_LOST_AFTER = 300.0
STOP_SHARE = 0.1
"""Share of `lost_after` that is left to the agent after its lease: it stops all work, before we call it lost."""
STOP_SECONDS = 12.0
"""At least so long, as programs have a grace: but no more than a third of `lost_after`, then the grace is cut short."""
SKEW_SECONDS = 5.0
_RECORD = TypeAdapter(NodeRecord)


@dataclass(slots=True)
class _Ear:
    """What is only kept in memory: when a node was last heard, and its latest readings."""

    heard_at: datetime
    check_at: datetime
    frame: TelemetryFrame | None = None
    frame_at: datetime | None = None


class InventoryCore(Core):
    """Decides node ready, suspect, lost or quarantined; GPU healthy, out or not clean."""

    NAME: ClassVar[str] = "inventory"
    CONSUMES: ClassVar[tuple[type[Fact], ...]] = (
        NodeCordonRequested,
        GpuConditionReported,
        StartFailed,
        PolicyActivated,
    )

    def __init__(self, *, telemetry_every_seconds: float = 5.0) -> None:
        """telemetry_every_seconds: the longest time between frames that nodes are asked for."""
        self._telemetry_every = telemetry_every_seconds
        self._nodes: dict[str, NodeRecord] = {}
        self._described: dict[str, NodeDescription] = {}
        self._ears: dict[str, _Ear] = {}
        self._checks: list[tuple[datetime, str]] = []
        self._out = Outbox()
        self._records: dict[tuple[str, str], Any] = {}
        self._policy = Policy()
        self._policy_version = 0
        self._suspect_after = timedelta(seconds=DEFAULT_SUSPECT_AFTER)
        self._lost_after = timedelta(seconds=DEFAULT_LOST_AFTER)
        self._hearing_since: datetime | None = None
        self._is_deaf = False
        self._heard = 0
        self._cause = ""

    # --------------------------------------------------------------------------------------------- direct calls
    def register(self, request: RegisterNode, *, now: datetime) -> NodeAccepted | RegistrationRefused:
        """Take a node's new session, or say why not. The answer must not be sent before the emissions are stored."""
        name = request.description.node
        taken = self._cards_elsewhere(request.description)
        if taken:
            return RegistrationRefused(
                reason=because(
                    Code.UNSUPPORTED,
                    remedy="one agent per card; give this agent its own cards, or stop the other one first",
                    node=name,
                    gpu=taken[0],
                    held_by_node=taken[1],
                )
            )
        record = self._nodes.setdefault(name, NodeRecord(name))
        before, known = record.hearing, record.epoch > 0
        record.epoch += 1
        record.hearing = Hearing.HEARD
        record.description = request.description.model_dump(mode="json", exclude_defaults=True)
        self._described[name] = request.description
        record.cards = {gpu.uuid: record.cards.get(gpu.uuid) or Card(gpu.index) for gpu in request.description.gpus}
        self._listen(name, now)
        self._count_heard()
        self._emit(
            name,
            NodeRegistered(node=name, epoch=record.epoch, description=request.description, workers=request.workers),
        )
        if known and before is not Hearing.HEARD:
            self._emit(name, NodeBack(node=name, epoch=record.epoch, was=NodeState(before.value)))
        self._changed(record)
        self._skew(record, (request.sent_at - now).total_seconds())
        return NodeAccepted(
            node=name,
            epoch=record.epoch,
            lease_seconds=self.lease_seconds,
            telemetry_every_seconds=self.telemetry_every_seconds,
            platform_time=now,
            pool_nodes=len(self._ears),
            stop_seconds=self.stop_seconds,
        )

    def heard(self, frame: TelemetryFrame, *, now: datetime) -> LeaseRenewed:
        """Renew a node's lease. A session we do not know, or gave up, must register again."""
        record, ear = self._nodes.get(frame.node), self._ears.get(frame.node)
        known = record is not None and record.epoch == frame.epoch and record.hearing is not Hearing.LOST
        if known and record is not None and ear is not None:
            ear.heard_at = ear.frame_at = now
            ear.frame = frame
            if record.hearing is Hearing.SUSPECT:
                self._back(record, now)
            offset = (frame.sent_at - now).total_seconds()
            if (abs(offset) >= SKEW_SECONDS) is not record.skew_told:
                self._skew(record, offset)
        return LeaseRenewed(
            node=frame.node,
            epoch=frame.epoch,
            sequence=frame.sequence,
            lease_seconds=self.lease_seconds,
            register_again=not known,
            platform_time=now,
            pool_nodes=len(self._ears),
            stop_seconds=self.stop_seconds,
        )

    def goes_deaf(self) -> None:
        """From now on we hear nobody (the bus is away): nobody is judged until `was_deaf`."""
        self._is_deaf = True

    def was_deaf(self, *, now: datetime) -> None:
        """We were not listening until now (bus away, process stopped): silence before `now` is ours, not theirs."""
        self._is_deaf = False
        self._hearing_since = now
        for name, ear in self._ears.items():
            ear.heard_at = max(ear.heard_at, now)
            self._check(name, ear, now + self._suspect_after)

    def nodes(self, node: str | None = None, *, now: datetime | None = None) -> NodesAnswer:
        """All nodes (or one) in the order of their names, with the latest readings."""
        names = sorted(self._described) if node is None else [node] if node in self._described else []
        return NodesAnswer(nodes=tuple(self._status(name) for name in names), as_of=now)

    @property
    def node_names(self) -> list[str]:
        """Nodes that have registered, in order."""
        return sorted(self._described)

    def state(self, node: str) -> NodeState | None:
        """Whether a node may get new work, and whether it is heard; None: never registered."""
        return self._nodes[node].state if node in self._described else None

    @property
    def has_news(self) -> bool:
        """Whether a direct call led to something that `settle` is to hand over."""
        return bool(self._out.emissions or self._records)

    @property
    def lease_seconds(self) -> float:
        """How long an agent may go on without an answer."""
        return self._lost_after.total_seconds() - self.stop_seconds

    @property
    def stop_seconds(self) -> float:
        """How long after that its last process may live."""
        lost_after = self._lost_after.total_seconds()
        return max(lost_after * STOP_SHARE, min(STOP_SECONDS, lost_after / 3))

    @property
    def telemetry_every_seconds(self) -> float:
        """How often agents send frames: several may be lost before a node is suspect."""
        return min(max(self._suspect_after.total_seconds() / 5, 0.2), self._telemetry_every)

    # ------------------------------------------------------------------------------------------------------- Core
    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one new event."""
        handler = _HANDLERS.get(type(event.data))
        if handler is not None:
            self._cause = event.id
            handler(self, event.data, now)
            self._cause = ""

    def settle(self, *, now: datetime) -> Settled:
        """Look at nodes whose silence is due for a judgement, and hand over what this batch led to."""
        if self._hearing_since is None:
            self._hearing_since = now
        fired = 0
        while self._checks and self._checks[0][0] <= now:
            at, name = heapq.heappop(self._checks)
            ear = self._ears.get(name)
            if ear is not None and ear.check_at == at:
                fired += 1
                self._judge(self._nodes[name], ear, now)
        emissions = self._out.drain()
        records, self._records = self._records, {}
        for body in records.values():
            if isinstance(body, NodeRecord):
                body.told = self._out.counters.get(body.node, 0)
        return Settled(emissions, [Record(kind, key, body) for (kind, key), body in records.items()], fired)

    def next_timer(self) -> datetime | None:
        """When the next node's silence is to be judged."""
        while self._checks:
            at, name = self._checks[0]
            ear = self._ears.get(name)
            if ear is not None and ear.check_at == at:
                return at
            heapq.heappop(self._checks)
        return None

    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild the state. Nobody was heard while we were away, so silence counts from `now`."""
        self._hearing_since = now
        for kind, key, body in records:
            if kind == "policy":
                self._take_policy(body["version"], body["document"])
            elif kind == "node":
                record = self._nodes[key] = _RECORD.validate_python(body)
                self._described[key] = record.described()
                self._out.counters[key] = record.told
        for name, record in sorted(self._nodes.items()):
            if record.epoch and record.hearing is not Hearing.LOST:
                self._listen(name, now)
        self._count_heard()

    @property
    def policy_version(self) -> int:
        """Version of the policy in force here."""
        return self._policy_version

    # ----------------------------------------------------------------------------------------------------- events
    def _on_policy(self, data: PolicyActivated, now: datetime) -> None:
        if data.policy_version <= self._policy_version:
            return
        before = self._lost_after
        self._take_policy(data.policy_version, data.document)
        if self._lost_after < before:
            self._keep_promises(now + before)
        self._records["policy", "active"] = {"version": data.policy_version, "document": data.document}
        for name, ear in self._ears.items():
            self._check(name, ear, max(ear.heard_at + self._suspect_after, now))

    def _on_cordon(self, data: NodeCordonRequested, now: datetime) -> None:
        record = self._nodes.setdefault(data.node, NodeRecord(data.node))
        released = not data.cordoned and record.quarantined
        if record.cordoned == data.cordoned and not released:
            return
        record.cordoned = data.cordoned
        if released:
            record.quarantined, record.start_failures = False, []
        self._changed(record)

    def _on_start_failed(self, data: StartFailed, now: datetime) -> None:
        record, rules = self._nodes.get(data.node), self._policy.defaults.recovery.quarantine
        if record is None or rules is None or record.quarantined:
            return
        oldest = now - timedelta(seconds=rules.within)
        record.start_failures = [at for at in record.start_failures if at > oldest] + [now]
        self._records["node", record.node] = record
        if len(record.start_failures) >= rules.failures:
            record.quarantined = True
            self._emit(
                record.node,
                NodeQuarantined(node=record.node, failures=len(record.start_failures), within_seconds=rules.within),
            )
            self._changed(record)

    def _on_condition(self, data: GpuConditionReported, now: datetime) -> None:
        record = self._nodes.get(data.node)
        card = record.cards.get(data.gpu) if record is not None else None
        if record is None or card is None:
            return
        before = card.health
        if data.xid is not None:
            self._fault(record, data.gpu, card, data.xid)
        if data.passed_check and card.out is not None:
            card.out = None
            self._emit(record.node, GpuReturned(node=record.node, gpu=data.gpu, index=card.index))
        if data.memory_used_mib is not None:
            self._memory(record, data.gpu, card, data.memory_used_mib, after_job=data.after_job)
        if card.health is not before:
            self._changed(record)

    def _fault(self, record: NodeRecord, gpu: str, card: Card, xid: int) -> None:
        if xid not in self._policy.health.fatal_xids or card.out is not None:
            return
        reason = because(Code.GPU_FAULT, gpu=gpu, xid=xid)
        card.out = reason.model_dump(mode="json", exclude_defaults=True)
        self._emit(record.node, GpuOut(node=record.node, gpu=gpu, index=card.index, reason=reason))

    def _memory(self, record: NodeRecord, gpu: str, card: Card, used_mib: int, *, after_job: bool) -> None:
        if self._policy.cleaning.wait is None and not card.unclean_mib:
            return
        was, card.unclean_mib = card.unclean_mib, max(used_mib, 0)
        self._records["node", record.node] = record
        if card.unclean_mib and not was:
            self._emit(
                record.node,
                OrphanFound(
                    node=record.node,
                    gpu=gpu,
                    index=card.index,
                    used_gib=round(used_mib / 1024, 3),
                    after_job=after_job,
                ),
            )
        elif was and not card.unclean_mib:
            self._emit(record.node, OrphanRemoved(node=record.node, gpu=gpu, index=card.index))

    # ---------------------------------------------------------------------------------------------------- silence
    def _listen(self, name: str, now: datetime) -> None:
        ear = self._ears.get(name)
        if ear is None:
            ear = self._ears[name] = _Ear(now, now)
        ear.heard_at = now
        self._check(name, ear, now + self._suspect_after)

    def _check(self, name: str, ear: _Ear, at: datetime) -> None:
        ear.check_at = at
        heapq.heappush(self._checks, (at, name))

    def _judge(self, record: NodeRecord, ear: _Ear, now: datetime) -> None:
        """Suspect or lost, by how long the node has been silent; and when to look again."""
        if record.hearing is Hearing.LOST:
            return
        since = max(ear.heard_at, self._hearing_since or ear.heard_at)
        silent = now - since
        if self._is_deaf:
            self._check(record.node, ear, now + self._suspect_after)
            return
        if record.hearing is Hearing.HEARD:
            if silent < self._suspect_after:
                self._check(record.node, ear, since + self._suspect_after)
                return
            record.hearing = Hearing.SUSPECT
            self._heard -= 1
            self._emit(
                record.node,
                NodeSuspect(node=record.node, epoch=record.epoch, silent_seconds=silent.total_seconds()),
            )
            self._changed(record)
        lost_at = max(since + self._lost_after, record.leased_until or since)
        if now < lost_at:
            self._check(record.node, ear, lost_at)
        elif not self._hears_enough():
            self._check(record.node, ear, now + self._suspect_after)
        else:
            record.hearing = Hearing.LOST
            self._emit(
                record.node, NodeLost(node=record.node, epoch=record.epoch, silent_seconds=silent.total_seconds())
            )
            self._changed(record)

    def _hears_enough(self) -> bool:
        known = sum(1 for r in self._nodes.values() if r.epoch and r.hearing is not Hearing.LOST)
        return 2 * self._heard >= known

    def _count_heard(self) -> None:
        self._heard = sum(1 for r in self._nodes.values() if r.epoch and r.hearing is Hearing.HEARD)

    def _back(self, record: NodeRecord, now: datetime) -> None:
        was = record.state
        record.hearing = Hearing.HEARD
        self._heard += 1
        self._check(record.node, self._ears[record.node], now + self._suspect_after)
        self._emit(record.node, NodeBack(node=record.node, epoch=record.epoch, was=was))
        self._changed(record)

    def _skew(self, record: NodeRecord, offset: float) -> None:
        is_off = abs(offset) >= SKEW_SECONDS
        if is_off and not record.skew_told:
            self._emit(record.node, ClockSkewFound(node=record.node, offset_seconds=round(offset, 3)))
        record.skew_told = is_off
        self._records["node", record.node] = record

    # ---------------------------------------------------------------------------------------------------- telling
    def _emit(self, node: str, fact: Fact) -> None:
        self._out.emit(fact, node, cause=self._cause)
        self._records["node", node] = self._nodes[node]

    def _changed(self, record: NodeRecord) -> None:
        """Tell the whole state of a node that has registered."""
        self._records["node", record.node] = record
        described = self._described.get(record.node)
        if described is None:
            return
        record.version += 1
        self._emit(
            record.node,
            NodeChanged(
                node=record.node,
                node_version=record.version,
                epoch=record.epoch,
                state=record.state,
                cordoned=record.cordoned,
                gpus=self._gpus(record, described),
                link_groups=described.link_groups,
                domain=described.domain,
                shareable=described.shareable,
                address=described.address,
            ),
        )

    # ----------------------------------------------------------------------------------------------------- the rest
    def _keep_promises(self, until: datetime) -> None:
        """Leases were given for longer than from now on; agents go by the longest that they were given."""
        for record in self._nodes.values():
            record.leased_until = max(record.leased_until or until, until)
            self._records["node", record.node] = record

    def _take_policy(self, version: int, document: dict[str, Any]) -> None:
        self._policy, self._policy_version = Policy.from_document(document), version
        recovery = self._policy.defaults.recovery
        # a pool must always find out about dead nodes; what policy leaves open has a default here
        self._suspect_after = timedelta(seconds=recovery.suspect_after or DEFAULT_SUSPECT_AFTER)
        lost = recovery.lost_after or max(DEFAULT_LOST_AFTER, self._suspect_after.total_seconds())
        self._lost_after = timedelta(seconds=lost)

    def _cards_elsewhere(self, description: NodeDescription) -> tuple[str, str] | None:
        """A card of this node that another node, not lost, has registered; None where there is none."""
        mine = {gpu.uuid for gpu in description.gpus}
        for name, record in self._nodes.items():
            if name != description.node and record.hearing is Hearing.HEARD:
                both = mine & record.cards.keys()
                if both:
                    return min(both), name
        return None

    def _status(self, name: str) -> NodeStatus:
        record, ear = self._nodes[name], self._ears.get(name)
        described = self._described[name]
        return NodeStatus(
            node=name,
            epoch=record.epoch,
            state=record.state,
            cordoned=record.cordoned,
            description=described.model_copy(update={"gpus": self._gpus(record, described)}),
            last_heard=ear.heard_at if ear else None,
            readings=ear.frame.gpus if ear and ear.frame else (),
            readings_at=ear.frame_at if ear else None,
        )

    def _gpus(self, record: NodeRecord, described: NodeDescription) -> tuple[GpuDescription, ...]:
        """The cards with their health of now."""
        return tuple(
            gpu
            if (card := record.cards[gpu.uuid]).health is GpuHealthState.HEALTHY
            else gpu.model_copy(
                update={
                    "health": card.health,
                    "health_reasons": (Reason.model_validate(card.out),) if card.out else (),
                }
            )
            for gpu in described.gpus
        )


Handler = Callable[[InventoryCore, Any, datetime], None]
_HANDLERS: dict[type[Fact], Handler] = {
    PolicyActivated: InventoryCore._on_policy,
    NodeCordonRequested: InventoryCore._on_cordon,
    StartFailed: InventoryCore._on_start_failed,
    GpuConditionReported: InventoryCore._on_condition,
}
