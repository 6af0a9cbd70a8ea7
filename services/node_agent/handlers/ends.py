"""The end of a worker: its exit, the release of its cards, and telling both."""

from __future__ import annotations

import asyncio
from functools import partial

from berth.telemetry.logs import get_logger
from services.node_agent.cleaning import settle_cards
from services.node_agent.deps import Deps
from services.node_agent.driver.sim import SimDriver
from services.node_agent.node import Node
from services.node_agent.process.runtime import StartRefused, WorkerExit
from services.node_agent.workers import Phase, Worker

log = get_logger("node_agent")


def on_worker_exit(ended: WorkerExit, node: Node, deps: Deps) -> None:
    """A program and all it had started are gone."""
    worker = node.workers.get(ended.key)
    if worker is None or not worker.is_live:
        log.warning("end of a worker nobody knows", node=node.name, worker=ended.key.folder)
        return
    if worker.phase is Phase.ACCEPTED:
        worker.on_started(0, ended.started_at_ns / 1e9)
        deps.reporter.tell_worker(worker, worker.started_report())
    if deps.metrics is not None:
        deps.metrics.ends.labels(_how(ended)).inc()
    if isinstance(node.driver, SimDriver):
        node.driver.vacate(worker.gpus, worker.pid)
    has_failed = ended.exit_code != 0 and not ended.stop_reason
    if (has_failed and deps.settings.failure_log_bytes) or must_wait_for_cards(node, worker):
        deps.spawn(_exit_slowly(ended, worker, node, deps, with_log=has_failed))
    else:
        worker.on_exited(ended, "")
        release(node, worker, deps)


def _how(ended: WorkerExit) -> str:
    if ended.is_lost:
        return "lost"
    if ended.stop_reason:
        return "stopped"
    return "failed" if ended.exit_code else "done"


async def _exit_slowly(ended: WorkerExit, worker: Worker, node: Node, deps: Deps, *, with_log: bool) -> None:
    message = await log_tail(worker, node, deps) if with_log else ""
    worker.on_exited(ended, message)
    must_wait = must_wait_for_cards(node, worker)
    if must_wait:
        node.save(worker)
        deps.reporter.tell_worker(worker, worker.exited_report())
        await settle_cards(node, worker, deps)
    release(node, worker, deps, was_exit_told=must_wait)


async def log_tail(worker: Worker, node: Node, deps: Deps) -> str:
    """The end of its output, from the beginning of a line where there is one."""
    wanted = deps.settings.failure_log_bytes
    try:
        async with asyncio.timeout(5):
            chunk = await deps.runtime.read_log(worker.key, node.name, offset=-wanted, max_bytes=wanted)
    except (KeyError, OSError, TimeoutError):
        return ""
    text = chunk.data.decode("utf-8", "replace")
    if chunk.offset > 0 and "\n" in text[:-1]:
        text = text.partition("\n")[2]
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")  # databases take no NUL in text


def must_wait_for_cards(node: Node, worker: Worker) -> bool:
    """Whether the driver has to be asked before its cards count as free."""
    return bool(worker.gpus) and not isinstance(node.driver, SimDriver)


def end_without_start(node: Node, worker: Worker, deps: Deps, refused: StartRefused | None = None) -> None:
    """Nothing ran and nothing will: because it was refused, or stopped before it could begin."""
    at = deps.now_seconds()
    if refused is not None:
        worker.on_refused(refused, at)
    elif worker.stop_grace_seconds is not None:
        worker.on_stopped_before_start(at)
    else:
        worker.on_never_started(at)
    release(node, worker, deps)


def release(node: Node, worker: Worker, deps: Deps, *, was_exit_told: bool = False) -> None:
    """No process of the worker holds a card: note it and tell what was not told."""
    worker.on_released()
    node.save(worker)
    if not was_exit_told:
        deps.reporter.tell_worker(worker, worker.exited_report())
    deps.reporter.tell_worker(worker, worker.released_report(), partial(told, node, worker, deps))


def told(node: Node, worker: Worker, deps: Deps) -> None:
    """The platform has the whole story of this worker."""
    worker.is_told = True
    node.save(worker)
    deps.runtime.forget(worker.key, node.name)


def tell_again(node: Node, worker: Worker, deps: Deps) -> None:
    """Repeat all that is known of a worker; whoever has it already drops it by its id."""
    for report in worker.reports():
        is_last = worker.phase is Phase.RELEASED and type(report).__name__ == "WorkerReleased"
        deps.reporter.tell_worker(worker, report, partial(told, node, worker, deps) if is_last else None)
