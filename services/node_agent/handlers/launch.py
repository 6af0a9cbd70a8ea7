"""`LaunchWorkers`: start programs, once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from time import perf_counter

import orjson

from berth.bus.errors import BusError
from berth.contracts.commands import LaunchWorkers, WorkerPlan
from berth.contracts.envelope import Envelope
from berth.contracts.reasons import Code, because
from berth.telemetry.logs import get_logger
from services.node_agent.deps import Deps
from services.node_agent.driver.sim import SimDriver
from services.node_agent.handlers.ends import end_without_start, tell_again
from services.node_agent.handlers.refusals import refuse
from services.node_agent.node import Node
from services.node_agent.process.checkpoints import newest_manifest
from services.node_agent.process.environment import DEFAULT_PATH
from services.node_agent.process.runtime import AlreadyLaunchedError, StartRefused, WorkerLaunch
from services.node_agent.rules import WHOLE_CARD_MILLI, refuse_launch
from services.node_agent.workers import Worker

log = get_logger("node_agent")
EINVAL = 22


def on_launch_workers(event: Envelope[LaunchWorkers], node: Node, deps: Deps, trace: str) -> None:
    """Judge the command and take its workers on; they are started when the journal has them.

    A repeat of it, in whatever session, changes nothing; who asks anew, under another id, is answered with what became of
    its workers. Answers to the first asking are in the bus, or on their way there.
    """
    order = event.data
    wanted = {plan.worker for plan in order.workers}
    known = node.workers_of_attempt(order.job_id, order.attempt)
    if repeated := [worker for worker in known if worker.worker in wanted and worker.fence == order.fence]:
        for worker in repeated:
            if worker.command_id != event.id:
                tell_again(node, worker, deps)
        return
    reason = node.was_refused(event.id) or refuse_launch(
        node.view, order, deps.clock.now(), live=node.live(), unclean=node.unclean
    )
    devices = {plan.worker: node.devices_for(plan.gpus, plan.slice) for plan in order.workers}
    if reason is None and any(found is None for found in devices.values()):
        reason = because(Code.GPU_BUSY, error="no free slice of this kind on the card")
    if reason is not None:
        refuse(event, node, reason, deps, trace=trace)
        return
    node.view.remember_launch(order)
    for plan in order.workers:
        worker = Worker(
            node=node.name,
            job_id=order.job_id,
            attempt=order.attempt,
            worker=plan.worker,
            fence=order.fence,
            epoch=order.epoch,
            command_id=event.id,
            expires_at=order.expires_at.timestamp(),
            tenant=order.tenant,
            trace=trace,
            gpus=plan.gpus,
            devices=devices[plan.worker] or (),
            is_exclusive=plan.gpu_milli >= WHOLE_CARD_MILLI and plan.slice is None,
            grace_seconds=order.grace_seconds,
        )
        node.add(worker)
        deps.starts.append(start_worker(order, plan, worker, node, deps))


async def start_worker(order: LaunchWorkers, plan: WorkerPlan, worker: Worker, node: Node, deps: Deps) -> None:
    """Start one program and tell how it went."""
    begun = perf_counter()
    try:
        secrets = await deps.fetch_secrets(order) if order.secret_env else {}
    except (BusError, KeyError) as error:
        _refused(node, worker, deps, EINVAL, f"secrets not available: {error}")
        return
    if worker.stop_grace_seconds is not None:
        end_without_start(node, worker, deps)
        return
    try:
        started = await deps.runtime.launch(program_of(order, plan, worker, node, deps, secrets))
    except AlreadyLaunchedError:
        # The journal did not know it, the disk does: state was restored from somewhere. Never start it again.
        _refused(node, worker, deps, EINVAL, "was launched here before")
        return
    except OSError as error:  # a full disk, no process left: before any program could start
        _refused(node, worker, deps, error.errno or EINVAL, str(error))
        return
    if isinstance(started, StartRefused):
        _refused(node, worker, deps, started.errno, started.reason)
        return
    if deps.metrics is not None:
        deps.metrics.launches.labels("started").inc()
        deps.metrics.launch_seconds.observe(perf_counter() - begun)
    worker.on_started(started.pid, started.started_at_ns / 1e9)
    node.save(worker)
    if isinstance(node.driver, SimDriver) and worker.gpus:
        node.driver.occupy(worker.gpus, started.pid)
    deps.reporter.tell_worker(worker, worker.started_report())
    if worker.stop_grace_seconds is not None:
        deps.runtime.stop(worker.key, node.name, grace_seconds=worker.stop_grace_seconds, reason=worker.stop_reason)


def _refused(node: Node, worker: Worker, deps: Deps, code: int, reason: str) -> None:
    if deps.metrics is not None:
        deps.metrics.launches.labels("refused").inc()
    end_without_start(node, worker, deps, StartRefused(worker.key, node.name, worker.fence, code, reason))


def program_of(
    order: LaunchWorkers, plan: WorkerPlan, worker: Worker, node: Node, deps: Deps, secrets: Mapping[str, str]
) -> WorkerLaunch:
    """What to run: the worker's own command and variables go on top of the common ones."""
    index_of = {gpu.uuid: gpu.index for gpu in node.gpus}
    return WorkerLaunch(
        key=worker.key,
        node=node.name,
        fence=order.fence,
        argv=plan.command or order.command,
        env={"PATH": deps.settings.program_path or DEFAULT_PATH, **secrets, **order.env, **plan.env},
        platform_env={"BERTH_GPUS": ",".join(plan.gpus), **resume_variables(order, deps)},
        gpu_uuids=worker.devices,
        gpu_indices=[index_of.get(gpu, 0) for gpu in plan.gpus],
        cwd=order.workdir or "",
        grace_seconds=order.grace_seconds,
        extra=orjson.dumps(worker),
    )


def resume_variables(order: LaunchWorkers, deps: Deps) -> dict[str, str]:
    """Where the job's checkpoints are, and the newest valid one. A look at one folder, at a start that has one."""
    folder = f"{deps.checkpoints}/{order.job_id}"
    found = newest_manifest(Path(folder), fence=order.fence) if order.attempt > 1 else None
    manifest, step = ("", "") if found is None else (str(found[0]), str(found[1]))
    return {"BERTH_CKPT_DIR": folder, "BERTH_RESUME_FROM": manifest, "BERTH_RESUME_STEP": step}
