"""A real server for every test of the bus layer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from berth.embedded.nats import NatsServer
from berth.testing.servers import *  # noqa: F403
from berth.testing.servers import temporary_nats


@pytest.fixture
def own_server() -> Iterator[NatsServer]:
    """A server that the test may stop, kill and start again."""
    with temporary_nats() as server:
        yield server
