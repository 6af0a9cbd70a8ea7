"""What a worker finds when it starts: the environment of a launch command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from berth.contracts.commands import LaunchWorkers, WorkerPlan
from berth.contracts.jobs import JobSpec
from berth.decisions.lifecycle.model import JobRun, Worker

FIRST_PORT = 20_000
PORTS = 12_000


def launch_order(
    run: JobRun,
    spec: JobSpec,
    workers: Sequence[Worker],
    *,
    epoch: int,
    addresses: Mapping[str, str],
    grace_seconds: int,
    expires_at: datetime,
) -> LaunchWorkers:
    """The command that starts `workers`, all on one node and placed under one fence.

    The user's own values win over the usual names of distributed training (a script may bring its own rendezvous), but
    never over `BERTH_*`: other tools trust those.
    """
    node, fence = workers[0].node, workers[0].fence
    first = run.workers[0]
    size = str(len(run.workers))
    env = {
        "WORLD_SIZE": size,
        "MASTER_ADDR": addresses.get(first.node, "127.0.0.1"),
        "MASTER_PORT": str(FIRST_PORT + first.fence % PORTS),
        **{name: value for name, value in spec.env.items() if not name.startswith("BERTH_")},
        "BERTH_JOB_ID": run.job_id,
        "BERTH_JOB_NAME": spec.name,
        "BERTH_TENANT": spec.tenant,
        "BERTH_CLASS": spec.job_class.value,
        "BERTH_ATTEMPT": str(run.attempt),
        "BERTH_FENCE": str(fence),
        "BERTH_WORKERS": size,
        "BERTH_GRACE_SECONDS": str(grace_seconds),
    }
    here = [worker.number for worker in run.workers if worker.node == node]
    ranks = {worker.number: rank for rank, worker in enumerate(run.workers)}
    commands = {role.name: role.command for role in spec.roles}
    return LaunchWorkers(
        node=node,
        epoch=epoch,
        expires_at=expires_at,
        job_id=run.job_id,
        attempt=run.attempt,
        fence=fence,
        tenant=spec.tenant,
        job_class=spec.job_class.value,
        name=spec.name,
        command=spec.command,
        env=env,
        secret_env=spec.secret_env,
        workdir=spec.workdir,
        workers=tuple(
            WorkerPlan(
                worker=worker.number,
                gpus=worker.gpus,
                env=_worker_env(worker, spec, rank=ranks[worker.number], local_rank=here.index(worker.number)),
                command=commands.get(worker.role, ()),
                gpu_milli=worker.gpu_milli,
                memory_mib=worker.memory_mib,
                slice=worker.slice,
            )
            for worker in workers
        ),
        grace_seconds=grace_seconds,
    )


def _worker_env(worker: Worker, spec: JobSpec, *, rank: int, local_rank: int) -> dict[str, str]:
    env = {"BERTH_WORKER": str(worker.number), "BERTH_ROLE": worker.role}
    for name, value in (("RANK", rank), ("LOCAL_RANK", local_rank)):
        if name not in spec.env:
            env[name] = str(value)
    return env
