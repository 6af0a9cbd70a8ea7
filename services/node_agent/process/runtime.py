"""What the agent asks of whatever runs workers: real processes, or pretended ones for thousand-node benches."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class WorkerKey(NamedTuple):
    """One worker of one attempt; unique for ever, as attempts are never numbered twice."""

    job_id: str
    attempt: int
    worker: int

    @property
    def folder(self) -> str:
        """Name of the worker's directory; a job id holds no dot, so it can be read back."""
        return f"{self.job_id}.{self.attempt}.{self.worker}"

    @classmethod
    def from_folder(cls, name: str) -> "WorkerKey":
        """Raises ValueError for a name that no worker has."""
        job_id, attempt, worker = name.split(".")
        return cls(job_id, int(attempt), int(worker))


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """One program to start, with all it may know of the platform."""

    key: WorkerKey
    node: str
    fence: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """What the job asked for; names that the agent sets itself are not taken from here."""
    platform_env: Mapping[str, str] = field(default_factory=dict)
    """What the platform says of this job; wins over `env`."""
    gpu_uuids: Sequence[str] = ()
    gpu_indices: Sequence[int] = ()
    """Same cards in the node's own numbering; used only with `device_naming` index."""
    device_naming: str = "uuid"
    cwd: str = ""
    """Empty: a directory of its own for each attempt."""
    grace_seconds: float = 30.0
    """From SIGTERM to SIGKILL when nobody says otherwise."""
    extra: bytes = b"{}"
    """A JSON object the agent wants to find again after a restart; kept in the worker's record, not shown to the program."""


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker whose program was started, and of which no end is known."""

    key: WorkerKey
    node: str
    fence: int
    pid: int
    started_at_ns: int
    """Wall clock of the node; information, never a basis for decisions."""
    gpu_uuids: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StartRefused:
    """The machine would not start the program; nothing ran."""

    key: WorkerKey
    node: str
    fence: int
    errno: int
    reason: str
    """The system's words and the step, such as `no such file or directory (exec)`."""


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended. When this is told, none of its processes is left."""

    key: WorkerKey
    node: str
    fence: int
    exit_code: int
    """-1 when a signal ended it, or when nobody knows."""
    signal: int = 0
    is_lost: bool = False
    """Its end was not seen: the supervisor or the machine died under it."""
    lost_reason: str = ""
    out_of_memory: bool = False
    stop_reason: str = ""
    """Why it was asked to stop; empty when it ended by itself."""
    used_sigkill: bool = False
    leftovers: int = 0
    """Processes that the main program left running."""
    started_at_ns: int = 0
    ended_at_ns: int = 0
    cpu_us: int = 0
    max_rss_kib: int = 0
    log_bytes: int = 0
    gpu_uuids: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Adoption:
    """What a starting agent found on a node."""

    running: tuple[RunningWorker, ...]
    ended: tuple[WorkerExit, ...]
    """Ended and not forgotten yet."""
    never_started: tuple[WorkerKey, ...]
    """A launch was begun and came to nothing; it is certain now that it never will."""


class AlreadyLaunchedError(Exception):
    """This worker was launched before; the caller should have known."""


@dataclass(frozen=True, slots=True)
class LogChunk:
    """A piece of a worker's output, addressed by bytes since its start."""

    data: bytes
    offset: int
    """Where `data` begins; more than what was asked for if that was dropped already."""
    next_offset: int
    eof: bool
    """The worker has ended and there is nothing after `data`."""


class WorkerRuntime(Protocol):
    """Runs workers. One instance serves all nodes of an agent; nothing here waits for a program to end."""

    exits: asyncio.Queue[WorkerExit]

    async def launch(self, launch: WorkerLaunch) -> RunningWorker | StartRefused:
        """Start one program; returns when it runs or is refused. Its end arrives in `exits`."""
        ...

    def stop(self, key: WorkerKey, node: str, *, grace_seconds: float, reason: str) -> bool:
        """Begin to stop; false when it does not run here. A later call can only shorten the grace."""
        ...

    async def adopt(self, node: str) -> Adoption:
        """Find what an earlier agent left; call once for each node before the first launch on it."""
        ...

    def renew(self, node: str, deadline_boottime_ns: int, grace_seconds: float | None = None) -> None:
        """Let the workers of `node` go on until then (CLOCK_BOOTTIME), whatever becomes of the agent.

        grace_seconds: from SIGTERM to SIGKILL after that; None: as the runtime was told when it was made.
        """
        ...

    def forget(self, key: WorkerKey, node: str) -> None:
        """The end of this worker was reported; only its log is of interest now."""
        ...

    async def read_log(self, key: WorkerKey, node: str, *, offset: int, max_bytes: int) -> LogChunk:
        """Output from `offset` on; a negative offset counts from the end. Raises KeyError for an unknown worker."""
        ...

    async def close(self) -> None:
        """Let go of everything; programs keep running."""
        ...
