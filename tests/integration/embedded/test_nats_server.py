"""The embedded NATS server: keys, restarts, detachment."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import psutil
import pytest

from berth.bus import Connection, Outgoing, Publisher, Puller
from berth.bus.permissions import PROVISIONER
from berth.bus.provision import EVENTS, berth_topology, ensure_service_consumer, provision
from berth.embedded.nats import NatsServer, NatsServerError, find_nats_server, generate_credentials


def test_server_binary_is_found() -> None:
    assert find_nats_server().is_file()


def test_keys_are_secret_and_made_once(tmp_path: Path) -> None:
    first = generate_credentials(tmp_path / "keys")
    again = generate_credentials(tmp_path / "keys")

    assert first == again
    assert len(set(first.public_keys.values())) == len(first.public_keys)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    for path in first.seed_files.values():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_text().startswith("SU")


async def test_no_secret_is_in_the_server_configuration(tmp_path: Path) -> None:
    async with NatsServer(tmp_path) as server:
        config = (tmp_path / "nats.json").read_text()
        assert not any(path.read_text().strip() in config for path in server.credentials.seed_files.values())


async def test_data_and_address_survive_a_graceful_stop(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    url = server.url
    async with Connection(server.settings(PROVISIONER)) as admin:
        await provision(admin, berth_topology({"audit": []}))
    async with Connection(server.settings("lifecycle")) as bus:
        await Publisher(bus).publish([Outgoing("berth.evt.default.job.j1.running", b"{}", "j1.1")], 5)
    await server.stop()
    assert server.pid is None

    async with NatsServer(tmp_path) as again:
        assert again.url == url
        async with Connection(again.settings("audit")) as bus:
            await ensure_service_consumer(bus, "audit", [])  # consumers live in memory: each service makes its own anew
            async with Puller(bus, EVENTS, "audit") as puller:
                assert [message.subject for message in await puller.next(5)] == ["berth.evt.default.job.j1.running"]


async def test_detached_server_is_found_and_stopped_by_a_later_starter(tmp_path: Path) -> None:
    pid = await NatsServer(tmp_path).start(detached=True)
    later = NatsServer(tmp_path)
    try:
        assert later.pid == pid
        assert await later.start() == pid
        assert psutil.pid_exists(pid)
    finally:
        await later.stop()
    assert later.pid is None
    await later.stop()


async def test_pid_file_of_a_crashed_server_misleads_nobody(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    await server.start()
    await server.kill()
    (tmp_path / "nats.pid").write_text(str(psutil.Process().pid))

    assert NatsServer(tmp_path).pid is None
    async with NatsServer(tmp_path) as again:
        assert again.pid != psutil.Process().pid


async def test_start_is_quick(tmp_path: Path) -> None:
    started = time.monotonic()
    async with NatsServer(tmp_path):
        assert time.monotonic() - started < 5


async def test_failed_start_names_the_log(tmp_path: Path) -> None:
    (tmp_path / "jetstream").write_text("not a folder")
    with pytest.raises(NatsServerError, match=r"nats\.log"):
        await NatsServer(tmp_path).start()


def test_address_is_unknown_before_the_first_start(tmp_path: Path) -> None:
    with pytest.raises(NatsServerError):
        _ = NatsServer(tmp_path).url
