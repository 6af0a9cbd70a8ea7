"""The agent as a process, on a real bus, with real programs."""

import asyncio
import os
import random
import signal
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from berth.contracts.commands import ReconcileNode, WorkerPlan
from berth.contracts.events import (
    CommandRefused,
    GpuConditionReported,
    WorkerExited,
    WorkerReleased,
    WorkerStarted,
)
from berth.contracts.nodes import TelemetryFrame
from berth.contracts.reasons import Code
from tests.integration.node_agent.platform_of_tests import Platform, soon

WAITING = ("sh", "-c", "while [ ! -e stop ]; do sleep 0.02; done; exit 7")


@pytest.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    async with Platform(tmp_path) as platform:
        yield platform


def folder(platform: Platform, job: str, node: str = "n1") -> Path:
    return platform.directory / "home" / "nodes" / node / "workers" / f"{job}.1.0"


def finish(platform: Platform, job: str) -> None:
    (folder(platform, job) / "work" / "stop").touch()


async def test_a_node_registers_with_its_cards_and_links(platform: Platform) -> None:
    await platform.start_agent("n1=8xH100-80G:nvswitch,n2=4xA100-40G:pcie")
    found = {asked.description.node: asked.description for asked in platform.inventory.registrations}
    assert [gpu.card_type for gpu in found["n2"].gpus] == ["A100-40G"] * 4
    assert found["n1"].link_groups == (tuple(range(8)),)
    assert found["n2"].link_groups == ()
    assert len({gpu.uuid for node in found.values() for gpu in node.gpus}) == 12
    assert found["n1"].boot_id


async def test_a_launch_is_told_from_start_to_release(platform: Platform) -> None:
    await platform.start_agent()
    gpus = platform.gpus()
    order = platform.launch(
        "sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 3", workers=(WorkerPlan(worker=0, gpus=(gpus[1],)),)
    )
    await platform.order(order)
    await platform.hear(WorkerReleased)
    started, exited = platform.told(WorkerStarted)[0], platform.told(WorkerExited)[0]
    assert started.pid > 0
    assert (exited.exit_code, exited.signal, exited.fence, exited.node) == (3, None, 1, "n1")
    assert exited.message == f"{gpus[1]}\n"
    kinds = [type(fact.data).__name__ for fact in platform.facts]
    assert kinds == ["WorkerStarted", "WorkerExited", "WorkerReleased"]
    assert {fact.tenant for fact in platform.facts} == {"nlp"}


async def test_workers_of_a_gang_start_together_each_with_its_own(platform: Platform) -> None:
    await platform.start_agent()
    plans = tuple(WorkerPlan(worker=n, gpus=(), env={"RANK": str(n)}) for n in range(3))
    plans += (WorkerPlan(worker=3, gpus=(), command=("echo", "other")),)
    await platform.order(platform.launch("sh", "-c", "echo rank $RANK of $SIZE", env={"SIZE": "4"}, workers=plans))
    await platform.hear(WorkerReleased, count=4)
    texts = [(await platform.log_of("j1", worker=n)).text for n in range(4)]
    assert texts == ["rank 0 of 4\n", "rank 1 of 4\n", "rank 2 of 4\n", "other\n"]


async def test_what_cannot_start_is_reported_as_refused_start(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("no-such-program"))
    await platform.hear(WorkerReleased)
    exited = platform.told(WorkerExited)[0]
    assert exited.reason is not None
    assert (exited.reason.code, exited.reason.facts["errno"]) == (Code.START_REFUSED, 2)
    assert exited.message == "no such file or directory (exec)"
    assert platform.told(WorkerStarted) == []


async def test_a_repeated_launch_has_one_effect(platform: Platform) -> None:
    await platform.start_agent()
    order = platform.launch("sh", "-c", "echo ran >> ../../../../ran")
    await platform.order(order, command_id="once", copies=3)
    await platform.hear(WorkerReleased)
    await platform.order(order, command_id="once")
    await platform.order(platform.launch("true", job="j2"))
    await platform.hear(WorkerReleased, "j2")
    assert (platform.directory / "home" / "nodes" / "ran").read_text() == "ran\n"
    assert len(platform.told(WorkerStarted, "j1")) == 1
    assert platform.told(CommandRefused) == []


async def test_a_repeated_reconciliation_does_not_stop_what_was_launched_since(platform: Platform) -> None:
    await platform.start_agent()
    epoch = platform.inventory.epochs["n1"]
    order = ReconcileNode(node="n1", epoch=epoch, expires_at=soon())
    await platform.order(platform.launch(*WAITING))
    await platform.hear(WorkerStarted)
    await platform.order(order, copies=2)
    await platform.order(platform.launch("true", job="j2"))
    await platform.hear(WorkerReleased, "j2")
    finish(platform, "j1")
    assert (await platform.hear(WorkerExited, "j1")).exit_code == 7


async def test_stop_ends_the_workers_and_their_descendants(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("sh", "-c", "trap '' TERM; sleep 600 & while :; do sleep 0.05; done"))
    await platform.hear(WorkerStarted)
    await platform.order(platform.stop(grace_seconds=0))
    await platform.hear(WorkerReleased)
    assert platform.told(WorkerExited)[0].signal == signal.SIGKILL


async def test_stop_of_what_is_over_is_answered_with_its_end(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("true"))
    await platform.hear(WorkerReleased)
    await platform.order(platform.stop())
    await platform.until(lambda: len(platform.facts) >= 3, "facts")
    assert platform.told(CommandRefused) == []


async def test_stop_of_an_unknown_attempt_is_refused_and_keeps_it_from_starting(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.stop(fence=5))
    assert (await platform.hear(CommandRefused)).reason.code is Code.UNKNOWN_WORKER
    await platform.order(platform.launch("true", fence=5))
    assert (await platform.hear(CommandRefused, count=2)).reason.code is Code.OLD_FENCE
    assert platform.told(WorkerStarted) == []


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"epoch": 99}, Code.WRONG_EPOCH),
        ({"expires_at": datetime.now(UTC) - timedelta(seconds=5)}, Code.EXPIRED),
        ({"workers": (WorkerPlan(worker=0, gpus=("GPU-of-another-node",)),)}, Code.UNSUPPORTED),
    ],
)
async def test_commands_that_are_not_right_are_refused(
    platform: Platform, change: dict[str, object], code: Code
) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("true", **change), command_id="wrong")
    refused = await platform.hear(CommandRefused)
    assert (refused.reason.code, refused.command_id, refused.command, refused.workers) == (
        code,
        "wrong",
        "launch_workers",
        (0,),
    )


async def test_an_older_fence_is_refused_per_job_and_per_card(platform: Platform) -> None:
    await platform.start_agent()
    card = (WorkerPlan(worker=0, gpus=(platform.gpus()[0],)),)
    await platform.order(platform.launch("true", fence=10, workers=card))
    await platform.hear(WorkerReleased)
    await platform.order(platform.launch("true", fence=9, attempt=2))
    assert (await platform.hear(CommandRefused, count=1)).reason.facts["newest"] == 10
    await platform.order(platform.launch("true", job="j2", fence=8, workers=card))
    refused = await platform.hear(CommandRefused, count=2)
    assert (refused.reason.code, refused.reason.facts["gpu"]) == (Code.OLD_FENCE, platform.gpus()[0])
    await platform.order(platform.launch("true", job="j3", fence=8))
    await platform.hear(WorkerReleased, "j3")


async def test_a_card_in_use_is_refused(platform: Platform) -> None:
    await platform.start_agent()
    card = (WorkerPlan(worker=0, gpus=(platform.gpus()[0],)),)
    await platform.order(platform.launch("sleep", "600", fence=1, workers=card))
    await platform.order(platform.launch("true", job="j2", fence=2, workers=card))
    assert (await platform.hear(CommandRefused)).reason.code is Code.GPU_BUSY


async def test_shares_of_one_card_run_side_by_side(platform: Platform) -> None:
    await platform.start_agent()
    share = (WorkerPlan(worker=0, gpus=(platform.gpus()[0],), gpu_milli=500),)
    await platform.order(platform.launch(*WAITING, job="a", fence=2, workers=share))
    await platform.order(platform.launch(*WAITING, job="b", fence=1, workers=share))
    await platform.hear(WorkerStarted, count=2)


async def test_no_launch_is_taken_before_the_node_is_reconciled(platform: Platform) -> None:
    platform.inventory.reconciles = False
    await platform.start_agent()
    await platform.order(platform.launch("true"))
    assert (await platform.hear(CommandRefused)).reason.code is Code.NOT_RECONCILED


async def test_secrets_are_fetched_and_their_absence_refuses_the_start(platform: Platform) -> None:
    platform.secrets["API_KEY"] = "s3cret"
    await platform.start_agent()
    await platform.order(platform.launch("sh", "-c", "echo key $API_KEY", secret_env=("API_KEY",)))
    await platform.hear(WorkerReleased)
    assert (await platform.log_of("j1")).text == "key s3cret\n"
    await platform.order(platform.launch("true", job="j2", secret_env=("MISSING",)))
    await platform.hear(WorkerReleased, "j2")
    reason = platform.told(WorkerExited, "j2")[0].reason
    assert reason is not None
    assert reason.code is Code.START_REFUSED
    assert "MISSING" in reason.facts["error"]
    assert "s3cret" not in (platform.directory / "home" / "nodes" / "journal").read_text()
    assert "s3cret" not in (platform.directory / "agent.log").read_text()


async def test_output_is_answered_piece_by_piece_in_whole_characters(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("printf", "a\u00e9\u20ac\U0001f600\n"))
    await platform.hear(WorkerReleased)
    text, offset = "", 0
    while True:
        answer = await platform.log_of("j1", offset=offset, max_bytes=5)
        text, offset = text + answer.text, answer.next_offset
        if answer.is_over:
            break
    assert text == "a\u00e9\u20ac\U0001f600\n"
    assert not (await platform.log_of("nobody")).is_known


# -- telemetry, lease


def busy_frames(platform: Platform) -> list[TelemetryFrame]:
    return [frame for frame in platform.inventory.frames if any(gpu.process_count for gpu in frame.gpus)]


async def test_telemetry_shows_what_runs(platform: Platform) -> None:
    await platform.start_agent()
    card = (WorkerPlan(worker=0, gpus=(platform.gpus()[0],)),)
    await platform.order(platform.launch("sleep", "600", workers=card))
    await platform.hear(WorkerStarted)
    await platform.until(lambda: bool(busy_frames(platform)), "frame")
    frame = busy_frames(platform)[0]
    assert frame.workers == 1
    assert [(gpu.process_count, gpu.utilization_percent) for gpu in frame.gpus] == [(1, 95.0), (0, 0.0)]


async def test_an_unheard_node_stops_its_work_and_registers_anew(platform: Platform) -> None:
    platform.inventory.lease_seconds = 1.0
    await platform.start_agent()
    await platform.order(platform.launch("sleep", "600"))
    await platform.hear(WorkerStarted)
    platform.inventory.is_silent = True
    await platform.hear(WorkerReleased)
    reason = platform.told(WorkerExited)[0].reason
    assert reason is not None
    assert "lease" in reason.facts["error"]


async def test_work_goes_on_when_the_platform_is_gone_for_most_of_the_pool(platform: Platform) -> None:
    platform.inventory.lease_seconds, platform.inventory.pool_nodes = 2.0, 3
    await platform.start_agent("n1=1xL4-24G,n2=1xL4-24G")
    await platform.order(platform.launch(*WAITING))
    await platform.hear(WorkerStarted)
    platform.inventory.is_silent = True
    with pytest.raises(AssertionError):
        await platform.hear(WorkerExited, seconds=5)
    platform.inventory.is_silent = False
    seen = len(platform.inventory.frames)
    await platform.until(lambda: len(platform.inventory.frames) > seen + 4, "frames")
    assert len(platform.inventory.registrations) == 2
    finish(platform, "j1")
    assert (await platform.hear(WorkerExited)).exit_code == 7


async def start_two_agents(platform: Platform) -> None:
    """n1 and n2, each with an agent of its own that knows the other."""
    ports = [free_port(), free_port()]
    platform.inventory.lease_seconds, platform.inventory.pool_nodes = 3.0, 3
    for number, port in enumerate(ports):
        await platform.start_agent(
            f"n{number + 1}=1xL4-24G",
            home=str(platform.directory / f"home{number + 1}"),
            node_peer_address=f"127.0.0.1:{port}",
            node_peers=f"127.0.0.1:{ports[1 - number]}",
        )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_work_goes_on_when_the_peers_do_not_hear_the_platform_either(platform: Platform) -> None:
    await start_two_agents(platform)
    await platform.order(platform.launch("sleep", "600"))
    await platform.hear(WorkerStarted)
    platform.inventory.is_silent = True
    with pytest.raises(AssertionError):
        await platform.hear(WorkerExited, seconds=6)


async def test_a_node_whose_peers_hear_the_platform_is_the_one_cut_off(platform: Platform) -> None:
    await start_two_agents(platform)
    await platform.order(platform.launch("sleep", "600"))
    await platform.hear(WorkerStarted)
    platform.inventory.deaf_to.add("n1")
    await platform.hear(WorkerExited)


async def test_a_node_inventory_does_not_know_registers_again(platform: Platform) -> None:
    await platform.start_agent()
    platform.inventory.epochs.clear()
    await platform.until(lambda: len(platform.inventory.registrations) == 2, "second registration")


async def test_reconciling_stops_what_is_not_kept(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("sleep", "600", job="old"))
    await platform.hear(WorkerStarted, "old")
    platform.inventory.reconciles = False
    platform.inventory.epochs.clear()
    await platform.until(lambda: len(platform.inventory.registrations) == 2, "second registration")
    epoch = platform.inventory.epochs["n1"]
    await platform.order(ReconcileNode(node="n1", epoch=epoch, expires_at=soon()))
    await platform.hear(WorkerReleased, "old")
    await platform.order(platform.launch("true", job="new", fence=2))
    await platform.hear(WorkerReleased, "new")


async def test_a_late_reconciling_leaves_alone_what_its_session_has_launched(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch(*WAITING))
    await platform.hear(WorkerStarted)
    late = ReconcileNode(node="n1", epoch=platform.inventory.epochs["n1"], expires_at=soon())
    await platform.order(late, copies=2)
    await platform.order(platform.launch("true", job="j2", fence=2))
    await platform.hear(WorkerReleased, "j2")
    finish(platform, "j1")
    assert (await platform.hear(WorkerExited, "j1")).exit_code == 7


async def test_a_bus_that_sends_all_commands_again_changes_nothing(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("sh", "-c", "echo ran >> ../../../../ran", job="done"))
    await platform.order(platform.launch(*WAITING, job="runs", fence=2))
    await platform.order(platform.launch("sleep", "600", job="stopped", fence=3))
    await platform.hear(WorkerStarted, "stopped")
    await platform.order(platform.stop(job="stopped", fence=3))
    await platform.hear(WorkerReleased, "stopped")
    await platform.restart_bus()
    await platform.order(platform.launch("true", job="after", fence=4))
    await platform.hear(WorkerReleased, "after", seconds=30)
    finish(platform, "runs")
    assert (await platform.hear(WorkerExited, "runs")).exit_code == 7
    assert (platform.directory / "home" / "nodes" / "ran").read_text() == "ran\n"
    assert len(platform.told(WorkerStarted)) == 4
    assert platform.told(CommandRefused) == []


# -- faults of cards


async def test_faults_and_leftover_memory_are_reported_and_block_the_card(platform: Platform) -> None:
    await platform.start_agent()
    card = platform.gpus()[0]
    await platform.simulate(do="fault", gpu=1, xid=48)
    assert (await platform.hear(GpuConditionReported)).xid == 48
    await platform.simulate(do="leak", gpu=0, memory_mib=60_000)
    leak = await platform.hear(GpuConditionReported, count=2)
    assert (leak.gpu, leak.memory_used_mib) == (card, 60_000)
    await platform.order(platform.launch("true", workers=(WorkerPlan(worker=0, gpus=(card,)),)))
    assert (await platform.hear(CommandRefused)).reason.code is Code.GPU_BUSY
    await platform.simulate(do="leak", gpu=0, memory_mib=0)
    assert (await platform.hear(GpuConditionReported, count=3)).memory_used_mib == 0
    await platform.order(platform.launch("true", job="j2", fence=2, workers=(WorkerPlan(worker=0, gpus=(card,)),)))
    await platform.hear(WorkerReleased, "j2")


# -- deaths


async def test_a_killed_agent_comes_back_to_its_workers(platform: Platform) -> None:
    agent = await platform.start_agent()
    await platform.order(platform.launch(*WAITING, job="goes-on"))
    await platform.order(platform.launch(*WAITING, job="ends", fence=2))
    await platform.hear(WorkerStarted, count=2)
    await platform.kill_agent(agent)
    finish(platform, "ends")
    await platform.until((folder(platform, "ends") / "exit").exists, "end")
    await platform.start_agent()
    assert {(w.job_id, w.state) for w in platform.inventory.registrations[-1].workers} >= {("goes-on", "running")}
    assert (await platform.hear(WorkerExited, "ends")).exit_code == 7
    await platform.hear(WorkerReleased, "ends")
    finish(platform, "goes-on")
    assert (await platform.hear(WorkerExited, "goes-on")).exit_code == 7
    assert len(platform.told(WorkerStarted)) == 2


async def test_killed_amid_launches_nothing_runs_twice_and_every_end_is_told(platform: Platform) -> None:
    """The agent is killed four times while commands pour in; each job leaves a line when its program runs."""
    agent = await platform.start_agent()
    script = ("sh", "-c", 'echo "$BERTH_JOB_ID" >> ../../../../ran')
    number = 0
    for _ in range(4):
        for _ in range(12):
            number += 1
            await platform.order(platform.launch(*script, job=f"j{number}", fence=number), copies=2)
        await asyncio.sleep(random.uniform(0.0, 0.1))
        await platform.kill_agent(agent)
        agent = await platform.start_agent()
    jobs = {f"j{n}" for n in range(1, number + 1)}

    def settled() -> set[str]:
        released = {fact.job_id for fact in platform.told(WorkerReleased)}
        return released | {fact.job_id for fact in platform.told(CommandRefused)}

    await platform.until(lambda: jobs <= settled(), "end of every job", seconds=30)
    ran = (platform.directory / "home" / "nodes" / "ran").read_text().split()
    assert len(ran) == len(set(ran))
    done = {fact.job_id for fact in platform.told(WorkerExited) if fact.reason is None}
    assert done <= set(ran)
    never = {fact.job_id for fact in platform.told(CommandRefused)} - {f.job_id for f in platform.told(WorkerStarted)}
    assert not never & set(ran)


async def test_what_was_not_told_is_told_when_the_bus_is_back(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch(*WAITING))
    await platform.hear(WorkerStarted)
    await platform.nats.kill()
    finish(platform, "j1")
    await platform.until((folder(platform, "j1") / "exit").exists, "end")
    await platform.nats.start()
    assert (await platform.hear(WorkerExited, seconds=30)).exit_code == 7
    await platform.hear(WorkerReleased)


async def test_told_to_leave_the_agent_leaves_its_programs_running(platform: Platform) -> None:
    agent = await platform.start_agent()
    await platform.order(platform.launch(*WAITING))
    started = await platform.hear(WorkerStarted)
    agent.send_signal(signal.SIGTERM)
    assert await agent.wait() == 0
    os.kill(started.pid, 0)
    await platform.start_agent()
    finish(platform, "j1")
    assert (await platform.hear(WorkerExited)).exit_code == 7


async def test_told_to_end_its_work_the_agent_reports_every_end(platform: Platform) -> None:
    agent = await platform.start_agent()
    polite = ("sh", "-c", "trap 'exit 0' TERM; echo ready; while :; do sleep 0.05; done")
    for number in range(3):
        await platform.order(platform.launch(*polite, job=f"j{number}", fence=number + 1))
    await platform.hear(WorkerStarted, count=3)
    agent.send_signal(signal.SIGINT)
    assert await agent.wait() == 0
    await platform.hear(WorkerReleased, count=3)
    codes = {exited.reason.code for exited in platform.told(WorkerExited) if exited.reason is not None}
    assert codes == {Code.WORKER_LOST}  # not "succeeded", whatever code a polite program leaves with


async def test_a_second_agent_on_the_same_state_is_kept_out(platform: Platform) -> None:
    await platform.start_agent()
    await platform.order(platform.launch("true"))
    await platform.hear(WorkerReleased)
    lock = platform.directory / "home" / "nodes" / "agent.lock"
    import fcntl

    with lock.open() as handle, pytest.raises(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


async def test_metrics_show_cards_and_counts(platform: Platform) -> None:
    await platform.start_agent()
    card = platform.gpus()[1]
    await platform.order(platform.launch(*WAITING, workers=(WorkerPlan(worker=0, gpus=(card,)),)))
    await platform.hear(WorkerStarted)
    await platform.until(lambda: bool(busy_frames(platform)), "frame")
    page = await platform.metrics()
    assert 'berth_agent_launches_total{outcome="started"} 1.0' in page
    busy = [line for line in page.splitlines() if line.startswith("DCGM_FI_DEV_GPU_UTIL{") and card in line]
    assert busy[0].endswith(" 95.0")
    assert 'hpc_job="j1"' in busy[0]


async def test_simulated_workers_need_no_processes(platform: Platform) -> None:
    await platform.start_agent(node_runtime="simulated")
    await platform.order(platform.launch("sleep", "0.2", job="good"))
    await platform.order(platform.launch("false", job="bad", fence=2))
    await platform.order(platform.launch("sleep", "600", job="long", fence=3))
    await platform.hear(WorkerReleased, count=2)
    assert {(e.job_id, e.exit_code) for e in platform.told(WorkerExited)} == {("good", 0), ("bad", 1)}
    await platform.order(platform.stop(job="long", fence=3))
    assert (await platform.hear(WorkerExited, "long")).signal == signal.SIGTERM
