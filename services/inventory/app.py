"""Builds inventory: the only place here that makes things."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime

from pydantic import ValidationError

from berth.bus.connection import Connection
from berth.bus.errors import Disconnected, TransientError
from berth.bus.provision import ensure_node_consumer, ensure_node_consumers
from berth.contracts import subjects
from berth.contracts.nodes import NodeAccepted, RegisterNode, RegistrationRefused, TelemetryFrame
from berth.contracts.requests import NodesAnswer, NodesQuestion
from berth.decisions.health.core import InventoryCore
from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, answering, event_service, wired
from berth.telemetry.logs import get_logger
from services.inventory.settings import Settings

SERVICE = "inventory"
CONSUMERS_EVERY_SECONDS = 5.0
"""So often it is looked whether nodes lack a consumer, besides each time the bus comes back."""
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
            return await service.query(lambda handler: handler.core.nodes(asked.node, now=datetime.now(UTC)))

        service.serve("register", answering(RegisterNode, register))
        service.serve("nodes", answering(NodesQuestion, nodes))
        hearing = Hearing(service, bus)
        subscription = await bus.subscribe_raw(subjects.telemetry_filter(pool), hearing.on_frame)
        unregister = bus.on_reconnect(hearing.on_reconnect)
        undo = bus.on_disconnect(hearing.on_disconnect)
        context.critical("consumers", keep_node_consumers(service, bus, pool))
        context.started()
        try:
            await service.run()
        finally:
            unregister()
            undo()
            await subscription.unsubscribe()


async def keep_node_consumers(service: Service, bus: Connection, pool: str) -> None:
    """See that every known node can be sent commands: a bus that was restarted has no consumers any more."""
    is_due = asyncio.Event()
    bus.on_reconnect(is_due.set)
    log = get_logger(SERVICE)
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONSUMERS_EVERY_SECONDS):
                await is_due.wait()
        is_due.clear()
        handler = service.now_unlocked()
        if handler is None:
            continue
        try:
            made = await ensure_node_consumers(bus, pool, handler.core.node_names)
        except TransientError as error:
            log.warning("cannot look after the nodes' consumers", reason=str(error))
        else:
            if made:
                log.info("made consumers anew", nodes=len(made))


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

    def on_disconnect(self) -> None:
        """The bus is away: nobody is judged until it is back."""
        handler = self._service.now_unlocked()
        if handler is not None:
            handler.core.goes_deaf()

    def on_reconnect(self) -> None:
        """The bus was away, so nobody could be heard: silence counts from now."""
        handler = self._service.now_unlocked()
        if handler is not None:
            handler.core.was_deaf(now=datetime.now(UTC))
