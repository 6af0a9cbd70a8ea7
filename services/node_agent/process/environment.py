"""The environment a program sees: nothing of the agent's own, only what is set here."""

from collections.abc import Mapping

from services.node_agent.process.runtime import WorkerLaunch

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
OWNED_NAMES = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"})
"""A job may not set these: they are its grant."""
MARKER = "BERTH_WORK_DIR"
"""Unique to a worker on this machine and inherited by all that it starts; how strays are found."""


def device_variables(launch: WorkerLaunch) -> dict[str, str]:
    """Name the granted cards; an empty grant must say so, as unset means all of them.

    Full UUIDs by default: the index changes between boots and tools. Some frameworks read integers only, hence `index`.
    """
    by_index = launch.device_naming == "index"
    names = [str(index) for index in launch.gpu_indices] if by_index else list(launch.gpu_uuids)
    return {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(names),
        "NVIDIA_VISIBLE_DEVICES": ",".join(launch.gpu_uuids) or "void",
    }


def program_environment(launch: WorkerLaunch, *, work_dir: str, platform: Mapping[str, str]) -> dict[str, str]:
    """All variables of one program.

    Args:
        work_dir: its working directory, which is its home as well.
        platform: what the agent adds for every worker (checkpoint directories, rendezvous); wins over the job's own.
    """
    env = {"PATH": DEFAULT_PATH, "HOME": work_dir, "LANG": "C.UTF-8"}
    env.update((name, value) for name, value in launch.env.items() if name not in OWNED_NAMES)
    env.update(platform)
    env.update(device_variables(launch))
    env["BERTH_JOB_ID"] = launch.key.job_id
    env["BERTH_ATTEMPT"] = str(launch.key.attempt)
    env["BERTH_WORKER"] = str(launch.key.worker)
    env["BERTH_FENCE"] = str(launch.fence)
    env["BERTH_NODE"] = launch.node
    env["BERTH_GRACE_SECONDS"] = f"{launch.grace_seconds:g}"
    env[MARKER] = work_dir
    return env
