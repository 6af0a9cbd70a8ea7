"""A PostgreSQL server of our own: made, started, found again, stopped.

The database is the truth of the whole platform, so this server is set up for durability first: data checksums,
`synchronous_commit`, stopped by the fast shutdown and never by SIGKILL. It listens on loopback and on a unix socket,
asks everybody for a password, and keeps its port while nobody else took it.

Layout below `home`: `data/` (or `location`, naming the folder outside when the server's account cannot reach `home`),
`postgres.log`, `credentials.json` (0600), `port`, `lock`, and `socket` when the path of the data is too long for one.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self, TypedDict
from urllib.parse import quote

from berth.embedded.accounts import Account, account_of, can_reach, server_account
from berth.embedded.errors import ServerDidNotStart, ServerDidNotStop
from berth.embedded.pginstall import postgres_bin, shared_home

HOST = "127.0.0.1"
ADMIN = "berth_admin"
DATABASE = "berth"
MAX_SOCKET_PATH = 90  # of 107 bytes; the file name in it takes the rest
MAX_LOG_BYTES = 20_000_000
START_TIMEOUT_S = 60.0  # crash recovery of 2 GB of log on a slow disk
FAST_STOP_S = 60.0
IMMEDIATE_STOP_S = 10.0
PORT_ATTEMPTS = 5

INITDB_OPTIONS = (
    *("--auth=scram-sha-256", "--encoding=UTF8", "--data-checksums", "--no-sync", "--no-instructions"),
    *("--locale=C.UTF-8", "--locale-provider=builtin", "--builtin-locale=C.UTF-8"),
)

SETTINGS: Mapping[str, str] = {
    "listen_addresses": HOST,
    "max_connections": "100",
    # Smaller ones make connections write pages out themselves: an eighth of the CPU time of all PostgreSQL under load.
    "shared_buffers": "192MB",
    "synchronous_commit": "on",
    "jit": "off",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "password_encryption": "scram-sha-256",
    # A leader that vanished must not keep its lock: noticed within 11-15 s instead of two hours.
    "idle_in_transaction_session_timeout": "30s",
    "lock_timeout": "5s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "2",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "10s",
    "client_connection_check_interval": "500ms",
    # Every statement here is short: helper processes and parallel plans would only cost start time and memory.
    "io_method": "sync",
    "max_worker_processes": "2",
    "max_parallel_workers_per_gather": "0",
    "max_logical_replication_workers": "0",
    "max_wal_senders": "4",
    "update_process_title": "off",
    # Hints to the kernel to write other pages out early are calls to the disk that nothing here needs.
    "bgwriter_flush_after": "0",
    "autovacuum_naptime": "15s",
    "autovacuum_vacuum_cost_limit": "1000",
    "log_line_prefix": "%m [%p] %a ",
    "log_checkpoints": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


@dataclass(frozen=True, slots=True)
class _Running:
    pid: int
    port: int
    socket_dir: str
    is_ready: bool


class PostgresServer:
    """One server and its data. Several of these, in this process or others, may name the same `home`."""

    def __init__(self, home: Path | str, port: int | None = None, *, settings: Mapping[str, str] | None = None) -> None:
        """Name a server; nothing is touched before `start`.

        Args:
            home: folder of this server, made when missing.
            port: loopback port; None keeps the last one while it is free, else takes a free one.
            settings: server settings on top of `SETTINGS`, for tests.
        """
        self.home = Path(home).absolute()
        self._wanted_port = port
        self._settings = {**SETTINGS, **(settings or {})}
        self._process: subprocess.Popen[bytes] | None = None

    # --- what it is -------------------------------------------------------------------------------------------------

    @property
    def log_path(self) -> Path:
        return self.home / "postgres.log"

    @property
    def credentials_path(self) -> Path:
        return self.home / "credentials.json"

    @property
    def data_dir(self) -> Path:
        """Where the data is; outside `home` when the server's account cannot reach it."""
        pointer = self.home / "location"
        if pointer.exists():
            return Path(pointer.read_text().strip())
        return self.home / "data"

    @property
    def pid(self) -> int | None:
        """The process that works on this data now, whoever started it; also while it starts or stops."""
        running = self._process_at_work()
        return running.pid if running else None

    @property
    def port(self) -> int:
        running = self._process_at_work()
        return running.port if running else int((self.home / "port").read_text())

    def dsn(
        self, database: str = DATABASE, *, user: str | None = None, password: str | None = None, tcp: bool = False
    ) -> str:
        """A connection string; for the administrator unless `user` is given, over the unix socket unless `tcp`.

        The socket costs about a fifth less time in a round trip.
        """
        if user is None:
            known = json.loads(self.credentials_path.read_text())
            user, password = known["user"], known["password"]
        who = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
        running = self._process_at_work()
        if tcp or running is None:
            return f"postgresql://{who}@{HOST}:{self.port}/{database}"
        return f"postgresql://{who}@/{database}?host={quote(running.socket_dir, safe='')}&port={running.port}"

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self, *, detached: bool = False) -> Self:
        """Have the server running and ready; at once when it already is. The first start makes the data.

        Args:
            detached: the server outlives this process; otherwise it is told to stop when this process ends.

        Raises:
            ServerDidNotStart: with the end of its log.
        """
        with self._locked():
            if self._is_ready_in_the_end():
                return self
            if not (self.data_dir / "PG_VERSION").exists():
                self._make_data()
            self._launch(detached=detached)
        return self

    def stop(self) -> None:
        """Stop by the fast shutdown: open transactions are rolled back, everything committed is on disk.

        Raises:
            ServerDidNotStop: neither the fast nor the immediate shutdown ended it. It is never killed from here.
        """
        if not self.home.exists():
            return
        with self._locked():
            running = self._process_at_work()
            if running is None:
                return
            for how, patience_s in ((signal.SIGINT, FAST_STOP_S), (signal.SIGQUIT, IMMEDIATE_STOP_S)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.pid, how)
                if self._ended(running.pid, patience_s):
                    return
            raise ServerDidNotStop("postgres", running.pid, FAST_STOP_S + IMMEDIATE_STOP_S)

    def kill(self) -> None:
        """Kill the server and its children as a power cut would. For tests of recovery."""
        running = self._process_at_work()
        if running is None:
            return
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        for pid in (running.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in (running.pid, *map(int, children)):
            self._ended(pid, 5.0)

    def destroy(self) -> None:
        """Stop and remove the data for good, also where it lies outside `home`."""
        self.stop()
        data, sockets = self.data_dir, self._kept_socket_dir()
        shutil.rmtree(data, ignore_errors=True)
        if sockets is not None:
            shutil.rmtree(sockets, ignore_errors=True)
        if data.parent != self.home:
            with contextlib.suppress(OSError):
                data.parent.rmdir()
                data.parent.parent.rmdir()  # the shared home, when nothing else lives there
        shutil.rmtree(self.home, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- making the data --------------------------------------------------------------------------------------------

    def _make_data(self) -> None:
        account = server_account()
        data = self._choose_place(account)
        unfinished = data.with_name(data.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        os.chown(unfinished, account.uid, account.gid)
        programs = postgres_bin(account)
        password = self._password()
        with _readable_by(account, password, unfinished.parent) as password_file:
            where = ["-D", str(unfinished), "-U", ADMIN, f"--pwfile={password_file}"]
            self._tool(account, [programs / "initdb", *where, *INITDB_OPTIONS])
        # Before the one sync below nothing needs to be safe, so the database is made without syncing either (-F).
        self._tool(
            account,
            [programs / "postgres", "--single", "-F", "-D", unfinished, "postgres"],
            stdin=f"CREATE DATABASE {DATABASE}\n",
        )
        self._tool(account, [programs / "initdb", "--sync-only", "-D", unfinished])
        unfinished.rename(data)

    def _choose_place(self, account: Account) -> Path:
        pointer = self.home / "location"
        if can_reach(self.home, account) or pointer.exists():
            return self.data_dir
        folder = Path(tempfile.mkdtemp(prefix="postgres-", dir=shared_home()))
        os.chown(folder, account.uid, account.gid)
        _write(pointer, str(folder / "data"))
        return self.data_dir

    def _password(self) -> str:
        if self.credentials_path.exists():  # left by an unfinished start
            return str(json.loads(self.credentials_path.read_text())["password"])
        password = secrets.token_urlsafe(24)
        _write(self.credentials_path, json.dumps({"user": ADMIN, "password": password}), mode=0o600)
        return password

    def _tool(self, account: Account, command: Sequence[str | Path], *, stdin: str = "") -> None:
        done = subprocess.run(
            list(map(str, command)),
            input=stdin.encode(),
            capture_output=True,
            check=False,
            timeout=START_TIMEOUT_S,
            cwd="/",
            env=_environment(),
            **_as(account),
        )
        if done.returncode != 0:
            said = (done.stdout + done.stderr).decode(errors="replace")
            raise ServerDidNotStart(str(command[0]), self.log_path, said[-2000:])

    # --- starting ---------------------------------------------------------------------------------------------------

    def _launch(self, *, detached: bool) -> None:
        account = account_of(self.data_dir)
        programs = postgres_bin(account)
        self._forget_stale_pid_file()
        for attempt in range(PORT_ATTEMPTS):
            port = self._choose_port(fresh=attempt > 0)
            with self._open_log() as log:
                began = log.tell()
                self._process = subprocess.Popen(
                    [programs / "postgres", "-D", self.data_dir, *self._arguments(port, account)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C in the terminal must not stop the database before its clients
                    preexec_fn=None if detached else _stop_with_starter,  # noqa: PLW1509 - one system call, no locks
                    **_as(account),
                )
            if self._ready(self._process):
                _write(self.home / "port", str(port))
                return
            tail = self._log_since(began)
            if "could not bind" not in tail or self._wanted_port is not None:
                break  # only a port lost between choosing and binding is worth another try
        raise ServerDidNotStart("postgres", self.log_path, tail[-2000:])

    def _arguments(self, port: int, account: Account) -> list[str]:
        chosen = {**self._settings, "port": str(port), "unix_socket_directories": str(self._socket_dir(account))}
        return [part for name, value in chosen.items() for part in ("-c", f"{name}={value}")]

    def _choose_port(self, *, fresh: bool) -> int:
        if self._wanted_port is not None:
            return self._wanted_port
        kept = self.home / "port"
        if kept.exists() and not fresh and _is_free(int(kept.read_text())):
            return int(kept.read_text())
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            return int(probe.getsockname()[1])

    def _socket_dir(self, account: Account) -> Path:
        """The data folder itself, or a folder in /tmp when its path is too long for a socket's address."""
        if len(os.fsencode(self.data_dir)) <= MAX_SOCKET_PATH:
            return self.data_dir
        folder = self._kept_socket_dir()
        if folder is None or account_of(folder).uid != account.uid:
            folder = Path(tempfile.mkdtemp(prefix="berth-pg-", dir="/tmp"))
            os.chown(folder, account.uid, account.gid)
            _write(self.home / "socket", str(folder))
        return folder

    def _kept_socket_dir(self) -> Path | None:
        """The folder of an earlier start; none when it is gone or no longer a folder (anybody may write to /tmp)."""
        kept = self.home / "socket"
        if not kept.exists():
            return None
        folder = Path(kept.read_text().strip())
        return folder if folder.is_dir() and not folder.is_symlink() else None

    def _ready(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the server says that it takes connections; False when it ended instead."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline:
            running = self._process_at_work()
            if running is not None and running.pid == process.pid and running.is_ready and _accepts(running.port):
                return True
            time.sleep(0.01)
        return False

    def _open_log(self) -> BinaryIO:
        if self.log_path.exists() and self.log_path.stat().st_size > MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        return self.log_path.open("ab")

    def _log_since(self, offset: int) -> str:
        with self.log_path.open("rb") as log:
            log.seek(offset)
            return log.read().decode(errors="replace")

    # --- looking ----------------------------------------------------------------------------------------------------

    def _process_at_work(self) -> _Running | None:
        """What `postmaster.pid` says, when its process lives and works on this data."""
        try:
            lines = (self.data_dir / "postmaster.pid").read_text().splitlines()
            pid, port, socket_dir = int(lines[0]), int(lines[3]), lines[4]
        except (FileNotFoundError, IndexError, ValueError):
            return None
        if not _serves(pid, self.data_dir):
            return None
        return _Running(pid, port, socket_dir, is_ready=len(lines) > 7 and lines[7].strip() == "ready")

    def _is_ready_in_the_end(self) -> bool:
        """Whether a server of this data takes connections, after waiting for one that just starts or stops."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (running := self._process_at_work()) is not None and time.monotonic() < deadline:
            if running.is_ready:
                return True
            time.sleep(0.02)
        return False

    def _forget_stale_pid_file(self) -> None:
        """Remove a pid file whose number now belongs to a process that is no server of this data.

        PostgreSQL clears up after a dead process itself, but takes any living one for its other self; in a container
        the numbers repeat at every start.
        """
        path = self.data_dir / "postmaster.pid"
        try:
            pid = int(path.read_text().split("\n", 1)[0])
        except (FileNotFoundError, ValueError):
            return
        if _lives(pid) and not _serves(pid, self.data_dir):
            path.unlink()

    def _ended(self, pid: int, patience_s: float) -> bool:
        """Wait for the end of process `pid`, our child or not."""
        if self._process is not None and self._process.pid == pid:
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                return False
            return True
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a system, without process handles
            handle = os.pidfd_open(pid)
            try:
                return bool(select.select([handle], [], [], patience_s)[0])
            finally:
                os.close(handle)
        while _lives(pid):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One starter or stopper at a time, over all processes."""
        self.home.mkdir(mode=0o755, parents=True, exist_ok=True)
        with (self.home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class _Identity(TypedDict, total=False):
    user: int
    group: int
    extra_groups: list[int]


def _as(account: Account) -> _Identity:
    """Arguments of `subprocess` that start a program under `account`; none when that is who we are."""
    if account.uid == os.geteuid():
        return {}
    return {"user": account.uid, "group": account.gid, "extra_groups": []}


def _environment() -> dict[str, str]:
    """What the programs may see of ours: no PG* variable, no secrets that came in for Berth."""
    return {"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LC_ALL": "C"}


def _stop_with_starter() -> None:
    """Run in the child: ask the kernel for SIGINT, the fast shutdown, when the starting thread ends. Linux only."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGINT))  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def _readable_by(account: Account, text: str, folder: Path) -> Iterator[Path]:
    """A file that only `account` may read, for as long as the block runs."""
    handle, name = tempfile.mkstemp(dir=folder)
    try:
        os.write(handle, text.encode())
        os.fchown(handle, account.uid, account.gid)
        yield Path(name)
    finally:
        os.close(handle)
        Path(name).unlink()


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace a file in one step, with its mode from the first byte on."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w") as file:
        os.fchmod(handle, mode)
        file.write(text)
    Path(name).replace(path)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: closing pairs do not count
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1.0):
            return True
    except OSError:
        return False


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return True


def _serves(pid: int, data_dir: Path) -> bool:
    """Whether process `pid` lives and works in `data_dir`, as every PostgreSQL process does from its start."""
    if not _lives(pid):
        return False
    try:
        return Path(f"/proc/{pid}/cwd").readlink() == data_dir.resolve()
    except PermissionError:
        return True  # someone else's process: `postmaster.pid` is all we have
    except OSError:
        return not Path("/proc/self").exists()
