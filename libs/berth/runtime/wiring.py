"""What every stateful service builds first: its database, its bus connection, its event service."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, TypeAdapter, ValidationError

from berth.bus.connection import BusSettings, Connection, CoreMessage
from berth.bus.errors import RequestFailed
from berth.bus.permissions import api_prefix, inbox_prefix
from berth.contracts.requests import CheckpointQuestion, CommitsQuestion
from berth.runtime.event_service import BatchHandler, EventService
from berth.runtime.process import ServiceContext
from berth.runtime.settings import BerthSettings
from berth.store.database import Database, StoreSettings
from berth.store.errors import NoSuchParked, OutOfOrder
from berth.store.housekeeping import keep_house
from berth.store.leader import Leadership
from berth.store.parked import Parked, drop_parked, list_parked, request_replay, show_parked
from berth.store.recorded import checkpoint_page, commits_page, find_checkpoint
from berth.telemetry.metrics import PipelineMetrics

H = TypeVar("H", bound=BatchHandler)
Q = TypeVar("Q", bound=BaseModel)

CHECKS = ("bus", "database", "leader")
"""Readiness checks of a stateful service. A standby is ready: it leads when it is needed."""
STANDBY_SECONDS: Final = 5.0


def bus_settings(settings: BerthSettings, *, service: str, user: str) -> BusSettings:
    """How a process connects to the bus as `user`."""
    return BusSettings(
        servers=tuple(url.strip() for url in settings.nats_url.split(",")),
        name=f"berth-{service}",
        nkey_seed_file=settings.nats_credentials_file,
        inbox_prefix=inbox_prefix(user),
        api_prefix=api_prefix(user),
    )


def store_settings(settings: BerthSettings, *, service: str) -> StoreSettings:
    """How a service connects to its schema."""
    return StoreSettings(
        dsn=settings.postgres_dsn.get_secret_value(), schema=service, application_name=f"berth-{service}"
    )


@dataclass(slots=True)
class Wired:
    """The parts of a service that is about to run."""

    connection: Connection
    database: Database
    metrics: PipelineMetrics


@contextlib.asynccontextmanager
async def wired(context: ServiceContext[Any], *, service: str) -> AsyncIterator[Wired]:
    """Database and bus connected, with their readiness; closed at the end."""
    settings: BerthSettings = context.settings
    metrics = PipelineMetrics(context.registry)
    async with Connection(bus_settings(settings, service=service, user=service)) as connection:
        connection.on_reconnect(metrics.reconnects.inc)
        context.health.probe("bus", lambda: None if connection.is_connected else "not connected to the bus")
        async with Database(store_settings(settings, service=service)) as database:
            context.health.set("database", None)
            yield Wired(connection, database, metrics)


def event_service(
    context: ServiceContext[Any], parts: Wired, *, service: str, make_handler: Callable[[], H], recorded: bool = False
) -> EventService[H]:
    """The event service over wired parts, with its readiness and the answers to `parked`.

    recorded: it decides, so it answers `commits` and `checkpoint` too, from which its decisions can be run again.
    """
    settings: BerthSettings = context.settings
    store = store_settings(settings, service=service)
    made = EventService(
        service=service,
        pool=settings.pool,
        make_handler=make_handler,
        database=parts.database,
        connection=parts.connection,
        make_leadership=lambda: Leadership(store, service),
        metrics=parts.metrics,
        on_leading=lambda _: context.health.set("leader", None),
    )
    context.background("stand by", _stand_by(context))
    context.critical("housekeeping", keep_house(parts.database, has_checkpoints=recorded))
    made.serve("parked", ParkedAnswers(parts.database).answer)
    if recorded:
        made.serve("commits", answering(CommitsQuestion, lambda asked: _commits(parts.database, asked)))
        made.serve("checkpoint", answering(CheckpointQuestion, lambda asked: _checkpoint(parts.database, asked)))
    return made


async def _commits(database: Database, asked: CommitsQuestion) -> list[dict[str, Any]]:
    return await commits_page(database, after=asked.after)


async def _checkpoint(database: Database, asked: CheckpointQuestion) -> object:
    if asked.commit_id is not None:
        return await checkpoint_page(database, asked.commit_id, kind=asked.kind, key=asked.key)
    found = await find_checkpoint(database, since=asked.since, until=asked.until)
    if found is None:
        raise RequestFailed("not_found", "no checkpoint yet")
    return asdict(found)


async def _stand_by(context: ServiceContext[Any]) -> None:
    """A process that has not become leader by now is a standby, and ready as such."""
    await asyncio.sleep(STANDBY_SECONDS)
    context.health.set("leader", None)


def answering(question: type[Q], answer: Callable[[Q], Any]) -> Callable[[CoreMessage], Any]:
    """A request handler from a typed question to a typed answer (or an awaitable of one)."""
    read = TypeAdapter(question)

    async def handle(request: CoreMessage) -> bytes:
        try:
            asked = read.validate_json(request.data or b"{}")
        except ValidationError as error:
            raise RequestFailed("bad_request", str(error.errors(include_url=False, include_input=False))) from error
        found = answer(asked)
        if hasattr(found, "__await__"):
            found = await found
        return found.model_dump_json().encode() if isinstance(found, BaseModel) else orjson.dumps(found)

    return handle


class ParkedAnswers:
    """Answers `berth.req.<pool>.<service>.parked`: {"do": list|show|replay|drop, "id", "payload", "note"}."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def answer(self, request: CoreMessage) -> bytes:
        """Carry out one request; the reply is JSON.

        Raises:
            RequestFailed: not_found, out_of_order or bad_request.
        """
        try:
            asked = json.loads(request.data or b"{}")
            return orjson.dumps(await self._do(asked))
        except NoSuchParked as error:
            raise RequestFailed("not_found", str(error)) from error
        except OutOfOrder as error:
            raise RequestFailed("out_of_order", str(error)) from error
        except (ValueError, KeyError, TypeError) as error:
            raise RequestFailed("bad_request", f"{type(error).__name__}: {error}") from error

    async def _do(self, asked: dict[str, Any]) -> Any:
        what = asked.get("do", "list")
        note = str(asked.get("note", ""))
        if what == "list":
            found = await list_parked(self._database, include_closed=bool(asked.get("closed")))
            return [_view(parked) for parked in found]
        number = int(asked["id"])
        if what == "show":
            return _view(await show_parked(self._database, number), whole=True)
        if what == "replay":
            payload = asked.get("payload")
            mended = None if payload is None else str(payload).encode()
            return {"replaying": await request_replay(self._database, number, payload=mended, note=note)}
        if what == "drop":
            await drop_parked(self._database, number, note=note)
            return {"dropped": number}
        raise ValueError(f"do {what!r}: list, show, replay or drop")


def _view(parked: Parked, *, whole: bool = False) -> dict[str, Any]:
    message = parked.message
    view = {
        "id": parked.id,
        "entity": message.entity,
        "event_id": message.event_id,
        "subject": message.subject,
        "reason": message.reason,
        "parked_at": parked.parked_at,
        "status": parked.status,
        "note": parked.note,
        "stream_seq": message.stream_seq,
    }
    if whole:
        view["payload"] = message.payload.decode(errors="replace")
        view["mended"] = None if parked.mended is None else parked.mended.decode(errors="replace")
    return view
