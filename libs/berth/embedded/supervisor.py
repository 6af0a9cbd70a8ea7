"""Keeps an embedded platform running: starts its parts in order, restarts what dies, stops all of it.

`python -m berth.embedded.supervisor HOME` is started by `berth up` and lives until `berth down`. It is the only parent
of the services, so an ended process is noticed at once; NATS and PostgreSQL are detached and looked at once a second.
What it knows is in `run/platform.json`, replaced at each change, for `berth status` and for whoever comes after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from berth.embedded.layout import SERVICES, Layout
from berth.embedded.leftovers import end_work
from berth.embedded.ports import HOST, hold_port

READY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 12.0
FIRST_RESTART_SECONDS: Final = 0.1
LAST_RESTART_SECONDS: Final = 5.0
STEADY_SECONDS: Final = 20.0
"""A service that ran for so long is restarted at once."""


@dataclass(frozen=True, slots=True)
class PlatformSettings:
    """What `berth up` was asked for.

    fleet: simulated nodes, `name=4xA100-40G:pcie` separated by commas; `nvml`: this machine's own cards.
    store: empty, or a folder in memory for the bus and the database (benches).
    environment: more BERTH_* variables for every service.
    """

    pool: str = "default"
    fleet: str = ""
    http_port: int = 0
    store: str = ""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class PlatformState:
    """What `run/platform.json` says. state: starting, running, stopping, stopped, failed."""

    state: str = "starting"
    pid: int = 0
    started_at: float = 0.0
    ready_at: float = 0.0
    url: str = ""
    nats_url: str = ""
    message: str = ""
    processes: dict[str, int] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def read_state(layout: Layout) -> PlatformState | None:
    """The last word of a supervisor; None: there never was one here."""
    try:
        return PlatformState(**json.loads(layout.state_file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def is_supervised(layout: Layout) -> bool:
    """Whether a supervisor lives: it holds the lock."""
    try:
        with layout.lock_file.open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


class _Service:
    """One process and its restarts."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.started = 0.0


class Supervisor:
    """Runs one platform in this process."""

    def __init__(self, layout: Layout, settings: PlatformSettings) -> None:
        self.layout = layout
        self.settings = settings
        self.state = PlatformState(pid=os.getpid(), started_at=time.time(), settings=asdict(settings))
        self._services = {name: _Service(name) for name in SERVICES}
        self._environment: dict[str, str] = {}
        self._dsns: dict[str, str] = {}
        self._is_stopping = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._held_ports: list[socket.socket] = []

    async def run(self) -> int:
        """Start, keep running, stop. The exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._is_stopping.set)
        self._write()
        try:
            await self._start()
            await self._is_stopping.wait()
            self._say("stopping")
            await self._stop()
            self._say("stopped")
            return 0
        except Exception as error:
            self._say("failed", message=f"{type(error).__name__}: {error}")
            self._is_stopping.set()
            await self._stop()
            raise

    # --- starting ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        from berth.embedded.servers import hold_server_ports, start_servers

        self._held_ports += await asyncio.to_thread(hold_server_ports, self.layout, self.settings)
        servers = await start_servers(self.layout, self.settings)
        self.state.nats_url = servers.nats_url
        self._dsns = servers.dsns
        self._make_tokens()
        self._hold_api_port()
        self._environment = self._common_environment()
        tasks = [self._spawn(service) for service in self._services.values()]
        await asyncio.gather(*tasks)
        self._keepers = [asyncio.create_task(self._keep(service)) for service in self._services.values()]
        self._keepers.append(asyncio.create_task(self._keep_servers()))
        await self._until_ready()
        self.state.ready_at = time.time()
        self._say("running")

    def _make_tokens(self) -> None:
        for path in (self.layout.token_file, self.layout.internal_token_file):
            if not path.exists():
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w") as file:
                    file.write(f"berth-{secrets.token_urlsafe(32)}\n")

    def _common_environment(self) -> dict[str, str]:
        kept = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
        kept_berth = {k: v for k, v in os.environ.items() if k.startswith("BERTH_") and k != "BERTH_HOME"}
        return {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "PYTHONUNBUFFERED": "1",
            **kept_berth,
            "BERTH_HOME": str(self.layout.home),
            "BERTH_POOL": self.settings.pool,
            "BERTH_NATS_URL": self.state.nats_url,
            **self.settings.environment,
        }

    def _environment_of(self, service: str) -> dict[str, str]:
        own = {"BERTH_HTTP_PORT": "0"}
        bus_user = "fleet" if service == "node_agent" else service
        own["BERTH_NATS_CREDENTIALS_FILE"] = str(self.layout.run / "credentials" / f"{bus_user}.nk")
        if service in self._dsns:
            own["BERTH_POSTGRES_DSN"] = self._dsns[service]
        if service == "gateway":
            own["BERTH_API_PORT"] = self.state.url.rpartition(":")[2]
            own["BERTH_ADMIN_TOKEN_FILE"] = str(self.layout.token_file)
            own["BERTH_INTERNAL_TOKEN_FILE"] = str(self.layout.internal_token_file)
        if service == "node_agent":
            own["BERTH_NODES"] = self.settings.fleet
            own["BERTH_PROGRAM_PATH"] = f"{sys.prefix}/bin:{_PROGRAM_PATH}"
        if self.state.url:
            own["BERTH_OTLP_ENDPOINT"] = f"{self.state.url}/v1/traces"
            own["BERTH_OTLP_TOKEN_FILE"] = str(self.layout.internal_token_file)
        return {**self._environment, **own}

    def _hold_api_port(self) -> None:
        """Take the gateway's port for as long as this platform runs, so that addresses people noted keep working.

        The last one while it is free, else any other.
        """
        noted = self.layout.run / "api-port"
        try:
            last = int(noted.read_text())
        except (FileNotFoundError, ValueError):
            last = 0
        chosen = self.settings.http_port
        holder = hold_port(chosen) if chosen else hold_port(last, is_wish=True)
        self._held_ports.append(holder)
        port = int(holder.getsockname()[1])
        noted.write_text(str(port))
        self.state.url = f"http://{HOST}:{port}"

    async def _spawn(self, service: _Service) -> None:
        self.layout.service_file(service.name).unlink(missing_ok=True)
        with self.layout.log_file(service.name).open("ab") as log:
            service.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"services.{service.name}",
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment_of(service.name),
                start_new_session=True,
                cwd=str(self.layout.home),
            )
        service.started = time.monotonic()
        self.state.processes[service.name] = service.process.pid
        self._write()

    async def _until_ready(self) -> None:
        from berth.embedded.probe import wait_ready

        waiting = asyncio.ensure_future(wait_ready(self.layout, SERVICES, READY_SECONDS))
        stopping = asyncio.ensure_future(self._is_stopping.wait())
        done, _ = await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if waiting in done:
            await waiting
        else:
            waiting.cancel()

    # --- keeping ----------------------------------------------------------------------------------------------------

    async def _keep(self, service: _Service) -> None:
        delay = FIRST_RESTART_SECONDS
        while True:
            assert service.process is not None
            code = await service.process.wait()
            if self._is_stopping.is_set():
                return
            lived = time.monotonic() - service.started
            delay = FIRST_RESTART_SECONDS if lived >= STEADY_SECONDS else min(delay * 2, LAST_RESTART_SECONDS)
            service.restarts += 1
            self.state.restarts[service.name] = service.restarts
            print(f"{service.name} ended with {code} after {lived:.1f} s; starting it again", flush=True)
            if code == _BAD_CONFIGURATION:
                delay = LAST_RESTART_SECONDS
            await asyncio.sleep(delay)
            while not self._is_stopping.is_set():
                try:
                    await self._spawn(service)
                    break
                except OSError as error:  # no process or no log file to be had just now
                    print(f"cannot start {service.name}: {error}", flush=True)
                    await asyncio.sleep(LAST_RESTART_SECONDS)

    async def _keep_servers(self) -> None:
        from berth.embedded.servers import keep_servers

        while not self._is_stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), 0.5)
                return
            try:
                for name in await keep_servers(self.layout, self.settings):
                    self.state.restarts[name] = self.state.restarts.get(name, 0) + 1
                    print(f"{name} had ended; started it again", flush=True)
                    self._write()
            except Exception as error:
                print(f"cannot start a server again: {error}", flush=True)

    # --- stopping ---------------------------------------------------------------------------------------------------

    async def _stop(self) -> None:
        from berth.embedded.servers import stop_servers

        # First nothing may be started again: what a keeper has begun to start is ended with it.
        for task in self._keepers:
            task.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        # The agent goes first and ends its work, while there is a platform to report to.
        await self._end(self._services["node_agent"], signal.SIGINT)
        await asyncio.to_thread(end_work, self.layout.nodes)  # where the agent was not there, or was cut off
        await asyncio.gather(*(self._end(s, signal.SIGTERM) for s in self._services.values() if s.name != "node_agent"))
        await stop_servers(self.layout, self.settings)

    async def _end(self, service: _Service, number: signal.Signals) -> None:
        process = service.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            print(f"{service.name} did not stop within {STOP_SECONDS:.0f} s; killed", flush=True)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self.state.processes.pop(service.name, None)

    # --- telling ----------------------------------------------------------------------------------------------------

    def _say(self, state: str, message: str = "") -> None:
        self.state.state = state
        self.state.message = message
        print(f"platform {state} {message}".rstrip(), flush=True)
        self._write()

    def _write(self) -> None:
        new = self.layout.state_file.with_suffix(".new")
        new.write_text(json.dumps(asdict(self.state), indent=1))
        new.replace(self.layout.state_file)


_PROGRAM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_BAD_CONFIGURATION: Final = 78


def hold_lock(layout: Layout) -> IO[str] | None:
    """Take the platform's lock for the life of this process; None: another one has it."""
    layout.run.mkdir(parents=True, exist_ok=True)
    lock = layout.lock_file.open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def parse_environment(text: str) -> Mapping[str, Any]:
    """The settings handed over by `berth up`."""
    parsed: Mapping[str, Any] = json.loads(text)
    return parsed


def main() -> None:
    """`python -m berth.embedded.supervisor HOME SETTINGS_JSON`."""
    layout = Layout(Path(sys.argv[1]))
    settings = PlatformSettings(**parse_environment(sys.argv[2]))
    lock = hold_lock(layout)
    if lock is None:
        print("another supervisor runs here", flush=True)
        sys.exit(3)
    for folder in (layout.logs, layout.nodes):
        folder.mkdir(parents=True, exist_ok=True)
    sys.exit(asyncio.run(Supervisor(layout, settings).run()))


if __name__ == "__main__":
    main()
