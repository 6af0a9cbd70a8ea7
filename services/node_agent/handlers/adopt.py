"""The start of an agent: what an earlier one had begun is taken over before anything new is."""

from __future__ import annotations

import time

from berth.telemetry.logs import get_logger
from services.node_agent.deps import Deps
from services.node_agent.driver.sim import SimDriver
from services.node_agent.handlers.ends import end_without_start, on_worker_exit, release, tell_again
from services.node_agent.node import Node
from services.node_agent.process.runtime import RunningWorker, WorkerExit
from services.node_agent.workers import Phase, Worker

log = get_logger("node_agent")


async def adopt_workers(node: Node, deps: Deps) -> None:
    """Match journal and machine, and report what ended while no agent was there.

    The machine is right about what runs, the journal about what was told. A worker the journal calls running and the
    machine does not know is lost: its files are gone.
    """
    found = await deps.runtime.adopt(node.name)
    for running in found.running:
        worker = _known(node, running)
        if worker.phase is Phase.ACCEPTED:
            worker.on_started(running.pid, running.started_at_ns / 1e9)
            node.save(worker)
        if isinstance(node.driver, SimDriver) and worker.gpus:
            node.driver.occupy(worker.gpus, running.pid)
        tell_again(node, worker, deps)
    for ended in found.ended:
        worker = _known(node, ended)
        if worker.is_live:
            on_worker_exit(ended, node, deps)
        else:
            _finish(node, worker, deps)
    seen = {running.key for running in found.running} | {ended.key for ended in found.ended}
    for worker in node.live() + [w for w in node.workers.values() if w.phase is Phase.RELEASED and not w.is_told]:
        if worker.key not in seen:
            _end_unseen(node, worker, deps)
    log.info(
        "took over", node=node.name, running=len(found.running), ended=len(found.ended), never=len(found.never_started)
    )


def _known(node: Node, found: RunningWorker | WorkerExit) -> Worker:
    """The journal's record, or one made from what the machine kept (the journal was lost)."""
    worker = node.workers.get(found.key)
    if worker is None:
        worker = Worker.from_entry(found.extra)
        node.add(worker)
    return worker


def _finish(node: Node, worker: Worker, deps: Deps) -> None:
    """Its end is in the journal; the release or the telling is not."""
    if worker.phase is Phase.EXITED:
        release(node, worker, deps)
    elif not worker.is_told:
        tell_again(node, worker, deps)


def _end_unseen(node: Node, worker: Worker, deps: Deps) -> None:
    if worker.phase is Phase.ACCEPTED:
        end_without_start(node, worker, deps)
    elif worker.phase is Phase.RUNNING:
        lost = WorkerExit(
            worker.key,
            node.name,
            worker.fence,
            -1,
            is_lost=True,
            lost_reason="not found after the agent's restart",
            ended_at_ns=time.time_ns(),
        )
        on_worker_exit(lost, node, deps)
    else:
        _finish(node, worker, deps)
