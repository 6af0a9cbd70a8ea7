"""The agent on a machine with cards, as far as that can be had without them: the stand-in library under a real agent."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from berth.contracts.commands import WorkerPlan
from berth.contracts.events import CommandRefused, GpuConditionReported, WorkerReleased
from berth.contracts.reasons import Code
from tests.fake_nvml import build as fake
from tests.integration.node_agent.platform_of_tests import Platform


@pytest.fixture
async def platform(tmp_path: Path) -> AsyncIterator[Platform]:
    library = fake.build(tmp_path)
    async with Platform(tmp_path) as platform:
        platform.more_environment = {
            "LD_LIBRARY_PATH": str(library.parent),
            "FAKE_NVML_STATE": str(tmp_path / "state"),
        }
        yield platform


async def test_own_cards_are_offered_and_given_to_programs(platform: Platform, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 2, switch=1).say("link 0 1")
    await platform.start_agent("nvml", node_name="box")
    description = platform.inventory.registrations[-1].description
    assert [(gpu.card_type, gpu.index) for gpu in description.gpus] == [("H100-80G", 0), ("H100-80G", 1)]
    assert (description.node, description.driver_version) == ("box", "580.65.06")
    assert description.link_groups == ((0, 1),)
    card = description.gpus[1].uuid
    plan = (WorkerPlan(worker=0, gpus=(card,)),)
    await platform.order(platform.launch("sh", "-c", "echo $CUDA_VISIBLE_DEVICES", node="box", workers=plan))
    await platform.hear(WorkerReleased)
    assert (await platform.log_of("j1", node="box")).text == f"{card}\n"


async def test_a_card_that_stays_full_is_reported_and_gets_no_work(platform: Platform, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 1)
    await platform.start_agent("nvml", node_name="box", clean_wait_seconds="0.1")
    card = platform.gpus("box")[0]
    plan = (WorkerPlan(worker=0, gpus=(card,)),)
    script = ("sh", "-c", "while [ ! -e stop ]; do sleep 0.02; done")
    await platform.order(platform.launch(*script, node="box", workers=plan))
    work = platform.directory / "home" / "nodes" / "box" / "workers" / "j1.1.0" / "work"
    await platform.until(work.exists, "start")
    state.set(0, used=60_000)
    (work / "stop").touch()
    assert (await platform.hear(GpuConditionReported)).memory_used_mib == 60_000
    await platform.hear(WorkerReleased)
    await platform.order(platform.launch("true", node="box", job="j2", fence=2, workers=plan))
    assert (await platform.hear(CommandRefused)).reason.code is Code.GPU_BUSY
    state.set(0, used=0)
    assert (await platform.hear(GpuConditionReported, count=2)).memory_used_mib == 0


async def test_faults_of_own_cards_are_reported(platform: Platform, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 2)
    await platform.start_agent("nvml", node_name="box")
    state.say("xid 1 1 94")
    event = await platform.hear(GpuConditionReported)
    assert (event.xid, event.gpu) == (94, platform.gpus("box")[1])


async def test_an_exchanged_driver_ends_the_agent_with_its_own_code(platform: Platform, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 1)
    agent = await platform.start_agent("nvml", node_name="box")
    state.say("fail nvmlDeviceGetUtilizationRates 18")
    assert await agent.wait() == 75
