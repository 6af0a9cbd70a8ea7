"""What the benches read from the kernel, checked on processes whose cost is known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.measure import (
    ControlGroup,
    CpuReading,
    ProcessTimes,
    SyncTrace,
    all_processes,
    by_owner,
    fdatasync_p50_ms,
    parts_of,
    proportional_kib,
    read_cpu,
)

SPIN = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
PARENT = (
    f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {SPIN!r}]); print(1, flush=True); input()"
)


def a_process(pid: int, parent: int) -> ProcessTimes:
    return ProcessTimes(pid, parent, 0, 0)


def test_process_belongs_to_its_nearest_named_ancestor() -> None:
    processes = {
        p.pid: p for p in (a_process(1, 0), a_process(10, 1), a_process(20, 10), a_process(30, 20), a_process(40, 10))
    }
    parts = parts_of(10, {10: "supervisor", 20: "node_agent"}, processes)
    assert parts == {10: "supervisor", 20: "node_agent", 30: "node_agent children", 40: "supervisor children"}


def test_cpu_of_an_ended_grandchild_is_counted() -> None:
    parent = subprocess.Popen([sys.executable, "-S", "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdin is not None and parent.stdout is not None
    try:
        parent.stdout.readline()
        group = ControlGroup()
        group.path = None
        reading = read_cpu(parent.pid, {parent.pid: "supervisor"}, group)
    finally:
        parent.communicate(b"\n")
    assert reading.how == "proc"
    assert reading.by_part_us["supervisor children"] >= 280_000


def test_group_counts_processes_started_inside_it_only() -> None:
    group = ControlGroup()
    if group.path is None:
        pytest.skip("no control group can be made here")
    try:
        subprocess.run([sys.executable, "-S", "-c", SPIN], check=True)
        outside = group.used_us()
        with group.joined():
            child = subprocess.Popen([sys.executable, "-S", "-c", SPIN])
        child.wait()
        inside = group.used_us()
    finally:
        group.remove()
    assert outside is not None and inside is not None
    assert outside < 100_000
    assert inside - outside >= 280_000
    assert not group.path.exists()


def test_difference_names_the_time_of_processes_that_ended_unseen() -> None:
    before = CpuReading(1_000_000, {"nats": 400_000, "gateway": 600_000}, "cgroup")
    after = CpuReading(2_000_000, {"nats": 500_000, "gateway": 600_000}, "cgroup")
    assert after.since(before) == CpuReading(1_000_000, {"ended": 900_000, "nats": 100_000}, "cgroup")


def test_own_memory_is_seen_and_a_gone_process_has_none() -> None:
    assert proportional_kib(os.getpid()) > 1_000
    assert proportional_kib(2**22 + 1) == 0
    assert os.getpid() in all_processes()


def test_disk_probe_leaves_nothing(tmp_path: Path) -> None:
    assert fdatasync_p50_ms(tmp_path, times=3) >= 0
    assert list(tmp_path.iterdir()) == []


LINES = """\
11 1700000000.500000 fdatasync(7</home/postgres/data/pg_wal/0001>) = 0
12 1700000001.000000 fsync(9</home/nats/jetstream/1.blk> <unfinished ...>
11 1700000001.100000 openat(AT_FDCWD</>, "/etc/passwd", O_RDONLY|O_CLOEXEC) = 3</etc/passwd>
12 1700000001.200000 <... fsync resumed>) = 0
12 1700000001.300000 openat(AT_FDCWD</>, "/home/nats/o.dat", O_WRONLY|O_CREAT|O_SYNC, 0600) = 9</home/nats/o.dat>
13 1700000002.000000 fdatasync(5</home/nodes/journal>) = 0
"""


def test_trace_counts_each_sync_once_and_files_opened_for_synchronous_writing(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    file.write_text(LINES)
    trace = SyncTrace(file).read()
    assert [sync.pid for sync in trace.syncs] == [11, 12, 12, 13]
    assert by_owner(trace.between(1700000000.6, 1700000002.5)) == {"nats": 2, "node_agent": 1}


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_tracer_sees_the_syncs_of_children(tmp_path: Path) -> None:
    target = tmp_path / "nodes-journal"
    code = f"import os; f = os.open({str(target)!r}, os.O_CREAT | os.O_WRONLY); os.write(f, b'x'); os.fdatasync(f)"
    trace = SyncTrace(tmp_path / "trace")
    began = time.time()
    shell = ["/bin/sh", "-c", f'{sys.executable} -S -c "$0"; true', code]
    subprocess.run([*trace.command(), *shell], check=True)
    assert [sync.path for sync in trace.read().between(began, time.time())] == [str(target)]
