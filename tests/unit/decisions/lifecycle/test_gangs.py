"""Gangs short of a worker, elastic gangs, and cards that break under a job."""

from __future__ import annotations

from typing import Any

from berth.contracts.events import (
    AttemptOutcome,
    GpuOut,
    JobRequeued,
    JobRerunRequested,
    JobRunning,
    NodeLost,
    NodeSuspect,
    PreemptionPlanned,
    Victim,
)
from berth.contracts.jobs import JobState
from berth.contracts.reasons import Code, because
from berth.decisions.lifecycle import LifecycleCore
from tests.unit.decisions.desks import (
    Desk,
    a_spec,
    admitted,
    did_exit,
    did_release,
    did_start,
    kinds,
    placed,
    policy,
    registered,
    reported,
)


def a_gang(*, nodes: tuple[str, ...] = ("n1", "n2"), gang_grace: int = 300, **spec: Any) -> Desk[LifecycleCore]:
    desk = Desk(LifecycleCore())
    desk.feed(policy(recovery={"gang_grace": gang_grace, "max_restarts": 3}))
    desk.feed(*(registered(node) for node in sorted(set(nodes))))
    desk.feed(admitted(spec=a_spec(workers=len(nodes), **spec)), placed(nodes=nodes))
    desk.feed(*(did_start(worker=i, node=node) for i, node in enumerate(nodes)))
    return desk


def lose(desk: Desk[LifecycleCore], node: str) -> list[Any]:
    desk.feed(NodeSuspect(node=node, epoch=1, silent_seconds=30))
    return desk.feed(NodeLost(node=node, epoch=1, silent_seconds=120))


def state(desk: Desk[LifecycleCore]) -> JobState:
    run = desk.core.job("j1")
    assert run is not None
    return run.state


def test_a_gang_keeps_its_room_for_the_grace_and_goes_on_if_its_worker_is_still_there() -> None:
    desk = a_gang()
    assert lose(desk, "n2") == []
    assert state(desk) is JobState.UNKNOWN
    desk.wait(200)
    told = desk.feed(registered("n2", epoch=2, workers=(reported(worker=1),)))
    assert kinds(told) == ["ReconcileNode", "JobRunning"]
    assert len(told[0].keep) == 1
    assert kinds(desk.wait(3600)) == []


def test_a_gang_whose_worker_is_gone_when_its_node_returns_starts_again_at_no_charge() -> None:
    desk = a_gang()
    lose(desk, "n2")
    told = desk.feed(registered("n2", epoch=2))
    assert kinds(told) == ["ReconcileNode", "JobRunning", "JobStopping", "StopWorkers"]
    told = desk.feed(did_exit(code=143), did_release())
    assert kinds(told) == ["AttemptEnded", "JobRequeued"]
    assert told[1].charged == 0


def test_a_gang_is_let_go_when_the_grace_is_over() -> None:
    desk = a_gang()
    lose(desk, "n2")
    assert kinds(desk.wait(299)) == []
    assert kinds(desk.wait(1)) == ["JobStopping", "StopWorkers"]
    told = desk.feed(did_exit(code=143), did_release())
    assert told[0].outcome is AttemptOutcome.LOST
    assert told[0].cause.code is Code.NODE_LOST


def test_what_a_cut_off_node_stopped_itself_is_not_the_programs_failure() -> None:
    desk = a_gang()
    lose(desk, "n2")
    exited = reported(worker=1).model_copy(update={"state": "exited"})
    desk.feed(registered("n2", epoch=2, workers=(exited,)))
    desk.feed(did_exit(worker=1, node="n2", epoch=2, code=137), did_release(worker=1, node="n2", epoch=2))
    desk.feed(did_exit(code=143), did_release())
    assert desk.last(JobRequeued).charged == 0


def test_the_grace_survives_a_restart() -> None:
    desk = a_gang()
    lose(desk, "n2")
    desk.restart(LifecycleCore())
    assert kinds(desk.wait(300)) == ["JobStopping", "StopWorkers"]


def test_without_grace_a_gang_is_stopped_when_its_node_is_lost() -> None:
    assert kinds(lose(a_gang(gang_grace=0), "n2")) == ["JobStopping", "StopWorkers"]


def test_a_rerun_stops_what_is_left_and_asks_for_the_whole_gang_again() -> None:
    desk = a_gang()
    lose(desk, "n2")
    told = desk.feed(JobRerunRequested(job_id="j1", requested_by="user:a"))
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    told = desk.feed(did_exit(code=143), did_release())
    assert kinds(told) == ["AttemptEnded", "JobRequeued"]
    assert told[1].charged == 0


def test_an_elastic_gang_goes_on_without_the_workers_of_a_lost_node() -> None:
    desk = a_gang(nodes=("n1", "n1", "n2"), min_workers=2)
    told = lose(desk, "n2")
    assert kinds(told) == ["AttemptEnded"]
    assert (told[0].workers, told[0].outcome) == ((2,), AttemptOutcome.LOST)
    desk.feed(did_exit(worker=0), did_exit(worker=1))
    assert kinds(desk.feed(did_release(worker=0), did_release(worker=1))) == ["AttemptEnded", "JobSucceeded"]


def test_an_elastic_gang_below_its_minimum_is_stopped() -> None:
    desk = a_gang(nodes=("n1", "n2", "n2"), min_workers=2, gang_grace=0)
    assert kinds(lose(desk, "n2")) == ["JobStopping", "StopWorkers"]


def test_trimmed_workers_leave_alone_and_the_job_goes_on() -> None:
    desk = a_gang(nodes=("n1", "n1", "n2"), min_workers=1)
    victims = (Victim(job_id="j1", attempt=1, workers=(2,)),)
    plan = PreemptionPlanned(plan_id="p", preemptor="j9", victims=victims, rule="reclaim", grace_seconds=60)
    told = desk.feed(plan)
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    assert told[0].workers == (2,)
    told = desk.feed(did_exit(worker=2, node="n2", code=143), did_release(worker=2, node="n2"))
    assert kinds(told) == ["AttemptEnded"]
    assert (told[0].workers, told[0].outcome) == ((2,), AttemptOutcome.PREEMPTED)
    assert state(desk) is JobState.RUNNING


def test_a_card_that_broke_moves_only_the_job_that_used_it() -> None:
    desk = a_gang(nodes=("n1", "n2"))
    out = GpuOut(node="n1", gpu="GPU-n1-7", index=7, reason=because(Code.GPU_FAULT, gpu="GPU-n1-7", xid=79))
    assert desk.feed(out) == []
    told = desk.feed(out.model_copy(update={"gpu": "GPU-n1-0", "index": 0}))
    assert kinds(told) == ["JobStopping", "StopWorkers", "StopWorkers"]
    desk.feed(did_exit(code=143), did_release())
    told = desk.feed(did_exit(worker=1, node="n2", code=143), did_release(worker=1, node="n2"))
    assert told[1].charged == 0
    assert told[1].cause.code is Code.GPU_FAULT


def test_a_silent_node_makes_its_jobs_unknown_until_it_is_heard() -> None:
    desk = a_gang()
    assert kinds(desk.feed(NodeSuspect(node="n2", epoch=1, silent_seconds=30))) == ["JobUnknown"]
    told = desk.feed(registered("n2", epoch=2, workers=(reported(worker=1),)))
    assert [t.started_at for t in told if isinstance(t, JobRunning)] == [desk.all(JobRunning)[0].started_at]
