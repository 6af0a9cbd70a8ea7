"""What handlers work with; built in `app.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from berth.contracts.commands import LaunchWorkers
from berth.telemetry.logs import get_logger
from services.node_agent.journal import Journal
from services.node_agent.node import Node
from services.node_agent.process.runtime import WorkerRuntime
from services.node_agent.reports import Reporter
from services.node_agent.settings import Settings

if TYPE_CHECKING:
    from services.node_agent.metrics import AgentMetrics

log = get_logger("node_agent")

FetchSecrets = Callable[[LaunchWorkers], Awaitable[Mapping[str, str]]]


class PlatformClock:
    """The platform's time, from the node's own and the difference measured at the bus.

    Expiries are the platform's; a node whose clock is wrong must not refuse everything, nor take what is long over.
    """

    def __init__(self) -> None:
        self.offset = timedelta(0)

    def now(self) -> datetime:
        return datetime.now(UTC) + self.offset

    def measured(self, platform: datetime, sent_at: float, received_at: float) -> None:
        """A clock reading asked for at `sent_at` and received at `received_at` (own clock, seconds since 1970)."""
        self.offset = platform - datetime.fromtimestamp((sent_at + received_at) / 2, tz=UTC)


@dataclass(slots=True)
class Deps:
    """Shared by all handlers of the process."""

    settings: Settings
    journal: Journal
    runtime: WorkerRuntime
    reporter: Reporter
    clock: PlatformClock
    fetch_secrets: FetchSecrets
    nodes: dict[str, Node]
    metrics: AgentMetrics | None = None
    checkpoints: str = ""
    """Folder in which each job has one of its own."""
    starts: list[Coroutine[object, object, None]] = field(default_factory=list)
    """Begun by handlers; run once the journal has what they rest on."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` beside the loops. It handles what it expects; anything else is a defect and logged as one."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background work failed", error=error)

    def now_seconds(self) -> float:
        """The node's own wall clock; for records, never for decisions."""
        return time.time()
