"""Pretended programs keep the promises of real ones."""

import asyncio
import time

import pytest

from services.node_agent.process.runtime import (
    AlreadyLaunchedError,
    RunningWorker,
    StartRefused,
    WorkerExit,
    WorkerKey,
    WorkerLaunch,
)
from services.node_agent.process.simulated import Pretence, SimulatedWorkers


def a_launch(*argv: str, job: str = "j1") -> WorkerLaunch:
    return WorkerLaunch(WorkerKey(job, 1, 0), "n1", 7, argv)


async def end_of(runtime: SimulatedWorkers) -> WorkerExit:
    return await asyncio.wait_for(runtime.exits.get(), 5)


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (("true",), 0),
        (("/bin/false",), 1),
        (("exit", "85"), 85),
        (("sleep", "0.01"), 0),
        (("sleep", "soon"), 1),
        (("python", "train.py"), 0),
    ],
)
async def test_programs_end_as_their_arguments_say(argv: tuple[str, ...], code: int) -> None:
    runtime = SimulatedWorkers()
    assert isinstance(await runtime.launch(a_launch(*argv)), RunningWorker)
    ended = await end_of(runtime)
    assert (ended.exit_code, ended.signal, ended.fence) == (code, 0, 7)


async def test_ends_come_in_order_of_time() -> None:
    runtime = SimulatedWorkers()
    for name, seconds in (("slow", "0.06"), ("fast", "0.01"), ("middle", "0.03")):
        await runtime.launch(a_launch("sleep", seconds, job=name))
    assert [(await end_of(runtime)).key.job_id for _ in range(3)] == ["fast", "middle", "slow"]


async def test_stop_ends_a_program_early_and_once() -> None:
    runtime = SimulatedWorkers()
    await runtime.launch(a_launch("sleep", "600"))
    begun = time.monotonic()
    assert runtime.stop(WorkerKey("j1", 1, 0), "n1", grace_seconds=5, reason="cancelled")
    ended = await end_of(runtime)
    assert time.monotonic() - begun < 2
    assert (ended.signal, ended.stop_reason, ended.used_sigkill) == (15, "cancelled", False)
    assert not runtime.stop(WorkerKey("j1", 1, 0), "n1", grace_seconds=5, reason="again")


async def test_the_grace_ends_a_program_that_will_not_stop() -> None:
    runtime = SimulatedWorkers(lambda _: Pretence(seconds=600, stop_seconds=600))
    await runtime.launch(a_launch("stubborn"))
    runtime.stop(WorkerKey("j1", 1, 0), "n1", grace_seconds=0.02, reason="cancelled")
    assert (await end_of(runtime)).used_sigkill


async def test_a_refused_start_leaves_nothing() -> None:
    runtime = SimulatedWorkers(lambda _: Pretence(refused_errno=2))
    assert isinstance(await runtime.launch(a_launch("x")), StartRefused)
    assert (await runtime.adopt("n1")).running == ()


async def test_same_worker_is_not_launched_twice_and_its_end_is_kept_until_forgotten() -> None:
    runtime = SimulatedWorkers()
    await runtime.launch(a_launch("echo", "hello"))
    await end_of(runtime)
    with pytest.raises(AlreadyLaunchedError):
        await runtime.launch(a_launch("true"))
    assert [ended.key.job_id for ended in (await runtime.adopt("n1")).ended] == ["j1"]
    runtime.forget(WorkerKey("j1", 1, 0), "n1")
    assert (await runtime.adopt("n1")).ended == ()
    chunk = await runtime.read_log(WorkerKey("j1", 1, 0), "n1", offset=-3, max_bytes=10)
    assert (chunk.data, chunk.eof) == (b"lo\n", True)
