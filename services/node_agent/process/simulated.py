"""Workers without processes: they "run" for a given time and end. For benches and for fleets of thousands of nodes."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.node_agent.process.runtime import (
    Adoption,
    AlreadyLaunchedError,
    LogChunk,
    RunningWorker,
    StartRefused,
    WorkerExit,
    WorkerKey,
    WorkerLaunch,
)


@dataclass(frozen=True, slots=True)
class Pretence:
    """How a pretended program goes."""

    seconds: float = 0.0
    exit_code: int = 0
    output: bytes = b""
    stop_seconds: float = 0.0
    """From being told to stop until gone; the grace ends it at the latest."""
    refused_errno: int = 0


def from_arguments(launch: WorkerLaunch) -> Pretence:
    """Read `true`, `false`, `sleep SECONDS`, `exit CODE`, `echo WORDS` as a shell would; all else ends well at once."""
    argv: Sequence[str] = launch.argv
    name = argv[0].rpartition("/")[2] if argv else "true"
    rest = list(argv[1:])
    if name == "false":
        return Pretence(exit_code=1)
    if name == "echo":
        return Pretence(output=(" ".join(rest) + "\n").encode())
    try:
        if name == "sleep" and rest:
            return Pretence(seconds=float(rest[0]))
        if name == "exit" and rest:
            return Pretence(exit_code=int(rest[0]))
    except ValueError:
        return Pretence(exit_code=1)
    return Pretence()


@dataclass(slots=True)
class _Pretended:
    worker: RunningWorker
    how: Pretence
    ends_at: float
    number: int
    stop_reason: str = ""
    signal: int = 0


@dataclass(slots=True)
class _Node:
    live: dict[WorkerKey, _Pretended] = field(default_factory=dict)
    ended: dict[WorkerKey, WorkerExit] = field(default_factory=dict)
    deadline_ns: int = 0


class SimulatedWorkers:
    """`WorkerRuntime` whose workers are entries in a heap; one timer for all of them.

    Keeps what ran across `adopt`, as real processes outlive their agent; nothing outlives this object.
    """

    def __init__(self, pretend: Callable[[WorkerLaunch], Pretence] = from_arguments) -> None:
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._pretend = pretend
        self._nodes: dict[str, _Node] = {}
        self._heap: list[tuple[float, int, _Pretended]] = []
        self._numbers = itertools.count(1)
        self._timer: asyncio.TimerHandle | None = None
        self._output: dict[tuple[str, WorkerKey], bytes] = {}

    async def launch(self, launch: WorkerLaunch) -> RunningWorker | StartRefused:
        node = self._node(launch.node)
        if launch.key in node.live or launch.key in node.ended:
            raise AlreadyLaunchedError(launch.key.folder)
        how = self._pretend(launch)
        if how.refused_errno:
            return StartRefused(launch.key, launch.node, launch.fence, how.refused_errno, "pretended")
        number = next(self._numbers)
        worker = RunningWorker(launch.key, launch.node, launch.fence, number, time.time_ns(), tuple(launch.gpu_uuids))
        if how.output:
            self._output[launch.node, launch.key] = how.output
        pretended = _Pretended(worker, how, time.monotonic() + how.seconds, number)
        node.live[launch.key] = pretended
        self._push(pretended)
        return worker

    def stop(self, key: WorkerKey, node: str, *, grace_seconds: float, reason: str) -> bool:
        pretended = self._node(node).live.get(key)
        if pretended is None:
            return False
        pretended.stop_reason = pretended.stop_reason or reason
        pretended.signal = 9 if pretended.how.stop_seconds > grace_seconds else 15
        pretended.ends_at = min(pretended.ends_at, time.monotonic() + min(pretended.how.stop_seconds, grace_seconds))
        self._push(pretended)
        return True

    async def adopt(self, node: str) -> Adoption:
        found = self._node(node)
        return Adoption(tuple(each.worker for each in found.live.values()), tuple(found.ended.values()), ())

    def renew(self, node: str, deadline_boottime_ns: int, grace_seconds: float | None = None) -> None:
        self._node(node).deadline_ns = deadline_boottime_ns

    def forget(self, key: WorkerKey, node: str) -> None:
        self._node(node).ended.pop(key, None)

    async def read_log(self, key: WorkerKey, node: str, *, offset: int, max_bytes: int) -> LogChunk:
        output = self._output.get((node, key), b"")
        start = min(max(len(output) + offset if offset < 0 else offset, 0), len(output))
        data = output[start : start + max_bytes]
        end = start + len(data)
        return LogChunk(data, start, end, end == len(output) and key not in self._node(node).live)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _node(self, name: str) -> _Node:
        return self._nodes.setdefault(name, _Node())

    def _push(self, pretended: _Pretended) -> None:
        heapq.heappush(self._heap, (pretended.ends_at, next(self._numbers), pretended))
        if self._heap[0][2] is pretended:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap:
            delay = max(self._heap[0][0] - time.monotonic(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay, self._due)

    def _due(self) -> None:
        now = time.monotonic() + 0.0005
        while self._heap and self._heap[0][0] <= now:
            pretended = heapq.heappop(self._heap)[2]
            self._end(pretended, now)
        self._timer = None
        self._arm()

    def _end(self, pretended: _Pretended, now: float) -> None:
        worker = pretended.worker
        node = self._node(worker.node)
        if node.live.get(worker.key) is not pretended or pretended.ends_at > now:
            return  # an entry of before a stop moved its end
        del node.live[worker.key]
        exit_ = WorkerExit(
            key=worker.key,
            node=worker.node,
            fence=worker.fence,
            exit_code=-1 if pretended.signal else pretended.how.exit_code,
            signal=pretended.signal,
            stop_reason=pretended.stop_reason,
            used_sigkill=pretended.signal == 9,
            started_at_ns=worker.started_at_ns,
            ended_at_ns=time.time_ns(),
            gpu_uuids=worker.gpu_uuids,
            extra=worker.extra,
        )
        node.ended[worker.key] = exit_
        self.exits.put_nowait(exit_)
