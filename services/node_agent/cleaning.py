"""Whether a card is clean: its memory in nobody's hands once its job is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

from berth.telemetry.logs import get_logger
from services.node_agent.deps import Deps
from services.node_agent.driver.base import GpuDriverError, GpuTelemetry, Tier
from services.node_agent.node import Node
from services.node_agent.workers import Worker

log = get_logger("node_agent")
FIRST_LOOK_SECONDS = 0.02
LAST_LOOK_SECONDS = 0.5


def leftovers(readings: Iterable[GpuTelemetry], cards: frozenset[str], *, unclean_from_mib: int) -> dict[str, int]:
    """Of `cards`, those whose memory is still in use -> MiB; a card that gives no reading proves nothing."""
    return {
        reading.uuid: reading.memory_used_mib
        for reading in readings
        if reading.uuid in cards
        and reading.memory_used_mib is not None
        and (reading.memory_used_mib >= unclean_from_mib or reading.processes)
    }


async def settle_cards(node: Node, worker: Worker, deps: Deps) -> None:
    """Wait until the cards of an ended worker are clean; after `clean_wait_seconds` they are reported instead.

    The driver needs a moment to take back the memory of a killed process. Cards that others share are not looked at.
    """
    shared = {gpu for other in node.live() if other is not worker and other.is_live for gpu in other.gpus}
    cards = frozenset(worker.gpus) - shared
    end = time.monotonic() + deps.settings.clean_wait_seconds
    pause = FIRST_LOOK_SECONDS
    while cards:
        try:
            readings = await asyncio.to_thread(node.driver.telemetry, Tier.HOT)
        except GpuDriverError as error:
            log.warning("card cannot be read", node=node.name, error=str(error))
            return
        if not leftovers(readings, cards, unclean_from_mib=deps.settings.unclean_from_mib):
            return
        if time.monotonic() >= end:
            watch_cleanliness(node, readings, deps)
            return
        await asyncio.sleep(pause)
        pause = min(pause * 2, LAST_LOOK_SECONDS)


def watch_cleanliness(node: Node, readings: Iterable[GpuTelemetry], deps: Deps) -> None:
    """Report cards without a worker whose memory is in use, and again when they are clean. Each change once."""
    held = {gpu for worker in node.live() for gpu in worker.gpus if worker.is_live}
    free = node.view.gpu_uuids - held
    found = leftovers(readings, free, unclean_from_mib=deps.settings.unclean_from_mib)
    for gpu in found.keys() - node.unclean.keys():
        tell_condition(node, gpu, deps, used=found[gpu])
    known = {reading.uuid for reading in readings if reading.memory_used_mib is not None}
    for gpu in (node.unclean.keys() & known) - found.keys():
        tell_condition(node, gpu, deps, used=0)
        del node.unclean[gpu]
    node.unclean.update(found)


def tell_condition(
    node: Node, gpu: str, deps: Deps, *, xid: int | None = None, used: int | None = None, passed: bool = False
) -> None:
    """Report a card's condition; inventory decides what follows."""
    at = deps.clock.now()
    log.warning("card condition", node=node.name, gpu=gpu, xid=xid, memory_used_mib=used, passed_check=passed)
    deps.reporter.tell(
        node.condition(gpu, at.timestamp(), xid=xid, used=used, passed=passed),
        entity=node.name,
        event_id=f"{node.name}.{time.time_ns()}-{gpu}.GpuConditionReported",
        time=at,
        correlation=node.name,
    )
