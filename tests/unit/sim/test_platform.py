"""The simulated platform as a whole: jobs flow, nodes go and return, parts restart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from berth.contracts.events import JobAdmitted, PolicyActivated
from berth.contracts.jobs import JobState
from berth.decisions.lifecycle import LifecycleCore
from berth.sim.platform import Platform
from berth.sim.programs import Program
from tests.unit.decisions.desks import START, a_spec

Make = Callable[..., Platform]


def admit(platform: Platform, job_id: str, program: Program | None = None, **spec: Any) -> None:
    programs = platform.__dict__.setdefault("programs", {})
    programs[job_id] = program or Program()
    platform.fleet.program_of = lambda job: programs.get(job, Program())
    platform.bus.tell(
        JobAdmitted(
            job_id=job_id,
            spec=a_spec(job_id, **spec),
            submitted_at=platform.clock.now,
            submitted_by="user:a",
            policy_version=0,
        ),
        job_id,
        service="admission",
    )
    platform.settle()


def after(platform: Platform, seconds: float) -> None:
    platform.advance(START + timedelta(seconds=seconds))


def told(platform: Platform, job_id: str) -> list[str]:
    return [type(r.event.data).__name__ for r in platform.audit if r.event.subject == job_id]


def use_policy(platform: Platform, **document: Any) -> None:
    fact = PolicyActivated(policy_version=1, document={"defaults": document}, author="user:ops")
    platform.bus.tell(fact, "policy", service="admission")
    platform.settle()


def state(platform: Platform, job_id: str) -> JobState:
    core = platform.bus.core("lifecycle")
    assert isinstance(core, LifecycleCore)
    run = core.job(job_id)
    assert run is not None
    return run.state


def test_a_program_ends_after_its_running_time(make_platform: Make) -> None:
    platform = make_platform()
    admit(platform, "j1", Program(runtime=60), workers=2, gpus=4)
    assert state(platform, "j1") is JobState.RUNNING
    after(platform, 59)
    assert state(platform, "j1") is JobState.RUNNING
    after(platform, 60)
    assert state(platform, "j1") is JobState.SUCCEEDED


def test_a_job_that_crashes_backs_off_and_gives_up(make_platform: Make) -> None:
    platform = make_platform()
    use_policy(platform, recovery={"max_restarts": 3, "backoff": {"first": 60, "factor": 2, "max": 600}})
    admit(platform, "j1", Program(crash_after=5, crashes=None))
    after(platform, 600)
    starts = [r.recorded_at - START for r in platform.audit if type(r.event.data).__name__ == "JobRunning"]
    assert [round(s.total_seconds()) for s in starts] == [0, 65, 190, 435]
    assert state(platform, "j1") is JobState.FAILED


def test_a_short_silence_costs_nothing(make_platform: Make) -> None:
    platform = make_platform()
    use_policy(platform, recovery={"suspect_after": 30, "lost_after": 300})
    admit(platform, "j1")
    platform.fleet.silence("n1")
    after(platform, 40)
    assert state(platform, "j1") is JobState.UNKNOWN
    platform.fleet.back("n1", running=["j1"])
    platform.settle()
    assert state(platform, "j1") is JobState.RUNNING
    assert len(platform.fleet.launches) == 1


def test_a_lost_node_gives_its_job_to_another_and_kills_it_on_return(make_platform: Make) -> None:
    platform = make_platform()
    use_policy(platform, recovery={"suspect_after": 30, "lost_after": 300})
    admit(platform, "j1")
    platform.fleet.silence("n1")
    after(platform, 301)
    assert [node for *_, node in platform.fleet.launches] == ["n1", "n2"]
    platform.fleet.back("n1")
    platform.settle()
    assert [node for node, _ in platform.fleet.running("j1")] == ["n2"]


def test_a_restarted_agent_adopts_and_tells_what_ended_meanwhile(make_platform: Make) -> None:
    platform = make_platform()
    admit(platform, "j1", gpus=4)
    admit(platform, "j2", gpus=4)
    platform.fleet.stop_agent("n2")
    platform.fleet.end("j2", succeeded=True)
    platform.settle()
    assert state(platform, "j2") is JobState.RUNNING
    platform.fleet.start_agent("n2")
    platform.settle()
    assert state(platform, "j2") is JobState.SUCCEEDED
    assert state(platform, "j1") is JobState.RUNNING


def test_everything_goes_on_after_a_restart_of_all_parts_and_an_outage_of_the_bus(make_platform: Make) -> None:
    platform = make_platform()
    admit(platform, "j1", Program(runtime=600), time_limit=900)
    platform.bus.restart("lifecycle")
    platform.bus.restart("inventory")
    after(platform, 100)
    platform.stop_bus()
    after(platform, 700)
    assert state(platform, "j1") is JobState.RUNNING  # nobody has heard of its end yet
    platform.start_bus()
    platform.settle()
    assert state(platform, "j1") is JobState.SUCCEEDED
    assert "NodeLost" not in {type(r.event.data).__name__ for r in platform.audit}


def test_a_preempted_program_goes_on_where_it_was(make_platform: Make) -> None:
    platform = make_platform()
    admit(platform, "j1", Program(runtime=100))
    after(platform, 40)
    platform.fleet.fault("n1", 0, 79)  # not on any list of the policy: harmless
    platform.settle()
    assert len(platform.fleet.launches) == 1
    assert platform.fleet.work_done("j1") == 40


def test_equal_histories_give_equal_records(make_platform: Make) -> None:
    def play() -> list[str]:
        platform = make_platform()
        use_policy(platform, recovery={"max_restarts": 2, "backoff": {"first": 5}})
        for i in range(6):
            admit(platform, f"j{i}", Program(runtime=30 + i, crash_after=7, crashes=i % 2), gpus=1 + i % 3)
        platform.cancel("j3")
        after(platform, 300)
        return [r.event.to_json().decode() for r in platform.audit]

    assert play() == play()


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_every_card_is_given_back_once(make_platform: Make, node: str) -> None:
    platform = make_platform()
    use_policy(platform, recovery={"suspect_after": 30, "lost_after": 60})
    for i in range(8):
        admit(platform, f"j{i}", Program(runtime=50 + i))
    platform.fleet.silence(node)
    after(platform, 100)
    platform.fleet.back(node)
    after(platform, 400)
    placement = platform.bus.core("placement")
    assert placement.held == {}  # type: ignore[attr-defined]
    assert set(Counter(placement.released).values()) == {1}  # type: ignore[attr-defined]
    for i in range(8):
        assert told(platform, f"j{i}")[-1] in ("JobSucceeded", "AllocationReleased", "StaleReportIgnored")
        assert told(platform, f"j{i}").count("JobSucceeded") == 1
