"""The agent's memory across kills and power losses."""

import asyncio
import os
from pathlib import Path

import pytest

from services.node_agent.journal import DamagedJournalError, Journal


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def test_entries_are_there_after_a_kill(path: Path) -> None:
    first = Journal(path)
    first.put("command", "c1", {"answer": "done"})
    first.put("report", "r1", {"body": "x"})
    first.flush()
    again = Journal(path)
    assert again.get("command", "c1") == {"answer": "done"}
    assert list(again.entries("report")) == [("r1", {"body": "x"})]


def test_newest_record_of_a_key_counts(path: Path) -> None:
    journal = Journal(path)
    journal.put("worker", "w", {"state": "starting"})
    journal.put("worker", "w", {"state": "running"})
    journal.put("worker", "gone", {"state": "running"})
    journal.remove("worker", "gone")
    journal.remove("worker", "never there")
    journal.flush()
    assert list(Journal(path).entries("worker")) == [("w", {"state": "running"})]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_torn_tail_is_dropped_and_writing_goes_on(path: Path, cut: int) -> None:
    journal = Journal(path)
    journal.put("k", "whole", {})
    journal.put("k", "torn", {})
    journal.flush()
    os.truncate(path, path.stat().st_size - cut)
    mended = Journal(path)
    assert [key for key, _ in mended.entries("k")] == ["whole"]
    mended.put("k", "after", {})
    mended.flush()
    assert [key for key, _ in Journal(path).entries("k")] == ["whole", "after"]


def test_a_last_line_of_garbage_is_a_torn_tail(path: Path) -> None:
    journal = Journal(path)
    journal.put("k", "whole", {})
    journal.flush()
    with path.open("ab") as file:
        file.write(b"\0\0\0\0\0\n")
    assert len(Journal(path)) == 1


def test_damage_before_the_tail_is_an_error(path: Path) -> None:
    journal = Journal(path)
    for n in range(3):
        journal.put("k", str(n), {})
    journal.flush()
    data = bytearray(path.read_bytes())
    data[12] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedJournalError):
        Journal(path)


async def test_callers_at_the_same_time_share_one_sync(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = 0
    real = os.fdatasync

    def counted(fd: int) -> None:
        nonlocal syncs
        syncs += 1
        real(fd)

    monkeypatch.setattr(os, "fdatasync", counted)
    journal = Journal(path)

    async def write(n: int) -> None:
        journal.put("k", str(n), {})
        await journal.durable()

    await asyncio.gather(*(write(n) for n in range(100)))
    assert syncs <= 2
    await journal.durable()
    assert syncs <= 2


async def test_a_failing_disk_is_told_to_all_who_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int) -> None:
        raise OSError(5, "input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    journal = Journal(path)
    journal.put("k", "a", {})
    results = await asyncio.gather(journal.durable(), journal.durable(), return_exceptions=True)
    assert all(isinstance(result, OSError) for result in results)


async def test_compaction_keeps_entries_and_bounds_the_file(path: Path) -> None:
    journal = Journal(path, compact_min_bytes=10_000)
    journal.put("k", "kept", {"n": -1})
    for n in range(2_000):
        journal.put("k", "changing", {"n": n})
        if n % 100 == 0:
            await journal.durable()
    await journal.close()
    assert os.stat(path).st_size < 20_000  # noqa: PTH116
    assert dict(Journal(path).entries("k")) == {"kept": {"n": -1}, "changing": {"n": 1999}}
