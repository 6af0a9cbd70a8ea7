"""Real programs under real supervisors."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.node_agent.process.leftovers import read_stat
from services.node_agent.process.runtime import (
    AlreadyLaunchedError,
    RunningWorker,
    StartRefused,
    WorkerExit,
    WorkerKey,
    WorkerLaunch,
)
from services.node_agent.process.supervisors import Supervisors

NODE = "n1"
TERM_IGNORING_TREE = """
trap '' TERM
echo $$ >> pids
if [ "$1" -lt 3 ]; then sh -c "$0" "$0" $(($1 + 1)) & fi
while :; do sleep 0.05; done
"""


def a_launch(*argv: str, job: str = "j1", attempt: int = 1, worker: int = 0, **more: object) -> WorkerLaunch:
    return WorkerLaunch(WorkerKey(job, attempt, worker), NODE, 7, list(argv), **more)


def alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


async def until(condition: object, seconds: float = 10.0) -> None:
    """Poll what has no event of its own (files and processes of other people)."""
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def next_exit(runtime: Supervisors, seconds: float = 15.0) -> WorkerExit:
    async with asyncio.timeout(seconds):
        return await runtime.exits.get()


async def run(runtime: Supervisors, launch: WorkerLaunch) -> WorkerExit:
    started = await runtime.launch(launch)
    assert isinstance(started, RunningWorker), started
    return await next_exit(runtime)


async def output_of(runtime: Supervisors, key: WorkerKey) -> str:
    return (await runtime.read_log(key, NODE, offset=0, max_bytes=1 << 20)).data.decode()


def pids_in(path: Path, count: int) -> list[int]:
    """What the programs wrote, once `count` of them have; until then nothing."""
    lines = path.read_text().split() if path.exists() else []
    return [int(line) for line in lines] if len(lines) >= count else []


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Supervisors]:
    runtime = Supervisors(tmp_path / "state", lease_grace_seconds=0.2)
    yield runtime
    for _, key in list(runtime._live):
        runtime.stop(key, NODE, grace_seconds=0, reason="test over")
    await until(lambda: not runtime._live)
    await runtime.close()


def work_dir(tmp_path: Path, job: str = "j1") -> Path:
    return tmp_path / "state" / NODE / "workers" / f"{job}.1.0" / "work"


async def test_exit_code_times_and_output_are_reported(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "echo out; echo err >&2; exit 85")
    ended = await run(runtime, launch)
    assert (ended.key, ended.fence, ended.exit_code, ended.signal) == (launch.key, 7, 85, 0)
    assert not ended.is_lost
    assert 0 < ended.started_at_ns <= ended.ended_at_ns
    assert ended.log_bytes == 8
    assert sorted((await output_of(runtime, launch.key)).split()) == ["err", "out"]


async def test_death_by_signal_is_told_from_an_exit_code(runtime: Supervisors) -> None:
    ended = await run(runtime, a_launch("sh", "-c", "kill -SEGV $$"))
    assert (ended.exit_code, ended.signal) == (-1, signal.SIGSEGV)
    assert not ended.out_of_memory
    assert not ended.used_sigkill


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["no-such-program"], "no such file or directory (exec)"),
        (["/etc/passwd"], "permission denied (exec)"),
        (["/"], "permission denied (exec)"),
    ],
)
async def test_what_cannot_be_started_is_refused_with_the_systems_words(
    runtime: Supervisors, argv: list[str], words: str
) -> None:
    refused = await runtime.launch(a_launch(*argv))
    assert isinstance(refused, StartRefused)
    assert refused.reason == words
    assert runtime.exits.empty()


async def test_missing_working_directory_is_named_in_the_refusal(runtime: Supervisors) -> None:
    refused = await runtime.launch(a_launch("true", cwd="/no/such/place"))
    assert isinstance(refused, StartRefused)
    assert refused.reason == "no such file or directory (working directory)"


async def test_arguments_too_long_for_a_request_are_refused(runtime: Supervisors) -> None:
    refused = await runtime.launch(a_launch("echo", "x" * 200_000))
    assert isinstance(refused, StartRefused)
    assert isinstance(await runtime.launch(a_launch("true", job="j2")), RunningWorker)
    await next_exit(runtime)


async def test_program_sees_its_grant_and_nothing_of_the_agent(
    runtime: Supervisors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENT_SECRET", "1")
    launch = a_launch(
        "env",
        env={"LEARNING_RATE": "3", "CUDA_VISIBLE_DEVICES": "all", "BERTH_FENCE": "99"},
        gpu_uuids=["GPU-a", "GPU-b"],
        gpu_indices=[3, 5],
    )
    await run(runtime, launch)
    seen = dict(line.split("=", 1) for line in (await output_of(runtime, launch.key)).splitlines())
    assert seen["CUDA_VISIBLE_DEVICES"] == seen["NVIDIA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert (seen["BERTH_JOB_ID"], seen["BERTH_FENCE"], seen["LEARNING_RATE"]) == ("j1", "7", "3")
    assert "AGENT_SECRET" not in seen


async def test_a_program_without_cards_sees_none(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", 'echo "[$CUDA_VISIBLE_DEVICES]" "$NVIDIA_VISIBLE_DEVICES"')
    await run(runtime, launch)
    assert await output_of(runtime, launch.key) == "[] void\n"


async def test_stdin_is_empty_and_signals_are_at_their_defaults(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "cat; grep -E 'Sig(Ign|Blk)' /proc/self/status")
    await run(runtime, launch)
    for line in (await output_of(runtime, launch.key)).splitlines():
        # Signals 32 and 33 belong to the C library: whoever started the tests may have them ignored, and nobody can tell.
        assert int(line.split()[1], 16) & ~0x1_8000_0000 == 0, line


async def test_same_worker_is_not_launched_twice(runtime: Supervisors) -> None:
    await run(runtime, a_launch("true"))
    with pytest.raises(AlreadyLaunchedError):
        await runtime.launch(a_launch("true"))


async def test_many_short_programs_all_report_their_end(runtime: Supervisors) -> None:
    launches = [a_launch("sh", "-c", f"exit {n % 7}", job=f"j{n}") for n in range(40)]
    await asyncio.gather(*(runtime.launch(launch) for launch in launches))
    ends = [await next_exit(runtime) for _ in launches]
    assert {(end.key.job_id, end.exit_code) for end in ends} == {(f"j{n}", n % 7) for n in range(40)}


# -- stopping


async def test_stop_lets_a_program_end_in_its_own_way(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "trap 'echo saved; exit 85' TERM; echo ready; while :; do sleep 0.05; done")
    await runtime.launch(launch)
    await until(lambda: b"ready" in (runtime.directory_of(launch.key, NODE) / "log.0").read_bytes())
    assert runtime.stop(launch.key, NODE, grace_seconds=10, reason="preempted")
    ended = await next_exit(runtime)
    assert (ended.exit_code, ended.stop_reason, ended.used_sigkill) == (85, "preempted", False)
    assert (await output_of(runtime, launch.key)).endswith("saved\n")


async def test_stop_ends_a_whole_tree_that_ignores_sigterm(runtime: Supervisors, tmp_path: Path) -> None:
    launch = a_launch("sh", "-c", TERM_IGNORING_TREE, TERM_IGNORING_TREE, "1")
    await runtime.launch(launch)
    await until(lambda: pids_in(work_dir(tmp_path) / "pids", 3))
    pids = pids_in(work_dir(tmp_path) / "pids", 3)
    assert all(map(alive, pids))
    begun = time.monotonic()
    runtime.stop(launch.key, NODE, grace_seconds=0.3, reason="cancelled")
    ended = await next_exit(runtime)
    assert time.monotonic() - begun >= 0.3
    assert (ended.signal, ended.used_sigkill) == (signal.SIGKILL, True)
    assert not any(map(alive, pids))


async def test_a_stopped_process_is_woken_to_hear_sigterm(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "trap 'exit 3' TERM; kill -STOP $$; while :; do sleep 0.05; done")
    started = await runtime.launch(launch)
    assert isinstance(started, RunningWorker)
    await until(lambda: (stat := read_stat(started.pid)) is not None and stat.state == "T")
    runtime.stop(launch.key, NODE, grace_seconds=10, reason="x")
    assert (await next_exit(runtime)).exit_code == 3


async def test_processes_that_left_the_session_are_ended_too(runtime: Supervisors, tmp_path: Path) -> None:
    launch = a_launch("sh", "-c", "setsid sh -c 'trap \"\" TERM; echo $$ >> pids; while :; do sleep 0.05; done' & wait")
    await runtime.launch(launch)
    await until(lambda: pids_in(work_dir(tmp_path) / "pids", 1))
    runtime.stop(launch.key, NODE, grace_seconds=0.2, reason="x")
    await next_exit(runtime)
    assert not alive(pids_in(work_dir(tmp_path) / "pids", 1)[0])


async def test_nothing_is_left_behind_after_a_normal_end(runtime: Supervisors, tmp_path: Path) -> None:
    script = "setsid sh -c 'echo $$ >> pids; exec sleep 600' & sh -c 'echo $$ >> pids; exec sleep 600' & "
    launch = a_launch("sh", "-c", script + "while [ $(wc -l < pids) -lt 2 ]; do sleep 0.02; done; exit 4")
    (work_dir(tmp_path)).parent.parent.mkdir(parents=True, exist_ok=True)
    ended = await run(runtime, launch)
    assert (ended.exit_code, ended.leftovers) == (4, 2)
    assert not any(map(alive, pids_in(work_dir(tmp_path) / "pids", 2)))


async def test_a_second_stop_can_shorten_the_grace(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 0.05; done")
    await runtime.launch(launch)
    await until(lambda: b"ready" in (runtime.directory_of(launch.key, NODE) / "log.0").read_bytes())
    runtime.stop(launch.key, NODE, grace_seconds=600, reason="preempted")
    runtime.stop(launch.key, NODE, grace_seconds=0, reason="node drain")
    assert (await next_exit(runtime, 5)).used_sigkill


async def test_stopping_what_does_not_run_says_so(runtime: Supervisors) -> None:
    assert not runtime.stop(WorkerKey("nobody", 1, 0), NODE, grace_seconds=1, reason="x")


async def test_a_program_is_asked_to_save_before_it_is_signalled(runtime: Supervisors) -> None:
    script = "trap 'cat $BERTH_CKPT_CONTROL/request.json; exit 85' TERM; echo ready; while :; do sleep 0.05; done"
    launch = a_launch("sh", "-c", script)
    await runtime.launch(launch)
    await until(lambda: b"ready" in (runtime.directory_of(launch.key, NODE) / "log.0").read_bytes())
    runtime.stop(launch.key, NODE, grace_seconds=10, reason="preempted")
    assert (await next_exit(runtime)).exit_code == 85
    request = json.loads((await output_of(runtime, launch.key)).splitlines()[-1])
    assert (request["kind"], request["reason"], request["fence"]) == ("save_and_exit", "preempted", 7)


async def test_a_cancelled_program_is_not_asked_to_save(runtime: Supervisors) -> None:
    launch = a_launch("sleep", "600")
    await runtime.launch(launch)
    runtime.stop(launch.key, NODE, grace_seconds=10, reason="cancelled")
    await next_exit(runtime)
    assert list((runtime.directory_of(launch.key, NODE) / "control").iterdir()) == []


# -- lease


def boottime_in(seconds: float) -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + int(seconds * 1e9)


async def test_a_worker_ends_itself_when_the_lease_runs_out(runtime: Supervisors) -> None:
    runtime.renew(NODE, boottime_in(0.3))
    ended = await run(runtime, a_launch("sleep", "600"))
    assert (ended.stop_reason, ended.signal) == ("lease", signal.SIGTERM)


async def test_a_renewed_lease_keeps_a_worker_running(runtime: Supervisors) -> None:
    runtime.renew(NODE, boottime_in(0.8))
    await runtime.launch(a_launch("sh", "-c", "sleep 1.2; exit 5"))
    runtime.renew(NODE, boottime_in(60))
    assert (await next_exit(runtime)).exit_code == 5


async def test_the_lease_is_kept_by_the_supervisor_alone(runtime: Supervisors, tmp_path: Path) -> None:
    """Neither agent nor zygote is there when it runs out."""
    runtime.renew(NODE, boottime_in(0.5))
    started = await runtime.launch(a_launch("sleep", "600"))
    assert isinstance(started, RunningWorker)
    runtime.detach()
    await until(lambda: not alive(started.pid))
    await until((tmp_path / "state" / NODE / "workers" / "j1.1.0" / "exit").exists)
    adoption = await runtime.adopt(NODE)
    assert [(end.stop_reason, end.signal) for end in adoption.ended] == [("lease", signal.SIGTERM)]


# -- restarts and deaths


AGENT = """
import asyncio, sys
from pathlib import Path
from services.node_agent.process.runtime import WorkerKey, WorkerLaunch
from services.node_agent.process.supervisors import Supervisors

WAIT = "while [ ! -e stop ]; do sleep 0.02; done; exit "

async def main():
    runtime = Supervisors(Path(sys.argv[1]))
    long = WorkerLaunch(
        WorkerKey("long", 1, 0), "n1", 7, ["sh", "-c", WAIT + "6"], gpu_uuids=["GPU-a"], extra=b'{"k": "v"}'
    )
    await runtime.launch(long)
    await runtime.launch(WorkerLaunch(WorkerKey("short", 1, 0), "n1", 8, ["sh", "-c", WAIT + "85"]))
    print(runtime.zygote.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def start_agent(state: Path) -> tuple[asyncio.subprocess.Process, int]:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(["libs", "."])}
    agent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AGENT, str(state), env=env, stdout=asyncio.subprocess.PIPE
    )
    assert agent.stdout is not None
    return agent, int(await asyncio.wait_for(agent.stdout.readline(), 20))


async def test_a_new_agent_finds_what_runs_and_what_ended_meanwhile(runtime: Supervisors, tmp_path: Path) -> None:
    agent, _ = await start_agent(tmp_path / "state")
    agent.kill()
    await agent.wait()
    (work_dir(tmp_path, "short") / "stop").touch()
    await until((work_dir(tmp_path, "short").parent / "exit").exists)
    adoption = await runtime.adopt(NODE)
    assert [(end.key.job_id, end.exit_code, end.fence) for end in adoption.ended] == [("short", 85, 8)]
    assert [(run.key.job_id, run.fence, run.gpu_uuids, run.extra) for run in adoption.running] == [
        ("long", 7, ("GPU-a",), {"k": "v"})
    ]
    (work_dir(tmp_path, "long") / "stop").touch()
    assert (await next_exit(runtime)).exit_code == 6


async def test_an_adopted_worker_can_be_stopped(runtime: Supervisors, tmp_path: Path) -> None:
    agent, _ = await start_agent(tmp_path / "state")
    agent.kill()
    await agent.wait()
    adoption = await runtime.adopt(NODE)
    for worker in adoption.running:
        runtime.stop(worker.key, NODE, grace_seconds=5, reason="cancelled")
    ends = [await next_exit(runtime), await next_exit(runtime)]
    assert {end.stop_reason for end in ends} == {"cancelled"}


async def test_programs_outlive_agent_and_zygote(runtime: Supervisors, tmp_path: Path) -> None:
    agent, zygote = await start_agent(tmp_path / "state")
    os.kill(zygote, signal.SIGKILL)
    agent.kill()
    await agent.wait()
    await until(lambda: not alive(zygote))
    adoption = await runtime.adopt(NODE)
    assert {worker.key.job_id for worker in adoption.running} == {"long", "short"}
    for name in ("long", "short"):
        (work_dir(tmp_path, name) / "stop").touch()
    ends = [await next_exit(runtime), await next_exit(runtime)]
    assert {end.exit_code for end in ends} == {6, 85}


async def test_a_dead_zygote_is_replaced_and_running_workers_do_not_notice(runtime: Supervisors) -> None:
    await runtime.launch(a_launch("sh", "-c", "sleep 0.5; exit 5", job="before"))
    os.kill(runtime.zygote.pid, signal.SIGKILL)
    await runtime.launch(a_launch("sh", "-c", "exit 6", job="after"))
    ends = {(end.key.job_id, end.exit_code) for end in [await next_exit(runtime), await next_exit(runtime)]}
    assert ends == {("before", 5), ("after", 6)}


async def test_a_zygote_that_dies_with_requests_open_loses_none(runtime: Supervisors) -> None:
    await run(runtime, a_launch("true"))
    os.kill(runtime.zygote.pid, signal.SIGSTOP)
    launches = [asyncio.create_task(runtime.launch(a_launch("true", job=f"k{n}"))) for n in range(5)]
    await asyncio.sleep(0.05)
    os.kill(runtime.zygote.pid, signal.SIGKILL)
    assert all(isinstance(answer, RunningWorker) for answer in await asyncio.gather(*launches))
    ends = [await next_exit(runtime) for _ in launches]
    assert {end.key.job_id for end in ends} == {f"k{n}" for n in range(5)}


async def test_a_dead_supervisor_takes_its_program_along(runtime: Supervisors, tmp_path: Path) -> None:
    script = "setsid sh -c 'echo $$ >> pids; exec sleep 600' & echo $$ >> pids; wait"
    launch = a_launch("sh", "-c", script)
    started = await runtime.launch(launch)
    assert isinstance(started, RunningWorker)
    await until(lambda: pids_in(work_dir(tmp_path) / "pids", 2))
    supervisor = runtime._live[NODE, launch.key].supervisor_pid
    os.kill(supervisor, signal.SIGKILL)
    ended = await next_exit(runtime)
    assert (ended.is_lost, ended.lost_reason) == (True, "supervisor died")
    assert not any(map(alive, pids_in(work_dir(tmp_path) / "pids", 2)))


async def test_a_supervisor_that_died_while_no_agent_ran_leaves_nothing(runtime: Supervisors, tmp_path: Path) -> None:
    launch = a_launch("sh", "-c", "setsid sh -c 'echo $$ >> pids; exec sleep 600' & wait")
    await runtime.launch(launch)
    await until(lambda: pids_in(work_dir(tmp_path) / "pids", 1))
    supervisor = runtime._live[NODE, launch.key].supervisor_pid
    runtime.detach()
    os.kill(supervisor, signal.SIGKILL)
    await until(lambda: not alive(supervisor))
    adoption = await runtime.adopt(NODE)
    assert [end.lost_reason for end in adoption.ended] == ["supervisor died"]
    assert not alive(pids_in(work_dir(tmp_path) / "pids", 1)[0])


async def test_a_worker_of_before_a_reboot_is_lost(runtime: Supervisors, tmp_path: Path) -> None:
    launch = a_launch("true")
    await run(runtime, launch)
    directory = runtime.directory_of(launch.key, NODE)
    (directory / "exit").unlink()
    state = (directory / "state").read_text()
    (directory / "state").write_text(state.replace(runtime._boot_id, "another-boot"))
    adoption = await runtime.adopt(NODE)
    assert [(end.is_lost, end.lost_reason) for end in adoption.ended] == [(True, "machine restarted")]


async def test_a_launch_that_was_cut_off_never_starts_later(runtime: Supervisors, tmp_path: Path) -> None:
    """The supervisor that is about to let a program go finds the record of the new agent, and does not."""
    await run(runtime, a_launch("true", job="warm"))
    launch = a_launch("sh", "-c", "touch ran")
    os.kill(runtime.zygote.pid, signal.SIGSTOP)
    task = asyncio.create_task(runtime.launch(launch))
    await until((work_dir(tmp_path)).exists)
    adoption = await runtime.adopt(NODE)
    assert adoption.never_started == (launch.key,)
    os.kill(runtime.zygote.pid, signal.SIGCONT)
    assert isinstance(await task, StartRefused)
    done = tmp_path / "state" / NODE / "done" / launch.key.folder
    assert not (done / "work" / "ran").exists()


async def test_what_was_forgotten_is_not_found_again_but_its_log_is(runtime: Supervisors) -> None:
    launch = a_launch("echo", "hello")
    await run(runtime, launch)
    runtime.forget(launch.key, NODE)
    adoption = await runtime.adopt(NODE)
    assert adoption.ended == ()
    assert await output_of(runtime, launch.key) == "hello\n"
    assert await runtime.sweep(NODE, keep_seconds=3600, keep_count=0) == 1
    with pytest.raises(KeyError):
        await output_of(runtime, launch.key)


# -- output


async def test_output_is_capped_and_offsets_keep_their_meaning(tmp_path: Path) -> None:
    runtime = Supervisors(tmp_path / "state", log_piece_bytes=100_000)
    launch = a_launch("sh", "-c", "seq -w 0 99999")  # 600,000 bytes, six for each line
    ended = await run(runtime, launch)
    assert ended.log_bytes == 600_000
    kept = sum(path.stat().st_size for path in runtime.directory_of(launch.key, NODE).glob("log.*"))
    assert 100_000 < kept <= 200_000
    chunk = await runtime.read_log(launch.key, NODE, offset=599_940, max_bytes=18)
    assert chunk.data == b"99990\n99991\n99992\n"
    assert not chunk.eof
    tail = await runtime.read_log(launch.key, NODE, offset=-12, max_bytes=100)
    assert (tail.data, tail.eof, tail.next_offset) == (b"99998\n99999\n", True, 600_000)
    oldest = await runtime.read_log(launch.key, NODE, offset=0, max_bytes=1 << 20)
    assert oldest.offset == 600_000 - kept
    written = "".join(f"{n:05d}\n" for n in range(100_000)).encode()
    assert oldest.data == written[oldest.offset :]
    await runtime.close()


async def test_output_is_readable_while_the_program_runs(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "echo one; sleep 600")
    await runtime.launch(launch)
    await until(lambda: (runtime.directory_of(launch.key, NODE) / "log.0").stat().st_size > 0)
    chunk = await runtime.read_log(launch.key, NODE, offset=0, max_bytes=100)
    assert (chunk.data, chunk.eof) == (b"one\n", False)


async def test_a_program_that_opens_its_output_anew_does_not_wipe_it(runtime: Supervisors) -> None:
    launch = a_launch("sh", "-c", "echo one; echo two > /dev/stderr; echo three > /dev/stdout")
    await run(runtime, launch)
    assert await output_of(runtime, launch.key) == "one\ntwo\nthree\n"


def pss_kib(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))


async def test_a_supervisor_stays_small(runtime: Supervisors) -> None:
    launches = [a_launch("sleep", "600", job=f"j{n}") for n in range(4)]
    for launch in launches:
        await runtime.launch(launch)
    for watched in runtime._live.values():
        assert pss_kib(watched.supervisor_pid) <= 12 * 1024
