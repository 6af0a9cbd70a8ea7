"""Builds the gateway: the only place here that makes things."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import uvicorn

from berth.bus.connection import Connection, Subscription
from berth.bus.publisher import Publisher
from berth.contracts import subjects
from berth.contracts.requests import SecretsAnswer, SecretsQuestion
from berth.runtime.http import remove_run_file, write_run_file
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, answering, event_service, store_settings, wired
from berth.store.database import Database
from berth.store.errors import TransientError
from services.gateway.access import ADMIN_USER, Access
from services.gateway.api.deps import SERVICE, Deps
from services.gateway.api.http import make_app
from services.gateway.catalogue import Catalogue
from services.gateway.event_feed import EventFeed, StreamReader
from services.gateway.intake import Intake
from services.gateway.metrics import GatewayMetrics
from services.gateway.principals import Role
from services.gateway.projector import ViewHandler
from services.gateway.settings import Settings
from services.gateway.store.queries import Queries

PRUNE_SECONDS: Final = 60.0
STOP_SECONDS: Final = 3.0


def run() -> None:
    """Run the gateway in this process."""
    run_service(SERVICE, Settings, main, checks=(*CHECKS, "api"))


async def main(context: ServiceContext[Settings]) -> None:
    """Until cancelled: the API in this process, and the projection where it leads."""
    settings = context.settings
    async with wired(context, service=SERVICE) as parts:  # noqa: SIM117 - the second needs a word of its own
        # A connection of its own: submissions must not wait for a batch of the projection.
        async with Database(store_settings(settings, service=SERVICE)) as database:
            queries = Queries(database)
            access = Access(queries)
            await access.take_over(_token(settings.admin_token_file), Role.OPERATOR, ADMIN_USER)
            await access.take_over(_token(settings.internal_token_file), Role.INTERNAL, "berth")
            intake = Intake(database, Publisher(parts.connection), pool=settings.pool)
            catalogue = Catalogue(queries)
            feed = EventFeed(StreamReader(parts.connection, settings.pool))
            deps = Deps(
                pool=settings.pool,
                reads=queries,
                changes=intake,
                bus=parts.connection,
                access=access,
                catalogue=catalogue,
                feed=feed,
                metrics=GatewayMetrics(context.registry),
                max_body_bytes=settings.api_max_body_bytes,
                max_batch=settings.api_max_batch,
                max_streams=settings.api_event_streams,
                policy_wait_seconds=settings.policy_wait_seconds,
            )
            projection = event_service(context, parts, service=SERVICE, make_handler=ViewHandler)
            context.critical("intake", intake.run())
            context.critical("catalogue", catalogue.run())
            context.background("pruning", _prune(queries, settings))
            secrets = await _serve_secrets(parts.connection, settings.pool, queries)
            context.critical("projection", projection.run())
            try:
                await _serve_api(context, deps)
            finally:
                await feed.close()
                await secrets.unsubscribe()


def _token(path: Path | None) -> str:
    return path.read_text().strip() if path is not None and path.is_file() else ""


async def _serve_secrets(bus: Connection, pool: str, queries: Queries) -> Subscription:
    """Answer agents that start a job with its secret values; any process may."""

    async def answer(asked: SecretsQuestion) -> SecretsAnswer:
        values = await queries.secrets(asked.job_id, asked.names)
        return SecretsAnswer(is_known=set(values) >= set(asked.names), values=values)

    return await bus.serve(
        subjects.request(pool, SERVICE, "secrets"), answering(SecretsQuestion, answer), queue=SERVICE
    )


async def _prune(queries: Queries, settings: Settings) -> None:
    while True:
        with contextlib.suppress(TransientError):
            await queries.prune(spans_kept=settings.spans_kept, spans_hours=settings.spans_hours)
        await asyncio.sleep(PRUNE_SECONDS)


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling: the process's is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


async def _serve_api(context: ServiceContext[Settings], deps: Deps) -> None:
    settings = context.settings
    config = uvicorn.Config(
        make_app(deps),
        host=settings.api_host,
        port=settings.api_port,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=True,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=64 * 1024,
        backlog=2048,
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # what it says at start, we say ourselves
    server = _Server(config)
    serving = asyncio.create_task(server.serve(), name="api")
    run_file = settings.run_directory / "gateway-api.json"
    try:
        while not server.started:
            if serving.done():
                await serving
                raise RuntimeError(f"the API cannot listen on {settings.api_host}:{settings.api_port}")
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        write_run_file(run_file, port=port, url=f"http://{settings.api_host}:{port}")
        context.health.set("api", None)
        context.log.info("api listens", host=settings.api_host, port=port)
        context.started()
        await serving
    finally:
        remove_run_file(run_file)
        server.should_exit = True
        server.force_exit = True
        with contextlib.suppress(asyncio.CancelledError, TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.shield(serving)
