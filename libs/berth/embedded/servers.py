"""NATS and PostgreSQL of an embedded platform: started together, provisioned, kept, stopped."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from berth.embedded.layout import STATEFUL, Layout

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
    """Start again what has died; names of what had."""
    revived = []
    nats = _nats(layout, settings)
    if nats.pid is None:
        await nats.start(detached=True)
        revived.append("nats")
    postgres = _postgres(layout, settings)
    if await asyncio.to_thread(lambda: postgres.pid) is None:
        await asyncio.to_thread(postgres.start, detached=True)
        revived.append("postgres")
    return revived


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
