"""Real processes: launches through the zygote, watches supervisors by pidfd, takes over after a restart.

On disk, below the state directory:

    NODE/lease      "DEADLINE GRACE": end of the node's lease, CLOCK_BOOTTIME ns, and ms from SIGTERM to SIGKILL then;
                    supervisors look when the end they know is past
    NODE/workers/JOB.ATTEMPT.WORKER/    see `supervisor.py`; the program's own directory is `work` in it
    NODE/done/JOB.ATTEMPT.WORKER/       the same, moved here once the end was reported; kept for its log
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from services.node_agent.process import logs
from services.node_agent.process.checkpoints import NOT_WORTH_SAVING, ask_to_save_and_exit
from services.node_agent.process.environment import program_environment
from services.node_agent.process.leftovers import Marks, end_strays, is_alive
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
from services.node_agent.process.zygote import RequestTooLongError, Zygote, ZygoteGoneError, boot_id, reason_text

START_TIMEOUT_SECONDS: Final = 30.0
DEFAULT_LOG_PIECE_BYTES: Final = 16 * 1024 * 1024
VOID: Final = b'{"void":true}\n'
E2BIG, EAGAIN = 7, 11


@dataclass(slots=True)
class _Watched:
    worker: RunningWorker
    directory: Path
    supervisor_pid: int
    supervisor_ticks: int
    pidfd: int = -1


@dataclass(frozen=True, slots=True)
class _Record:
    """What `state` says."""

    worker: RunningWorker
    supervisor_pid: int
    supervisor_ticks: int
    boot_id: str


class Supervisors:
    """`WorkerRuntime` over real processes. All methods belong to one event loop.

    Args:
        root: state directory; one agent at a time.
        log_piece_bytes: two pieces of this size are kept of each worker's output.
        lease_grace_seconds: from SIGTERM to SIGKILL when a lease has run out that was renewed without a grace.
        platform_env: variables for every worker, beside those of `environment.py`.
    """

    def __init__(
        self,
        root: Path,
        *,
        log_piece_bytes: int = DEFAULT_LOG_PIECE_BYTES,
        lease_grace_seconds: float = 10.0,
        platform_env: Mapping[str, str] | None = None,
    ) -> None:
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self._root = root.absolute()
        self._log_piece_bytes = log_piece_bytes
        self._lease_grace_ms = int(lease_grace_seconds * 1000)
        self._platform_env = dict(platform_env or {})
        self._root.mkdir(parents=True, exist_ok=True)
        self.zygote = Zygote(self._root / "supervisors.log")
        self._boot_id = boot_id()
        self._live: dict[tuple[str, WorkerKey], _Watched] = {}
        self._deadlines: dict[str, int] = {}
        self._graces_ms: dict[str, int] = {}
        self._ready_nodes: set[str] = set()
        self._cleaning: set[asyncio.Task[None]] = set()

    # -- launching

    async def launch(self, launch: WorkerLaunch) -> RunningWorker | StartRefused:
        """Start one program.

        Raises AlreadyLaunchedError when this worker has a directory: it runs, ran, or was given up here.
        """
        self._prepare(launch.node)
        directory = self._workers(launch.node) / launch.key.folder
        work_dir = directory / "work"
        try:
            directory.mkdir()
        except FileExistsError:
            raise AlreadyLaunchedError(launch.key.folder) from None
        work_dir.mkdir()
        control_dir = directory / "control"
        control_dir.mkdir()
        request = (
            str(directory),
            launch.cwd or str(work_dir),
            list(launch.argv),
            self._environment(launch, work_dir, control_dir),
            _spec(launch),
            str(self._lease_path(launch.node)),
            self._deadlines.get(launch.node, 0),
            self._graces_ms.get(launch.node, self._lease_grace_ms),
            int(launch.grace_seconds * 1000),
            self._log_piece_bytes,
            self._boot_id,
        )
        for _ in range(2):
            try:
                async with asyncio.timeout(START_TIMEOUT_SECONDS):
                    answer = await self.zygote.fork(request)
            except RequestTooLongError as error:
                return self._refused(launch, E2BIG, f"arguments and environment: {error}")
            except ZygoteGoneError:
                if not _claim(directory):  # a supervisor got as far as its record: the program runs, or has run
                    return self._take_over(launch, directory)
                (directory / "state").unlink()  # nobody is left who could have started it, so the next try may
                continue
            except TimeoutError:
                self.zygote.kill()
                answer = ("failed",)
            return self._answered(launch, directory, answer)
        return self._refused(launch, EAGAIN, "no supervisor could be made")

    def _environment(self, launch: WorkerLaunch, work_dir: Path, control_dir: Path) -> dict[str, str]:
        platform = {**self._platform_env, **launch.platform_env, "BERTH_CKPT_CONTROL": str(control_dir)}
        return program_environment(launch, work_dir=str(work_dir), platform=platform)

    def _answered(
        self, launch: WorkerLaunch, directory: Path, answer: tuple[object, ...]
    ) -> RunningWorker | StartRefused:
        match answer:
            case ("started", int(pid), int(), int(supervisor_pid), int(supervisor_ticks), int(started_at_ns)):
                worker = _running(launch, pid, started_at_ns)
                self._watch(_Watched(worker, directory, supervisor_pid, supervisor_ticks))
                return worker
            case ("refused", int(code), str(stage)):
                return self._refused(launch, code, reason_text(code, stage))
            case _:  # its supervisor broke, or nobody answers; if it may have started, its end is awaited
                if _claim(directory):
                    return self._refused(launch, EAGAIN, "supervisor failed, see supervisors.log")
                return self._take_over(launch, directory)

    def _take_over(self, launch: WorkerLaunch, directory: Path) -> RunningWorker | StartRefused:
        record = _read_state(directory, launch.node)
        if record is None:
            return self._refused(launch, EAGAIN, "no supervisor could be made")
        self._watch(_Watched(record.worker, directory, record.supervisor_pid, record.supervisor_ticks))
        return record.worker

    def _refused(self, launch: WorkerLaunch, code: int, reason: str) -> StartRefused:
        self._move_to_done(launch.key, launch.node)
        return StartRefused(launch.key, launch.node, launch.fence, code, reason)

    # -- watching

    def _watch(self, watched: _Watched) -> None:
        """Await the end of a supervisor. It may have ended already, and its pid may be another's by now."""
        self._live[watched.worker.node, watched.worker.key] = watched
        try:
            watched.pidfd = os.pidfd_open(watched.supervisor_pid)
        except ProcessLookupError:
            self._ended(watched)
            return
        if not is_alive(watched.supervisor_pid, watched.supervisor_ticks):
            self._ended(watched)
            return
        asyncio.get_running_loop().add_reader(watched.pidfd, self._ended, watched)

    def _ended(self, watched: _Watched) -> None:
        if watched.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(watched.pidfd)
            os.close(watched.pidfd)
            watched.pidfd = -1
        exit_ = _read_exit(watched.directory, watched.worker)
        if exit_ is not None:
            self._live.pop((watched.worker.node, watched.worker.key), None)
            self.exits.put_nowait(exit_)
            return
        task = asyncio.get_running_loop().create_task(self._end_lost(watched))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _end_lost(self, watched: _Watched) -> None:
        """A supervisor died without a word: end what it left, then say so."""
        await _end_strays_of(watched)
        self._live.pop((watched.worker.node, watched.worker.key), None)
        self.exits.put_nowait(_lost(watched.worker, "supervisor died"))

    # -- stopping and lease

    def stop(self, key: WorkerKey, node: str, *, grace_seconds: float, reason: str) -> bool:
        """Ask the program to save, then have its supervisor run the stop ladder.

        The ladder: SIGTERM to the group, after the grace SIGKILL to all descendants.
        """
        watched = self._live.get((node, key))
        if watched is None or watched.pidfd < 0:
            return watched is not None
        if reason not in NOT_WORTH_SAVING:
            ask_to_save_and_exit(
                watched.directory / "control",
                request_id=f"{key.folder}.stop",
                reason=reason,
                grace_seconds=grace_seconds,
                fence=watched.worker.fence,
            )
        (watched.directory / "stop").write_text(f"{int(grace_seconds * 1000)} {reason}")
        try:
            signal.pidfd_send_signal(watched.pidfd, signal.SIGTERM)
        except ProcessLookupError:
            pass  # it has just ended; the loop will hear of it
        return True

    def renew(self, node: str, deadline_boottime_ns: int, grace_seconds: float | None = None) -> None:
        """Write the node's deadline where its supervisors look; never moves back."""
        self._prepare(node)
        if deadline_boottime_ns <= self._deadlines.get(node, 0):
            return
        self._deadlines[node] = deadline_boottime_ns
        grace_ms = self._lease_grace_ms if grace_seconds is None else int(grace_seconds * 1000)
        self._graces_ms[node] = grace_ms
        path = self._lease_path(node)
        draft = path.with_suffix(".new")
        draft.write_text(f"{deadline_boottime_ns} {grace_ms}")
        draft.replace(path)

    # -- taking over

    async def adopt(self, node: str) -> Adoption:
        """Sort what the directories of `node` say into running, ended and never started.

        What runs without a supervisor is ended first and then counted as lost.
        """
        self._prepare(node)
        running: list[RunningWorker] = []
        ended: list[WorkerExit] = []
        never: list[WorkerKey] = []
        orphans: list[_Watched] = []
        for entry in sorted(os.scandir(self._workers(node)), key=lambda found: found.name):
            try:
                key = WorkerKey.from_folder(entry.name)
            except ValueError:
                continue
            directory = Path(entry.path)
            record = None if _claim(directory) else _read_state(directory, node)
            if record is None:
                never.append(key)
                self._move_to_done(key, node)
                continue
            watched = _Watched(record.worker, directory, record.supervisor_pid, record.supervisor_ticks)
            if exit_ := _read_exit(directory, record.worker):
                ended.append(exit_)
            elif self._still_supervised(record):
                self._watch(watched)
                running.append(record.worker)
            elif record.boot_id != self._boot_id:
                ended.append(_lost(record.worker, "machine restarted"))
            else:
                orphans.append(watched)
        for orphan in orphans:
            await _end_strays_of(orphan)
            exit_ = _read_exit(orphan.directory, orphan.worker)  # it may have ended between the two looks above
            ended.append(exit_ or _lost(orphan.worker, "supervisor died"))
        return Adoption(tuple(running), tuple(ended), tuple(never))

    def _still_supervised(self, record: _Record) -> bool:
        return record.boot_id == self._boot_id and is_alive(record.supervisor_pid, record.supervisor_ticks)

    # -- logs and folders

    def forget(self, key: WorkerKey, node: str) -> None:
        """Keep only the log, until `sweep` finds it too old."""
        if (node, key) not in self._live:
            self._move_to_done(key, node)

    def _move_to_done(self, key: WorkerKey, node: str) -> None:
        try:
            (self._workers(node) / key.folder).rename(self._done(node) / key.folder)
        except FileNotFoundError:
            pass  # done before
        except OSError:
            shutil.rmtree(self._workers(node) / key.folder, ignore_errors=True)  # its namesake is there already

    async def read_log(self, key: WorkerKey, node: str, *, offset: int, max_bytes: int) -> LogChunk:
        for folder in (self._workers(node), self._done(node)):
            try:
                return await asyncio.to_thread(logs.read_log, folder / key.folder, offset=offset, max_bytes=max_bytes)
            except FileNotFoundError:
                continue
        raise KeyError(key)

    def directory_of(self, key: WorkerKey, node: str) -> Path:
        """Where the records of a worker that is not forgotten lie."""
        return self._workers(node) / key.folder

    async def sweep(self, node: str, *, keep_seconds: float, keep_count: int) -> int:
        """Delete what was reported long ago, oldest first; returns how many."""
        return await asyncio.to_thread(_sweep, self._done(node), keep_seconds, keep_count)

    def _prepare(self, node: str) -> None:
        if node not in self._ready_nodes:
            self._workers(node).mkdir(parents=True, exist_ok=True)
            self._done(node).mkdir(exist_ok=True)
            self._ready_nodes.add(node)

    def _workers(self, node: str) -> Path:
        return self._root / node / "workers"

    def _done(self, node: str) -> Path:
        return self._root / node / "done"

    def _lease_path(self, node: str) -> Path:
        return self._root / node / "lease"

    # -- end

    def detach(self) -> None:
        """Let go of all watches at once; programs and their supervisors go on."""
        loop = asyncio.get_running_loop()
        for watched in self._live.values():
            if watched.pidfd >= 0:
                loop.remove_reader(watched.pidfd)
                os.close(watched.pidfd)
                watched.pidfd = -1
        self._live.clear()
        self.zygote.close()

    async def close(self) -> None:
        self.detach()
        for task in tuple(self._cleaning):
            task.cancel()
        await asyncio.gather(*self._cleaning, return_exceptions=True)


def _spec(launch: WorkerLaunch) -> str:
    uuids = json.dumps(list(launch.gpu_uuids))
    return f'{{"fence":{launch.fence},"gpu_uuids":{uuids},"extra":{launch.extra.decode()}}}'


def _running(launch: WorkerLaunch, pid: int, started_at_ns: int) -> RunningWorker:
    return RunningWorker(
        launch.key, launch.node, launch.fence, pid, started_at_ns, tuple(launch.gpu_uuids), json.loads(launch.extra)
    )


def _claim(directory: Path) -> bool:
    """Make the worker's record a void one; false if there is one. After that no supervisor lets a program go here."""
    draft = directory / f"state.void.{os.getpid()}"
    try:
        draft.write_bytes(VOID)
    except FileNotFoundError:  # given up and moved away before
        return True
    try:
        os.link(draft, directory / "state")
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _read_state(directory: Path, node: str) -> _Record | None:
    """None for a void record."""
    state = json.loads((directory / "state").read_bytes())
    if "void" in state:
        return None
    spec = state["spec"]
    worker = RunningWorker(
        key=WorkerKey.from_folder(directory.name),
        node=node,
        fence=spec["fence"],
        pid=state["pid"],
        started_at_ns=state["started_at_ns"],
        gpu_uuids=tuple(spec["gpu_uuids"]),
        extra=spec["extra"],
    )
    return _Record(worker, state["supervisor_pid"], state["supervisor_start_ticks"], state["boot_id"])


def _read_exit(directory: Path, worker: RunningWorker) -> WorkerExit | None:
    """None when there is no record, or (after a power loss) none that can be read."""
    try:
        record = json.loads((directory / "exit").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return WorkerExit(
        key=worker.key,
        node=worker.node,
        fence=worker.fence,
        exit_code=record["exit_code"],
        signal=record["signal"],
        out_of_memory=record["out_of_memory"],
        stop_reason=record["stop_reason"],
        used_sigkill=record["used_sigkill"],
        leftovers=record["leftovers"],
        started_at_ns=record["started_at_ns"],
        ended_at_ns=record["ended_at_ns"],
        cpu_us=record["user_us"] + record["system_us"],
        max_rss_kib=record["max_rss_kib"],
        log_bytes=record.get("log_bytes", 0),
        gpu_uuids=worker.gpu_uuids,
        extra=worker.extra,
    )


def _lost(worker: RunningWorker, why: str) -> WorkerExit:
    return WorkerExit(
        key=worker.key,
        node=worker.node,
        fence=worker.fence,
        exit_code=-1,
        is_lost=True,
        lost_reason=why,
        started_at_ns=worker.started_at_ns,
        ended_at_ns=time.time_ns(),
        gpu_uuids=worker.gpu_uuids,
        extra=worker.extra,
    )


async def _end_strays_of(watched: _Watched) -> int:
    marks = Marks(watched.supervisor_pid, watched.worker.pid, str(watched.directory / "work"))
    return await end_strays(marks, not_before_ticks=watched.supervisor_ticks)


def _sweep(done: Path, keep_seconds: float, keep_count: int) -> int:
    try:
        entries = sorted((entry.stat().st_mtime, entry.path) for entry in os.scandir(done))
    except FileNotFoundError:
        return 0
    oldest_kept = time.time() - keep_seconds
    surplus = len(entries) - keep_count
    doomed = [path for index, (mtime, path) in enumerate(entries) if index < surplus or mtime < oldest_kept]
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return len(doomed)
