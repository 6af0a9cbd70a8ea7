"""The rest of the platform, as an agent sees it: a bus, an inventory that accepts, and somebody who gives commands."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from berth.bus.connection import Connection, CoreMessage
from berth.bus.provision import berth_topology, ensure_node_consumers, ensure_service_consumer, provision
from berth.bus.publisher import Outgoing, Publisher
from berth.contracts import subjects
from berth.contracts.commands import KeptWorker, LaunchWorkers, ReconcileNode, StopWorkers, WorkerPlan
from berth.contracts.envelope import HEADER_TYPE, Envelope, Fact, Order, decode, envelope_class
from berth.contracts.nodes import LeaseRenewed, NodeAccepted, RegisterNode, TelemetryFrame
from berth.contracts.requests import LogAnswer, LogQuestion, SecretsAnswer, SecretsQuestion
from berth.embedded.nats import NatsServer

POOL = "test"
ROOT = Path(__file__).parents[3]
F = TypeVar("F", bound=Fact)


@dataclass
class Inventory:
    """Answers registrations and telemetry, or keeps silent."""

    lease_seconds: float = 20.0
    every_seconds: float = 0.2
    pool_nodes: int = 0
    is_silent: bool = False
    deaf_to: set[str] = field(default_factory=set)
    reconciles: bool = True
    epoch: int = 0
    registrations: list[RegisterNode] = field(default_factory=list)
    frames: list[TelemetryFrame] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)


class Platform:
    """`async with Platform(path) as platform:` runs the bus and the pretended services."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.inventory = Inventory()
        self.secrets: dict[str, str] = {}
        self.facts: list[Envelope[Any]] = []
        self._changed = asyncio.Event()
        self.more_environment: dict[str, str] = {}
        self._commands = 0
        self.agents: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        self.nats = NatsServer(self.directory / "nats")
        await self.nats.start()
        async with Connection(self.nats.settings("provisioner")) as bus:
            await provision(bus, berth_topology({"audit": [subjects.all_events(POOL)]}))
        self._inventory_bus = Connection(self.nats.settings("inventory"))
        self._lifecycle_bus = Connection(self.nats.settings("lifecycle"))
        self._audit_bus = Connection(self.nats.settings("audit"))
        self._gateway_bus = Connection(self.nats.settings("gateway"))
        for bus in (self._inventory_bus, self._lifecycle_bus, self._audit_bus, self._gateway_bus):
            await bus.open()
        self.publisher = Publisher(self._lifecycle_bus)
        await self._inventory_bus.serve(subjects.request(POOL, "inventory", "register"), self._register)
        await self._inventory_bus.subscribe_core(subjects.telemetry_filter(POOL), self._on_frame)
        await self._gateway_bus.serve(subjects.request(POOL, "gateway", "secrets"), self._tell_secrets)
        self._reading = asyncio.create_task(self._read_facts())
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.returncode is None:
                agent.send_signal(signal.SIGINT)
                try:
                    await asyncio.wait_for(agent.wait(), 15)
                except TimeoutError:
                    agent.kill()
        self._reading.cancel()
        for bus in (self._inventory_bus, self._lifecycle_bus, self._audit_bus, self._gateway_bus):
            await bus.close()
        await self.nats.stop()

    # -- agents

    async def start_agent(self, nodes: str = "n1=2xH100-80G:nvswitch", **settings: str) -> asyncio.subprocess.Process:
        """An agent process; returns once every node is registered and reconciled."""
        names = [part.partition("=")[0] for part in nodes.split(",")] if nodes != "nvml" else [settings["node_name"]]
        await ensure_node_consumers(self._inventory_bus, POOL, names)
        before = len(self.inventory.registrations)
        env = {
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "PYTHONPATH": os.pathsep.join([str(ROOT / "libs"), str(ROOT)]),
            "BERTH_POOL": POOL,
            "BERTH_HOME": str(self.directory / "home"),
            "BERTH_NATS_URL": self.nats.url,
            "BERTH_NATS_CREDENTIALS_FILE": str(self.nats.credentials.seed_files["fleet"]),
            "BERTH_NODES": nodes,
            "BERTH_LEASE_GRACE_SECONDS": "0.3",
            **{f"BERTH_{name.upper()}": value for name, value in settings.items()},
            **self.more_environment,
        }
        log = (self.directory / "agent.log").open("ab")
        agent = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.node_agent", env=env, cwd=ROOT, stderr=log, stdout=log
        )
        self.agents.append(agent)
        if not self.inventory.is_silent:
            await self.until(lambda: len(self.inventory.registrations) >= before + len(names), "registration")
        return agent

    async def restart_bus(self) -> None:
        """As a crash and a new start; consumers live in its memory and are made anew, so every command comes again."""
        await self.nats.kill()
        await self.nats.start()
        await self._inventory_bus.wait_connected(10)
        await ensure_node_consumers(self._inventory_bus, POOL, list(self.inventory.epochs))

    async def kill_agent(self, agent: asyncio.subprocess.Process) -> None:
        agent.kill()
        await agent.wait()

    # -- inventory

    async def _register(self, request: CoreMessage) -> bytes:
        asked = RegisterNode.model_validate_json(request.data)
        node = asked.description.node
        if self.inventory.is_silent or node in self.inventory.deaf_to:
            await asyncio.sleep(3600)
        self.inventory.epoch += 1
        self.inventory.epochs[node] = epoch = self.inventory.epoch
        self.inventory.registrations.append(asked)
        self._changed.set()
        if self.inventory.reconciles:
            keep = tuple(
                KeptWorker(job_id=w.job_id, attempt=w.attempt, fence=w.fence, worker=w.worker) for w in asked.workers
            )
            await self.order(
                ReconcileNode(node=node, epoch=epoch, expires_at=soon(), keep=keep),
                command_id=f"{node}.{epoch}.Reconcile",
            )
        answer = NodeAccepted(
            node=node,
            epoch=epoch,
            lease_seconds=self.inventory.lease_seconds,
            telemetry_every_seconds=self.inventory.every_seconds,
            pool_nodes=self.inventory.pool_nodes,
        )
        return answer.model_dump_json().encode()

    async def _on_frame(self, message: CoreMessage) -> None:
        frame = TelemetryFrame.model_validate_json(message.data)
        if self.inventory.is_silent or frame.node in self.inventory.deaf_to:
            return
        self.inventory.frames.append(frame)
        self._changed.set()
        answer = LeaseRenewed(
            node=frame.node,
            epoch=frame.epoch,
            sequence=frame.sequence,
            lease_seconds=self.inventory.lease_seconds,
            register_again=self.inventory.epochs.get(frame.node) != frame.epoch,
            pool_nodes=self.inventory.pool_nodes,
        )
        await self._inventory_bus.publish_core(message.reply, answer.model_dump_json().encode())

    async def _tell_secrets(self, request: CoreMessage) -> bytes:
        asked = SecretsQuestion.model_validate_json(request.data)
        values = {name: self.secrets[name] for name in asked.names if name in self.secrets}
        return SecretsAnswer(is_known=True, values=values).model_dump_json().encode()

    # -- commands

    async def order(self, order: Order, *, command_id: str = "", copies: int = 1) -> str:
        """Publish a command; `copies` arrive as many times under one id (the broker's own filter is passed by)."""
        self._commands += 1
        command_id = command_id or f"c{self._commands}"
        node = str(getattr(order, "node", ""))
        envelope = envelope_class(order.TYPE)(
            id=command_id,
            type=order.TYPE,
            source=f"/berth/{POOL}/lifecycle",
            subject=node,
            time=datetime.now(UTC),
            correlationid=str(getattr(order, "job_id", node)),
            tenant="nlp",
            data=order,
        )
        subject = subjects.command(POOL, node, type(order))
        headers = {HEADER_TYPE: order.TYPE}
        for copy in range(copies):
            msg_id = f"{command_id}#{self._commands}.{copy}"
            results = await self.publisher.publish([Outgoing(subject, envelope.to_json(), msg_id, headers)], 5)
            assert results[0].is_stored, results[0].error
        return command_id

    def launch(self, *command: str, job: str = "j1", node: str = "n1", fence: int = 1, **more: Any) -> LaunchWorkers:
        """A launch of one worker without cards, unless said otherwise."""
        values: dict[str, Any] = {
            "node": node,
            "epoch": self.inventory.epochs.get(node, 0),
            "expires_at": soon(),
            "job_id": job,
            "attempt": 1,
            "fence": fence,
            "tenant": "nlp",
            "job_class": "general",
            "name": "a job",
            "command": command,
            "workers": (WorkerPlan(worker=0, gpus=()),),
            "grace_seconds": 5,
        }
        return LaunchWorkers(**(values | more))

    def stop(self, *, job: str = "j1", node: str = "n1", fence: int = 1, **more: Any) -> StopWorkers:
        values: dict[str, Any] = {
            "node": node,
            "epoch": self.inventory.epochs.get(node, 0),
            "expires_at": soon(),
            "job_id": job,
            "attempt": 1,
            "fence": fence,
            "grace_seconds": 5,
            "cause": "cancelled",
        }
        return StopWorkers(**(values | more))

    def gpus(self, node: str = "n1") -> list[str]:
        """Cards of a node, as it has described itself."""
        found = [r for r in self.inventory.registrations if r.description.node == node][-1]
        return [gpu.uuid for gpu in found.description.gpus]

    # -- what agents tell

    async def _read_facts(self) -> None:
        from berth.bus.puller import Puller

        made_anew = partial(ensure_service_consumer, self._audit_bus, "audit", [subjects.all_events(POOL)])
        async with Puller(self._audit_bus, "BERTH_EVENTS", "audit", on_missing=made_anew) as puller:
            while True:
                messages = await puller.next(1.0)
                for message in messages:
                    self.facts.append(decode(message.data, message.header(HEADER_TYPE)))
                puller.ack(messages)
                if messages:
                    self._changed.set()

    def told(self, kind: type[F], job: str = "") -> list[F]:
        """Facts of one type, repeats by id left out."""
        by_id = {fact.id: fact.data for fact in self.facts if isinstance(fact.data, kind)}
        return [data for data in by_id.values() if not job or getattr(data, "job_id", "") == job]

    async def hear(self, kind: type[F], job: str = "", count: int = 1, seconds: float = 15.0) -> F:
        """Wait until `count` facts of a type are there; returns the last."""
        await self.until(lambda: len(self.told(kind, job)) >= count, f"{kind.__name__} {job}", seconds)
        return self.told(kind, job)[-1]

    async def until(self, condition: Callable[[], bool], what: str, seconds: float = 15.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    assert all(agent.returncode in (None, 0, 75, -9) for agent in self.agents), self.agent_log()
                    self._changed.clear()
                    try:
                        await asyncio.wait_for(self._changed.wait(), 0.1)
                    except TimeoutError:
                        pass
        except TimeoutError:
            raise AssertionError(f"no {what} within {seconds} s; the agent says:\n{self.agent_log()}") from None

    def agent_log(self) -> str:
        return (self.directory / "agent.log").read_text()[-4000:]

    # -- requests

    async def log_of(self, job: str, *, node: str = "n1", **more: Any) -> LogAnswer:
        question = LogQuestion(job_id=job, attempt=1, **more)
        subject = subjects.node_request(POOL, node, "logs")
        reply = await self._gateway_bus.request(subject, question.model_dump_json().encode())
        return LogAnswer.model_validate_json(reply.data)

    async def metrics(self) -> str:
        """The agent's page of metrics."""
        import httpx
        import orjson

        run = orjson.loads((self.directory / "home" / "run" / "node_agent.json").read_bytes())
        async with httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{run['port']}/metrics")).text

    async def simulate(self, node: str = "n1", **what: Any) -> None:
        import orjson

        await self._gateway_bus.request(subjects.node_request(POOL, node, "simulate"), orjson.dumps(what))


def soon(seconds: float = 60) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)
