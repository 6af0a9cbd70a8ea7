"""Real NATS and PostgreSQL."""

from berth.testing.postgres import *  # noqa: F403
from berth.testing.servers import *  # noqa: F403
