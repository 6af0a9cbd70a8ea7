"""A gateway over real NATS and PostgreSQL, in this process: API, intake and projection; and the services around it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from berth.bus.connection import Connection
from berth.bus.publisher import Outgoing, Publisher
from berth.contracts import events as ev
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TENANT, HEADER_TYPE, Envelope, Fact
from berth.contracts.events import Assignment
from berth.runtime.event_service import EventService
from berth.store.database import Database
from berth.store.leader import Leadership
from berth.telemetry.metrics import PipelineMetrics
from berth.testing.postgres import PostgresPlatform
from berth.testing.servers import POOL, NatsPlatform
from services.gateway.access import Access, hash_of
from services.gateway.api.deps import Deps
from services.gateway.api.http import make_app
from services.gateway.catalogue import Catalogue
from services.gateway.event_feed import EventFeed, StreamReader
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.principals import Principal, Role
from services.gateway.projector import ViewHandler
from services.gateway.store.queries import Queries

TOKENS = {
    "member": Principal("member-a", "team-a", Role.MEMBER),
    "viewer": Principal("viewer-a", "team-a", Role.VIEWER),
    "other": Principal("member-b", "team-b", Role.MEMBER),
    "operator": Principal("operator-1", None, Role.OPERATOR),
}
JOB: dict[str, Any] = {"name": "train", "class": "training", "gpus": 2, "command": ["python", "train.py"]}


@dataclass
class Gateway:
    """One process of the gateway."""

    deps: Deps
    intake: Intake
    database: Database
    app: Any

    def client(self, token: str = "member") -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers, timeout=20)


@dataclass
class Rig:
    """Servers, and what is needed to run gateways and to speak for other services."""

    nats: NatsPlatform
    postgres: PostgresPlatform
    speakers: dict[str, Publisher] = field(default_factory=dict)
    sent: int = 0

    @contextlib.asynccontextmanager
    async def gateway(self, *, projects: bool = False, publishes: bool = True) -> AsyncIterator[Gateway]:
        """A process of the gateway; leaving is its death. publishes False: it dies before it can."""
        async with (
            Connection(self.nats.server.settings("gateway")) as bus,
            Database(self.postgres.settings("gateway")) as database,
            contextlib.AsyncExitStack() as stack,
        ):
            queries = Queries(database)
            access = Access(queries)
            for token, principal in TOKENS.items():
                await queries.add_token(hash_of(token), token, principal, created_by="test")
            publisher = Publisher(bus)
            if not publishes:
                publisher = _Mute(bus)
            intake = Intake(database, publisher, pool=POOL)
            deps = Deps(
                pool=POOL,
                reads=queries,
                changes=intake,
                bus=bus,
                access=access,
                catalogue=Catalogue(queries),
                feed=EventFeed(StreamReader(bus, POOL)),
                metrics=GatewayMetrics(CollectorRegistry()),
            )
            tasks = [asyncio.create_task(intake.run())]
            if projects:
                views = await stack.enter_async_context(Database(self.postgres.settings("gateway")))
                tasks.append(asyncio.create_task(self._projection(views, bus).run()))
            try:
                yield Gateway(deps, intake, database, make_app(deps))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await deps.feed.close()

    def _projection(self, database: Database, bus: Connection) -> EventService[ViewHandler]:
        settings = self.postgres.settings("gateway")
        return EventService(
            service="gateway",
            pool=POOL,
            make_handler=ViewHandler,
            database=database,
            connection=bus,
            make_leadership=lambda: Leadership(settings, "gateway"),
            metrics=PipelineMetrics(CollectorRegistry()),
        )

    async def say(self, service: str, data: Fact, entity: str, *, tenant: str = "team-a", at: str = "") -> None:
        """Publish an event as another service."""
        if service not in self.speakers:
            self.speakers[service] = Publisher(await self.nats.connect(service))
        self.sent += 1
        envelope = Envelope[Any](
            id=f"{entity}.{self.sent}.{type(data).__name__}",
            type=data.TYPE,
            source=f"/berth/{POOL}/{service}",
            subject=entity,
            time=datetime.fromisoformat(at) if at else datetime.now(UTC),
            tenant=tenant,
            data=data,
        )
        outgoing = Outgoing(
            subjects.event(POOL, type(data), entity),
            envelope.to_json(),
            envelope.id,
            {HEADER_TYPE: data.TYPE, HEADER_TENANT: tenant},
        )
        [result] = await self.speakers[service].publish([outgoing], 5)
        assert result.is_stored, result.error

    async def run_job(self, job_id: str, *, attempt: int = 1, node: str = "n1", tenant: str = "team-a") -> None:
        """Say what placement and lifecycle say of a job that starts."""
        assignment = Assignment(worker=0, node=node, gpus=("GPU-1", "GPU-2"), card_type="H100-80G")
        placed = ev.JobPlaced(job_id=job_id, attempt=attempt, fence=attempt, assignments=(assignment,))
        await self.say("placement", placed, job_id, tenant=tenant)
        running = ev.JobRunning(job_id=job_id, attempt=attempt, started_at=datetime.now(UTC))
        await self.say("lifecycle", running, job_id, tenant=tenant)

    async def events(self) -> list[dict[str, Any]]:
        """Everything in the stream."""
        bus = await self.nats.connect("gateway")
        found: list[dict[str, Any]] = []
        reader = StreamReader(bus, POOL)
        while page := await reader.read(found[-1]["sequence"] if found else 0, 256):
            found += [event.view() for event in page]
        return found


class _Mute(Publisher):
    """Never gets anything out."""

    async def publish(self, items: Any, deadline_s: float) -> Any:
        await asyncio.sleep(3600)


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = 10) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(seconds):
        while not await holds():
            await asyncio.sleep(0.02)
