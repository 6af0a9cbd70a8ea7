"""Builds inventory: the only place here that makes things."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

from pydantic import ValidationError

from berth.bus.connection import Connection
from berth.bus.errors import Disconnected
from berth.bus.provision import ensure_node_consumer
from berth.contracts import subjects
from berth.contracts.nodes import NodeAccepted, RegisterNode, RegistrationRefused, TelemetryFrame
from berth.contracts.requests import NodesAnswer, NodesQuestion, NodeStatus
from berth.decisions.health.core import InventoryCore, NodeSnapshot
from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, answering, event_service, wired
from berth.telemetry.logs import get_logger
from services.inventory.settings import Settings

SERVICE = "inventory"
Service = EventService[CoreHandler[InventoryCore]]


def run() -> None:
    """Run inventory in this process."""
    run_service(SERVICE, Settings, main, checks=CHECKS)


async def main(context: ServiceContext[Settings]) -> None:
    """Until cancelled."""
    pool = context.settings.pool
    async with wired(context, service=SERVICE) as parts:
        bus = parts.connection
        service: Service = event_service(
            context,
            parts,
            service=SERVICE,
            make_handler=lambda: CoreHandler(InventoryCore(), pool=pool),
        )

        async def register(asked: RegisterNode) -> NodeAccepted | RegistrationRefused:
            await ensure_node_consumer(bus, pool, asked.description.node)
            return await service.change(lambda handler, now: handler.core.register(asked, now=now))

        async def nodes(asked: NodesQuestion) -> NodesAnswer:
            return await service.query(lambda handler: _status(handler.core, asked.node))

        service.serve("register", answering(RegisterNode, register))
        service.serve("nodes", answering(NodesQuestion, nodes))
        hearing = Hearing(service, bus)
        subscription = await bus.subscribe_raw(subjects.telemetry_filter(pool), hearing.on_frame)
        unregister = bus.on_reconnect(hearing.on_reconnect)
        context.started()
        try:
            await service.run()
        finally:
            unregister()
            await subscription.unsubscribe()


class Hearing:
    """Telemetry frames: straight into the core, and the renewed lease straight back, inside the bus's read loop."""

    def __init__(self, service: Service, bus: Connection) -> None:
        self._service = service
        self._bus = bus
        self._log = get_logger(SERVICE)

    def on_frame(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        """One frame of one node. While this process does not lead nothing is answered: the leader does."""
        handler = self._service.now_unlocked()
        if handler is None:
            return
        try:
            frame = TelemetryFrame.model_validate_json(data)
        except ValidationError as error:
            self._log.warning("telemetry frame ignored", subject=subject.decode(), faults=error.error_count())
            return
        if frame.node != subject.rpartition(b".")[2].decode():
            self._log.warning("telemetry frame ignored", subject=subject.decode(), claims=frame.node)
            return
        due = handler.core.next_timer()
        renewed = handler.core.heard(frame, now=datetime.now(UTC))
        if reply:
            with contextlib.suppress(Disconnected):  # the node hears nothing then, and asks again
                self._bus.answer_nowait(reply, renewed.model_dump_json().encode())
        if handler.core.has_news or handler.core.next_timer() != due:
            self._service.wake()

    def on_reconnect(self) -> None:
        """The bus was away, so nobody could be heard: silence counts from now."""
        handler = self._service.now_unlocked()
        if handler is not None:
            handler.core.heard_platform_gap(now=datetime.now(UTC))


def _status(core: InventoryCore, name: str | None) -> NodesAnswer:
    """All nodes, or the one asked for."""
    snapshots = core.nodes() if name is None else [found for found in (core.node(name),) if found is not None]
    return NodesAnswer(nodes=tuple(map(_node_status, snapshots)))


def _node_status(snapshot: NodeSnapshot) -> NodeStatus:
    cards = snapshot.record.cards
    gpus = tuple(
        gpu.model_copy(update={"health": cards[gpu.uuid].health}) if gpu.uuid in cards else gpu
        for gpu in snapshot.description.gpus
    )
    return NodeStatus(
        node=snapshot.record.node,
        state=snapshot.state,
        cordoned=snapshot.record.cordoned,
        epoch=snapshot.record.epoch,
        last_heard=snapshot.last_heard,
        description=snapshot.description.model_copy(update={"gpus": gpus}),
        readings=() if snapshot.frame is None else snapshot.frame.gpus,
        readings_at=snapshot.frame_at,
    )
