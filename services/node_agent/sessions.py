"""Registration, telemetry and lease of every node of the process.

A node's lease is renewed by the answers to its telemetry, counted from when the frame was sent, on a clock nobody can
set. When it runs out the node has stopped its work: supervisors end their programs by themselves, and no command is
taken before the node has registered anew.

Losing the platform is not the same as being lost. While neither a node of this process nor one of a peer that answers is
heard, and those are more than half of the pool, the fault is on the other side: the work goes on.
"""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from typing import Any, Final

import orjson
from pydantic import ValidationError

from berth.bus import jsapi
from berth.bus.connection import Connection, Subscription
from berth.bus.errors import BusError
from berth.bus.provision import node_consumer
from berth.contracts import subjects
from berth.contracts.nodes import LeaseRenewed, NodeAccepted
from berth.telemetry.logs import get_logger
from services.node_agent.deps import Deps
from services.node_agent.driver.sim import SimDriver
from services.node_agent.handlers.stop import stop_worker
from services.node_agent.node import Node, Session, boottime_ns
from services.node_agent.peers import Peers, PeerView
from services.node_agent.process.simulated import SimulatedWorkers
from services.node_agent.sampling import Sampler, build_frame
from services.node_agent.workers import LEASE

TICK_SECONDS: Final = 0.25
REGISTER_TIMEOUT_SECONDS: Final = 5.0
REGISTER_AGAIN_SECONDS: Final = 1.0
REGISTER_AT_ONCE: Final = 32
CLOCK_EVERY_SECONDS: Final = 60.0
REMEMBERED_FRAMES: Final = 8
ASK_BEFORE: Final = 0.5
"""Share of the lease before its end at which peers are asked."""
KILL_SECONDS: Final = 1.0
"""Allowed for SIGKILL to take effect on everything that a worker has started."""
DECIDE_BEFORE: Final = 0.25
"""Share of the lease before its end at which it is decided whether the platform or the node is cut off."""

log = get_logger("node_agent")


class Sessions:
    """Keeps all nodes of the process in touch with inventory."""

    def __init__(self, bus: Connection, deps: Deps, samplers: dict[str, Sampler], *, pool: str) -> None:
        self._bus = bus
        self._deps = deps
        self._samplers = samplers
        self._pool = pool
        self._inbox = f"{bus.new_inbox()}."
        self._by_token: dict[bytes, Node] = {}
        self._reply_subjects: dict[str, str] = {}
        self._next_frame: dict[str, float] = {}
        self._next_try: dict[str, float] = {}
        self._limit = asyncio.Semaphore(REGISTER_AT_ONCE)
        self._heard_at = 0.0
        """When inventory last answered any node, monotonic."""
        self._clock_at = 0.0
        self.pool_nodes = 0
        """Nodes in the pool, as inventory says; 0: not known."""
        self._peers: Peers | None = None
        self._view = PeerView()
        self._viewed_at = 0.0
        self._is_asking = False
        for number, node in enumerate(deps.nodes.values()):
            token = f"{self._inbox}{number}"
            self._by_token[token.encode()] = node
            self._reply_subjects[node.name] = token

    async def open(self) -> Subscription:
        """Listen for the answers to telemetry."""
        return await self._bus.subscribe_raw(f"{self._inbox}*", self._on_answer)

    def consult(self, peers: Peers) -> None:
        """Ask `peers` when nobody here hears the platform."""
        self._peers = peers

    def hears(self) -> bool:
        """Whether inventory has answered any node of this process lately."""
        leases = [node.session.lease_seconds for node in self._deps.nodes.values() if node.session is not None]
        return bool(leases) and time.monotonic() - self._heard_at <= min(leases) / 2

    async def run(self) -> None:
        """Register, send frames, watch leases, for ever."""
        while True:
            now = time.monotonic()
            for number, node in enumerate(self._deps.nodes.values()):
                if node.session is None:
                    self._try_to_register(node, now)
                    continue
                if now >= self._next_frame.get(node.name, 0.0):
                    self._schedule_next(node, now, number)
                    await self._send_frame(node)
                self._watch_lease(node)
            await asyncio.sleep(TICK_SECONDS)

    @property
    def missing(self) -> int:
        """Nodes without a session."""
        return sum(node.session is None for node in self._deps.nodes.values())

    # -- registering

    def _try_to_register(self, node: Node, now: float) -> None:
        if node.is_registering or now < self._next_try.get(node.name, 0.0) or not self._bus.is_connected:
            return
        node.is_registering = True
        self._deps.spawn(self._register(node))

    async def _register(self, node: Node) -> None:
        try:
            async with self._limit:
                await self._register_once(node)
        except (BusError, ValidationError) as error:
            log.warning("registration", node=node.name, error=str(error)[:300])
            self._next_try[node.name] = time.monotonic() + REGISTER_AGAIN_SECONDS
        finally:
            node.is_registering = False

    async def _register_once(self, node: Node) -> None:
        asked_at_ns = boottime_ns()
        request = node.registration(time.time()).model_dump_json(exclude_none=True).encode()
        subject = subjects.request(self._pool, "inventory", "register")
        reply = await self._bus.request(subject, request, timeout=REGISTER_TIMEOUT_SECONDS)
        answer = orjson.loads(reply.data)
        if "epoch" not in answer:
            log.error("registration refused", node=node.name, reason=answer.get("reason"))
            self._next_try[node.name] = time.monotonic() + 10 * REGISTER_AGAIN_SECONDS
            return
        accepted = NodeAccepted.model_validate(answer)
        await self._measure_clock(node)
        node.begin_session(
            accepted.epoch,
            accepted.lease_seconds,
            accepted.telemetry_every_seconds,
            asked_at_ns=asked_at_ns,
            stop_seconds=accepted.stop_seconds,
        )
        self._on_heard(accepted.pool_nodes)
        self._renew(node, asked_at_ns + int(accepted.lease_seconds * 1e9))
        self._next_frame[node.name] = 0.0
        log.info("registered", node=node.name, epoch=accepted.epoch, lease_seconds=accepted.lease_seconds)

    async def _measure_clock(self, node: Node) -> None:
        """Ask the bus for its time; the platform's clock is close to it."""
        if time.monotonic() - self._clock_at < CLOCK_EVERY_SECONDS and self._clock_at:
            return
        consumer = node_consumer(self._pool, node.name)
        sent_at = time.time()
        try:
            info: dict[str, Any] = await jsapi.call(
                self._bus, f"CONSUMER.INFO.{subjects.COMMANDS_STREAM}.{consumer}", timeout=2
            )
            platform = datetime.fromisoformat(str(info["ts"]))
        except (BusError, KeyError, ValueError) as error:
            log.warning("platform clock not measured", error=str(error))
            return
        self._clock_at = time.monotonic()
        self._deps.clock.measured(platform, sent_at, time.time())
        offset = self._deps.clock.offset.total_seconds()
        if abs(offset) > 1:
            log.warning("clock differs from the platform's", offset_seconds=round(offset, 3))

    # -- telemetry and lease

    def _schedule_next(self, node: Node, now: float, number: int) -> None:
        """Evenly spread over the interval, so that a thousand nodes do not send at one instant."""
        assert node.session is not None
        every = node.session.telemetry_every_seconds
        first = self._next_frame.get(node.name, 0.0) == 0.0
        self._next_frame[node.name] = now + (every * (0.5 + number % 16 / 32) if first else every)

    async def _send_frame(self, node: Node) -> None:
        session = node.session
        if session is None or asyncio.get_running_loop().time() < node.silent_until:
            return
        sampler = self._samplers[node.name]
        if isinstance(node.driver, SimDriver):
            sampler.sample_now()
        session.sequence += 1
        frame = build_frame(node, sampler.window).model_dump_json(exclude_none=True).encode()
        session.sent_ns[session.sequence] = boottime_ns()
        while len(session.sent_ns) > REMEMBERED_FRAMES:
            session.sent_ns.popitem(last=False)
        try:
            subject = subjects.telemetry(self._pool, node.name)
            await self._bus.publish_core(subject, frame, reply=self._reply_subjects[node.name])
        except BusError:
            pass  # the lease shows it

    def _on_answer(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        node = self._by_token.get(subject)
        if node is None or not data or asyncio.get_running_loop().time() < node.silent_until:
            return
        try:
            renewed = LeaseRenewed.model_validate_json(data)
        except ValidationError as error:
            log.warning("answer to telemetry cannot be read", node=node.name, error=str(error)[:200])
            return
        self.on_renewed(node, renewed)

    def on_renewed(self, node: Node, renewed: LeaseRenewed) -> None:
        """Inventory has heard a frame."""
        self._on_heard(renewed.pool_nodes)
        session = node.session
        if session is None or renewed.epoch != session.epoch:
            return
        if renewed.register_again:
            log.info("asked to register again", node=node.name)
            node.end_session()
            return
        sent_ns = session.sent_ns.pop(renewed.sequence, None)
        if sent_ns is not None:
            session.lease_seconds, session.stop_seconds = renewed.lease_seconds, renewed.stop_seconds
            self._renew(node, sent_ns + int(renewed.lease_seconds * 1e9))

    def _on_heard(self, pool_nodes: int) -> None:
        self._heard_at = time.monotonic()
        self.pool_nodes = pool_nodes or self.pool_nodes

    def _renew(self, node: Node, deadline_ns: int) -> None:
        session = node.session
        if session is not None and deadline_ns >= session.deadline_ns:
            session.deadline_ns = deadline_ns
            self._deps.runtime.renew(node.name, deadline_ns, self._lease_grace(session))

    def _lease_grace(self, session: Session) -> float:
        """From SIGTERM to SIGKILL at the end of the lease, so that nothing is left when the cards are given away."""
        wanted = self._deps.settings.lease_grace_seconds
        return min(wanted, max(0.0, session.stop_seconds - KILL_SECONDS)) if session.stop_seconds else wanted

    def _watch_lease(self, node: Node) -> None:
        session = node.session
        if session is None:
            return
        left = (session.deadline_ns - boottime_ns()) / 1e9
        if left > session.lease_seconds * ASK_BEFORE:
            return
        self._ask_peers(session.lease_seconds)
        if left > session.lease_seconds * DECIDE_BEFORE:
            return
        if self._platform_is_gone(session.lease_seconds):
            log.warning("platform not heard, work goes on", node=node.name, pool_nodes=self.pool_nodes)
            self._renew(node, boottime_ns() + int(session.lease_seconds * 1e9))
        elif left <= 0:
            self._on_lease_lost(node)

    def _ask_peers(self, lease_seconds: float) -> None:
        if self._peers is None or self._is_asking or time.monotonic() - self._viewed_at < lease_seconds / 8:
            return
        self._is_asking = True
        self._deps.spawn(self._ask(self._peers))

    async def _ask(self, peers: Peers) -> None:
        try:
            self._view = await peers.ask()
            self._viewed_at = time.monotonic()
        finally:
            self._is_asking = False

    def _platform_is_gone(self, lease_seconds: float) -> bool:
        """Whether nobody this process can reach hears the platform, and those are more than half of the pool."""
        now = asyncio.get_running_loop().time()
        reached = {node.name for node in self._deps.nodes.values() if now >= node.silent_until}
        somebody_hears = time.monotonic() - self._heard_at <= lease_seconds / 2
        if time.monotonic() - self._viewed_at <= lease_seconds / 2:  # an older answer proves nothing
            reached |= self._view.nodes
            somebody_hears = somebody_hears or self._view.anyone_hears
        return not somebody_hears and self.pool_nodes > 0 and 2 * len(reached) > self.pool_nodes

    def _on_lease_lost(self, node: Node) -> None:
        live = [worker for worker in node.live() if worker.is_live]
        log.error("lease ran out, the node stops its work", node=node.name, workers=len(live))
        session = node.session
        node.end_session()
        self._next_try[node.name] = 0.0
        if isinstance(self._deps.runtime, SimulatedWorkers):  # real ones are ended by their supervisors, agent or not
            grace = self._deps.settings.lease_grace_seconds if session is None else self._lease_grace(session)
            for worker in live:
                stop_worker(node, worker, self._deps, grace_seconds=grace, reason=LEASE)
