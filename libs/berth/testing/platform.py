"""A whole embedded platform for tests: in a home of its own, reached as users reach it, gone at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from berth.embedded.commands import start, stop
from berth.embedded.layout import Layout
from berth.embedded.nats import NatsServer
from berth.embedded.postgres import PostgresServer
from berth.embedded.supervisor import PlatformSettings, PlatformState, read_state
from berth.testing.places import memory_dir

POLICY = Path(__file__).resolve().parents[3] / "policies" / "default.yaml"


@dataclass(frozen=True, slots=True)
class TestPlatform:
    """A platform that was started. Processes are looked up anew each time: its supervisor replaces them."""

    __test__ = False

    layout: Layout
    settings: PlatformSettings

    @property
    def state(self) -> PlatformState:
        """What its supervisor says of it now."""
        found = read_state(self.layout)
        assert found is not None, f"no platform in {self.layout.home}"
        return found

    @property
    def url(self) -> str:
        """Address of the API."""
        return self.state.url

    @property
    def token(self) -> str:
        """The operator's token."""
        return self.layout.token_file.read_text().strip()

    @property
    def nats(self) -> NatsServer:
        """Its bus, whoever started it."""
        return NatsServer(self.layout.home / "nats", credentials=self.layout.run / "credentials")

    @property
    def postgres(self) -> PostgresServer:
        """Its database, whoever started it."""
        return PostgresServer(self.layout.home / "postgres")

    def pid(self, service: str) -> int:
        """The process of a service, 0 where there is none."""
        return self.state.processes.get(service, 0)

    def up(self) -> None:
        """Start it, or start it again with its data.

        Raises:
            AssertionError: it did not; with the ends of its logs.
        """
        state = start(self.layout, self.settings)
        assert state.state == "running", f"{state.state} {state.message}\n{self.log_ends()}"

    def down(self) -> None:
        """Stop it and wait until it is gone."""
        stop(self.layout)

    def processes(self) -> dict[int, str]:
        """Every process that belongs to it, by its home on the command line or in the environment: pid -> command."""
        return processes_of(self.layout.home)

    def log_ends(self, lines: int = 12) -> str:
        """The last lines of every log, for the message of a failed test."""
        parts = []
        for path in sorted(self.layout.logs.glob("*.log")):
            end = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *end]))
        return "\n".join(parts)


def processes_of(home: Path) -> dict[int, str]:
    """Processes that name `home` on their command line, in their environment or as their working directory."""
    mark = os.fsencode(home)
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            inside = os.fsencode((entry / "cwd").readlink()).startswith(mark)
            if inside or mark in command or mark in (entry / "environ").read_bytes():
                found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def wait_until(holds: Callable[[], bool], seconds: float, what: str | Callable[[], str]) -> None:
    """Poll a fact about other processes, which nobody announces.

    Raises:
        AssertionError: it does not hold after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what() if callable(what) else what}")
        time.sleep(0.03)


@contextlib.contextmanager
def temporary_home(prefix: str = "berth-test-") -> Iterator[Path]:
    """A folder in memory where the machine offers it, which the database's account can reach."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=memory_dir(), ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        yield Path(folder) / "home"


@contextlib.contextmanager
def embedded_platform(
    fleet: str, *, home: Path | None = None, environment: dict[str, str] | None = None, pool: str = "default"
) -> Iterator[TestPlatform]:
    """A running platform; stopped at the end, with nothing left of it however the test ended."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(temporary_home()) if home is None else home
        settings = PlatformSettings(
            pool=pool, fleet=fleet, environment={"BERTH_POLICY_FILE": str(POLICY), **(environment or {})}
        )
        platform = TestPlatform(Layout(place), settings)
        try:
            platform.up()
            yield platform
        finally:
            platform.down()
            kill_left(platform)
            if home is None:
                platform.postgres.destroy()


def kill_left(platform: TestPlatform) -> dict[int, str]:
    """End what a stopped platform left behind, so that one failed test does not disturb the next; what it was."""
    left = platform.processes()
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return left


def health_port(layout: Layout, service: str) -> int:
    """Where a service tells its health and metrics."""
    return int(json.loads(layout.service_file(service).read_text())["port"])
