"""A real NATS server for tests: one for each test process, its streams made anew for each test.

Import the fixtures in a `conftest.py`: `from berth.testing.servers import *`. The server lies in memory where the
machine offers it and goes when the process does. Making the streams anew takes about 10 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from berth.bus import jsapi
from berth.bus.connection import Connection
from berth.bus.errors import NoStream
from berth.bus.permissions import PROVISIONER, SERVICE_PUBLISH
from berth.bus.provision import COMMANDS, EVENTS, berth_topology, ensure_node_consumers, provision
from berth.embedded.nats import NatsConfig, NatsServer
from berth.testing.places import memory_dir

__all__ = ["NatsPlatform", "nats", "nats_server"]

POOL = "default"
EVERYTHING: Mapping[str, Sequence[str]] = dict.fromkeys(SERVICE_PUBLISH, ())
"""Filters of a platform where every service reads every event."""


@dataclass(slots=True)
class NatsPlatform:
    """A running server with the real streams, empty, and connections that end with the test."""

    server: NatsServer
    connections: contextlib.AsyncExitStack

    async def connect(self, user: str) -> Connection:
        """An open connection as `user`: a service, `fleet`, `public` or `provisioner`."""
        return await self.connections.enter_async_context(Connection(self.server.settings(user, connect_timeout_s=10)))

    async def add_nodes(self, nodes: Sequence[str]) -> None:
        """Make the command consumers of `nodes`."""
        async with Connection(self.server.settings(PROVISIONER)) as admin:
            await ensure_node_consumers(admin, POOL, nodes)


async def provision_anew(server: NatsServer, filters: Mapping[str, Sequence[str]] = EVERYTHING) -> None:
    """Empty streams and untouched consumers, whatever was there before."""
    async with Connection(server.settings(PROVISIONER, connect_timeout_s=10)) as admin:
        for stream in (EVENTS, COMMANDS):
            with contextlib.suppress(NoStream):
                await jsapi.call(admin, f"STREAM.DELETE.{stream}", timeout=10)
        await provision(admin, berth_topology(filters))


@contextlib.asynccontextmanager
async def nats_platform(
    server: NatsServer, filters: Mapping[str, Sequence[str]] = EVERYTHING
) -> AsyncIterator[NatsPlatform]:
    """Provision `server` anew and hand out connections to it."""
    await provision_anew(server, filters)
    async with contextlib.AsyncExitStack() as connections:
        yield NatsPlatform(server, connections)


@contextlib.contextmanager
def temporary_nats(config: NatsConfig | None = None) -> Iterator[NatsServer]:
    """A running server of its own, for tests that stop or crash it; killed by its pid at the end."""
    with tempfile.TemporaryDirectory(prefix="berth-test-nats-", dir=memory_dir(), ignore_cleanup_errors=True) as folder:
        server = NatsServer(Path(folder), config)
        asyncio.run(server.start())
        try:
            yield server
        finally:
            asyncio.run(server.kill())


@pytest.fixture(scope="session")
def nats_server() -> Iterator[NatsServer]:
    """The server of this test process; tests that use it directly must not stop it."""
    with temporary_nats() as server:
        yield server


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[NatsPlatform]:
    """The real streams, empty; every service reads every event."""
    async with nats_platform(nats_server) as platform:
        yield platform
