"""NATS and PostgreSQL of an embedded platform: started together, provisioned, kept, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from berth.embedded.layout import STATEFUL, Layout
from berth.embedded.ports import hold_port

if TYPE_CHECKING:
    from berth.embedded.nats import NatsServer
    from berth.embedded.postgres import PostgresServer
    from berth.embedded.supervisor import PlatformSettings


@dataclass(frozen=True, slots=True)
class Servers:
    """Where they are."""

    nats_url: str
    dsns: dict[str, str] = field(repr=False)


async def start_servers(layout: Layout, settings: PlatformSettings) -> Servers:
    """Both servers running, streams and consumers provisioned, schemas at their newest revision."""
    nats = _nats(layout, settings)
    postgres = _postgres(layout, settings)
    _, dsns = await asyncio.gather(_start_nats(nats, settings), _start_postgres(layout, postgres))
    return Servers(nats.url, dsns)


async def keep_servers(layout: Layout, settings: PlatformSettings) -> list[str]:
    """Start again what has died; names of what had.

    Raises:
        ExceptionGroup: a server could not be started; the other one was seen to all the same.
    """
    nats, postgres = _nats(layout, settings), _postgres(layout, settings)

    async def keep_nats() -> str | None:
        if nats.pid is not None:
            return None
        await nats.start(detached=True)
        return "nats"

    async def keep_postgres() -> str | None:
        if await asyncio.to_thread(lambda: postgres.pid) is not None:
            return None
        await asyncio.to_thread(postgres.start, detached=True)
        return "postgres"

    found = await asyncio.gather(keep_nats(), keep_postgres(), return_exceptions=True)
    if faults := [result for result in found if isinstance(result, Exception)]:
        raise ExceptionGroup("; ".join(map(str, faults)), faults)
    return [name for name in found if isinstance(name, str)]


def hold_server_ports(layout: Layout, settings: PlatformSettings) -> list[socket.socket]:
    """Take the ports of both servers, those of last time where they are free, before the servers start.

    Services find a server that was started again by its old port. While it is down its port must not go to anybody,
    least of all to a client: one that tries to connect to a free port of the system's range can be given that very port
    for its own end, is then connected to itself, and keeps the server out. A server that runs already keeps its port.
    """
    nats, postgres = _nats(layout, settings), _postgres(layout, settings)
    held = []
    for is_running, noted in (
        (nats.pid is not None, nats.directory / "nats.port"),
        (postgres.pid is not None, postgres.home / "port"),
    ):
        if not is_running:
            holder = hold_port(_noted_port(noted), is_wish=True)
            noted.parent.mkdir(parents=True, exist_ok=True)
            noted.write_text(str(holder.getsockname()[1]))
            held.append(holder)
    return held


def _noted_port(noted: Path) -> int:
    try:
        return int(noted.read_text())
    except (FileNotFoundError, ValueError):
        return 0


async def stop_servers(layout: Layout, settings: PlatformSettings) -> None:
    """Both stopped in order; harmless when they are not running."""
    await asyncio.gather(_nats(layout, settings).stop(), asyncio.to_thread(_postgres(layout, settings).stop))


def _store(layout: Layout, settings: PlatformSettings) -> Path:
    return Path(settings.store) if settings.store else layout.home


def _nats(layout: Layout, settings: PlatformSettings) -> NatsServer:
    from berth.embedded.nats import NatsServer

    return NatsServer(_store(layout, settings) / "nats", credentials=layout.run / "credentials")


def _postgres(layout: Layout, settings: PlatformSettings) -> PostgresServer:
    from berth.embedded.postgres import PostgresServer

    return PostgresServer(_store(layout, settings) / "postgres")


async def _start_nats(server: NatsServer, settings: PlatformSettings) -> None:
    from berth.bus.connection import Connection
    from berth.bus.permissions import PROVISIONER
    from berth.bus.provision import berth_topology, ensure_node_consumers, provision
    from berth.contracts.consumers import consumer_filters
    from berth.embedded.fleet import node_names

    await server.start(detached=True)
    async with Connection(server.settings(PROVISIONER)) as bus:
        await provision(bus, berth_topology(consumer_filters(settings.pool)))
        await ensure_node_consumers(bus, settings.pool, node_names(settings.fleet))


async def _start_postgres(layout: Layout, server: PostgresServer) -> dict[str, str]:
    from berth.store.migrate import migrate_all

    await asyncio.to_thread(server.start, detached=True)
    passwords = _passwords(layout)
    await migrate_all(server.dsn(), passwords)
    return {name: server.dsn(user=f"berth_{name}", password=passwords[name]) for name in STATEFUL}


def _passwords(layout: Layout) -> dict[str, str]:
    path = layout.run / "database-passwords.json"
    if path.exists():
        known: dict[str, str] = json.loads(path.read_text())
        return known
    made = {name: secrets.token_urlsafe(24) for name in STATEFUL}
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        json.dump(made, file)
    return made
