"""Takes commands for all nodes of the process, in order for each node, and has them carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from pydantic import ValidationError

from berth.bus.message import Message
from berth.bus.multi_puller import MultiPuller
from berth.contracts.commands import LaunchWorkers, ReconcileNode, StopWorkers
from berth.contracts.envelope import HEADER_TRACE, HEADER_TYPE, Envelope, UnknownTypeError, decode
from berth.runtime.faults import fault_point
from berth.telemetry.logs import get_logger
from berth.telemetry.tracing import BatchSpan, batch_span, event_span
from services.node_agent.deps import Deps
from services.node_agent.handlers.launch import on_launch_workers
from services.node_agent.handlers.reconcile import on_reconcile_node
from services.node_agent.handlers.stop import on_stop_workers
from services.node_agent.node import Node
from services.node_agent.process.simulated import SimulatedWorkers

SERVICE: Final = "node_agent"
WAIT_SECONDS: Final = 1.0
EARLY_SECONDS: Final = 0.02
BATCH: Final = 500

log = get_logger(SERVICE)


class CommandLoop:
    """One task: pull what has arrived, judge, note in the journal, start, acknowledge.

    A command is acknowledged once the journal has it on disk. What it leads to is the agent's own duty from then on.
    """

    def __init__(self, puller: MultiPuller, deps: Deps) -> None:
        self._puller = puller
        self._deps = deps
        self._early: list[Message] = []
        """Of a session that is just being agreed on; taken up when it is, not acknowledged before."""

    async def run(self) -> None:
        """Carry out commands, for ever."""
        while True:
            messages = await self._puller.next(EARLY_SECONDS if self._early else WAIT_SECONDS, BATCH)
            if self._early:
                early, self._early = self._early, []
                messages = early + messages
            if messages:
                await self.carry_out(messages)

    async def carry_out(self, messages: Sequence[Message]) -> None:
        """Carry out one batch."""
        deps = self._deps
        span = batch_span(SERVICE, SERVICE, [message.header(HEADER_TRACE) for message in messages])
        with span:
            handled = [message for message in messages if self._handle(message, span)]
            starts, deps.starts = deps.starts, []
            deps.journal.flush()  # a killed agent must know what it was about to start
            await fault_point(f"{SERVICE}.before_start")
            if isinstance(deps.runtime, SimulatedWorkers):
                for start in starts:
                    await start  # done at once: tasks would cost more than the work
            else:
                for start in starts:
                    deps.spawn(start)
            await deps.journal.durable()
        await fault_point(f"{SERVICE}.between_start_and_ack")
        self._puller.ack(handled)

    def _handle(self, message: Message, span: BatchSpan) -> bool:
        """Whether the message is dealt with, and may be acknowledged."""
        node = self._deps.nodes.get(message.subject.split(".")[3])
        if node is None:
            return False  # a node this process has given up; its next host takes it
        try:
            event = decode(message.data, message.header(HEADER_TYPE))
        except (UnknownTypeError, ValidationError, ValueError) as error:
            # Its sender gets no answer and asks again after the expiry; keeping it would block the node for ever.
            log.error("command cannot be read", subject=message.subject, seq=message.stream_seq, error=error)
            return True
        if node.is_registering and event.data.epoch > node.view.epoch:
            self._early.append(message)
            return False
        trace = event_span(
            f"{SERVICE} {event.data.VERB}",
            message.header(HEADER_TRACE) or event.traceparent,
            span,
            {"berth.node": node.name},
            job_id=event.correlationid,
            tenant=event.tenant,
        )
        self._dispatch(event, node, trace or "")
        return True

    def _dispatch(self, event: Envelope[Any], node: Node, trace: str) -> None:
        match event.data:
            case LaunchWorkers():
                on_launch_workers(event, node, self._deps, trace)
            case StopWorkers():
                on_stop_workers(event, node, self._deps, trace)
            case ReconcileNode():
                on_reconcile_node(event, node, self._deps, trace)
            case _:
                log.error("no command", type=event.type, command=event.id)


async def exit_loop(deps: Deps) -> None:
    """Hand ends of programs to their nodes, as they come."""
    from services.node_agent.handlers.ends import on_worker_exit

    exits = deps.runtime.exits
    while True:
        ended = await exits.get()
        while True:
            node = deps.nodes.get(ended.node)
            if node is not None:
                on_worker_exit(ended, node, deps)
            try:
                ended = exits.get_nowait()
            except asyncio.QueueEmpty:
                break
        deps.journal.flush()
