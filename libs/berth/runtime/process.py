"""How a service process starts, stops and dies.

`run_service` gives every service the same life: checked settings, structured logs, tracing, health and metrics, a
task group in which nothing fails unseen, an orderly stop on SIGTERM or SIGINT within ten seconds, and an exit code
that tells the supervisor what happened:

    0   stopped when told, or its work was done
    1   crashed: a critical task failed or ended by itself
    70  did not stop in time and was cut off
    78  bad configuration
    or what the service chose by raising `ServiceExit`
"""

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final, Generic, NoReturn, TypeVar

from prometheus_client import CollectorRegistry

from berth.runtime import faults
from berth.runtime.health import Health
from berth.runtime.http import HealthServer
from berth.runtime.settings import BerthSettings, load_settings_or_exit
from berth.telemetry.logs import Logger, configure_logging, get_logger
from berth.telemetry.metrics import new_registry
from berth.telemetry.tracing import init_tracing, shutdown_tracing

STOP_SECONDS: Final = 10.0
EXIT_CRASHED: Final = 1
EXIT_NOT_STOPPED: Final = 70

S = TypeVar("S", bound=BerthSettings)


class ServiceExit(Exception):
    """Raised by a service to leave with a code of its own, such as after losing its leadership."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class CriticalTaskEnded(Exception):
    """A task that should run as long as the process has returned."""


class ServiceContext(Generic[S]):
    """What a service's `main` is given."""

    def __init__(self, service: str, settings: S, *, registry: CollectorRegistry, health: Health) -> None:
        self.service: Final = service
        self.settings: Final = settings
        self.registry: Final = registry
        self.health: Final = health
        self.log: Final[Logger] = get_logger(service)
        # Set first of all when the process is told to stop; loops that must finish a step watch it (`drain_seconds`).
        self.stopping: Final = asyncio.Event()
        self.port = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._spawned: set[asyncio.Task[None]] = set()

    def critical(self, name: str, work: Coroutine[object, object, object]) -> "asyncio.Task[None]":
        """Run `work` for as long as the process lives: if it fails or returns, the process dies."""
        return self._spawn(name, self._forever(name, work))

    def background(self, name: str, work: Coroutine[object, object, object]) -> "asyncio.Task[None]":
        """Run `work` beside `main`: it may return, but if it fails the process dies."""
        return self._spawn(name, _as_none(work))

    def started(self) -> None:
        """Say that the service is up. What was allocated so far stays, so the collector need not look at it again."""
        gc.collect()
        gc.freeze()
        self.log.info("service started", pid=os.getpid(), port=self.port)

    def cancel_spawned(self) -> None:
        for task in self._spawned:
            task.cancel()

    def _spawn(self, name: str, work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        if self._tasks is None:
            raise RuntimeError("tasks can only be started inside main")
        task = self._tasks.create_task(work, name=name)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)
        return task

    async def _forever(self, name: str, work: Coroutine[object, object, object]) -> None:
        await work
        if not self.stopping.is_set():
            raise CriticalTaskEnded(name)


Main = Callable[[ServiceContext[S]], Awaitable[None]]


def run_service(
    service: str,
    settings_type: type[S],
    main: Main[S],
    *,
    checks: tuple[str, ...] = (),
    drain_seconds: float = 0.0,
) -> NoReturn:
    """Run `main` as this process's service and leave with its exit code.

    Args:
        service: one word; names logs, spans, the run file and the process.
        settings_type: read from the environment.
        main: runs until cancelled; cleanup sits in its `finally` blocks. When it returns, the process ends with code 0.
        checks: names of readiness checks that `main` will report; not ready before each was reported good.
        drain_seconds: how long after the signal `main` may go on by itself (it watches `stopping`) before it is
            cancelled; 0 cancels at once.
    """
    settings = load_settings_or_exit(settings_type)
    configure_logging(service, settings.log_level)
    _name_process(f"berth-{service}")
    _tune_collector()
    log = get_logger(service)
    if settings.fault_point is not None:
        faults.arm(settings.fault_point)
        log.warning("fault point armed: this process will kill itself", fault_point=settings.fault_point)
    init_tracing(service, settings)
    try:
        code = _run(_live(service, settings, main, checks=checks, drain_seconds=min(drain_seconds, STOP_SECONDS / 2)))
    finally:
        shutdown_tracing(service)
    log.info("service ended", code=code)
    sys.stdout.flush()
    sys.stderr.flush()
    # Leaving through the interpreter's end would wait for threads that may hang (a query, a name lookup).
    os._exit(code)


def _run(life: Coroutine[object, object, int]) -> int:
    try:
        import uvloop
    except ImportError:  # not on every platform; slower, otherwise the same
        return asyncio.run(life)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(life)


async def _live(service: str, settings: S, main: Main[S], *, checks: tuple[str, ...], drain_seconds: float) -> int:
    """The whole life inside the loop; returns the exit code."""
    registry = new_registry()
    health = Health(service, checks=checks)
    context = ServiceContext(service, settings, registry=registry, health=health)
    try:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(
                HealthServer(
                    health,
                    registry,
                    host=settings.http_host,
                    port=settings.http_port,
                    run_file=settings.run_directory / f"{service}.json",
                )
            )
            context.port = server.port
            await _supervise(context, main, drain_seconds=drain_seconds)
    except Exception as error:
        return _exit_code(error, context.log)
    return 0


def _exit_code(error: BaseException, log: Logger) -> int:
    """Log why the service ended; a crash beside a chosen exit is a crash."""
    causes = _leaves(error)
    crashes = [cause for cause in causes if not isinstance(cause, ServiceExit)]
    for crash in crashes:
        log.error("service crashed", error=crash)
    if crashes:
        return EXIT_CRASHED
    leaving = next(cause for cause in causes if isinstance(cause, ServiceExit))
    log.warning("service leaves", code=leaving.code, reason=str(leaving))
    return leaving.code


async def _supervise(context: ServiceContext[S], main: Main[S], *, drain_seconds: float) -> None:
    loop = asyncio.get_running_loop()
    cut_off = _CutOff(STOP_SECONDS, context.log)
    async with asyncio.TaskGroup() as tasks:
        context._tasks = tasks
        body = tasks.create_task(_as_none(main(context)), name=f"{context.service} main")

        def stop(name: str) -> None:
            if context.stopping.is_set():
                return
            context.log.info("stopping", signal=name)
            context.stopping.set()
            context.health.stopping()
            cut_off.start()
            if drain_seconds > 0:
                loop.call_later(drain_seconds, body.cancel)
            else:
                body.cancel()

        for sign in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sign, stop, sign.name)
        if context.settings.faults_on_signal:
            loop.add_signal_handler(signal.SIGUSR1, _arm_from_file, context)
        try:
            await asyncio.wait([body])
        finally:
            # `main` is over: what it started goes with it. Its own failure is raised by the group.
            context.stopping.set()
            context.cancel_spawned()
            cut_off.start()


def _arm_from_file(context: ServiceContext[S]) -> None:
    """Arm the fault point that a test has written; what cannot be read disarms."""
    path = context.settings.run_directory / f"{context.service}.fault"
    try:
        faults.arm(path.read_text().strip())
    except (OSError, ValueError) as error:
        faults.arm(None)
        context.log.warning("no fault point armed", file=str(path), reason=str(error))
        return
    context.log.warning("fault point armed: this process will kill itself", fault_point=path.read_text().strip())


async def _as_none(work: Awaitable[object]) -> None:
    await work


class _CutOff:
    """Leaves hard if the orderly way takes too long; a thread, because the loop itself may be what hangs."""

    def __init__(self, seconds: float, log: Logger) -> None:
        self._seconds = seconds
        self._log = log
        self._is_started = False

    def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            timer = threading.Timer(self._seconds, self._leave)
            timer.daemon = True
            timer.start()

    def _leave(self) -> None:
        self._log.error("did not stop in time, leaving now", seconds=self._seconds)
        os._exit(EXIT_NOT_STOPPED)


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


def _name_process(title: str) -> None:
    """Shown by `ps -o comm` and `top`; Linux keeps 15 characters. A dependency just for this is not worth it."""
    try:
        Path("/proc/self/comm").write_text(title[:15])
    except OSError:
        pass


def _tune_collector() -> None:
    # The default young threshold of 700 makes full collections frequent in processes that hold large long-lived state.
    gc.set_threshold(50_000, 20, 100)
