"""Real NATS and PostgreSQL, and gateways over them."""

from __future__ import annotations

import pytest

from berth.testing.postgres import *  # noqa: F403
from berth.testing.postgres import PostgresPlatform
from berth.testing.servers import *  # noqa: F403
from berth.testing.servers import NatsPlatform
from tests.integration.gateway.rig import Rig


@pytest.fixture
async def rig(nats: NatsPlatform, postgres: PostgresPlatform) -> Rig:
    return Rig(nats, postgres)
