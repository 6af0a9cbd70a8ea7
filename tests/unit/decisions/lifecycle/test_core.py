"""What lifecycle tells and orders, event by event."""

from __future__ import annotations

from datetime import timedelta

import pytest

from berth.contracts.commands import LaunchWorkers
from berth.contracts.events import (
    AttemptEnded,
    AttemptOutcome,
    CommandRefused,
    JobCancelled,
    JobFailed,
    JobRunning,
    JobSucceeded,
    NodeLost,
    PreemptionPlanned,
    StaleReportIgnored,
    Victim,
)
from berth.contracts.jobs import JobState
from berth.contracts.reasons import Code, because
from berth.decisions.lifecycle import LifecycleCore
from tests.unit.decisions.desks import (
    START,
    Desk,
    a_spec,
    admitted,
    cancel,
    did_exit,
    did_release,
    did_start,
    kinds,
    placed,
    policy,
    registered,
    reported,
)


@pytest.fixture
def desk() -> Desk[LifecycleCore]:
    desk = Desk(LifecycleCore())
    desk.feed(registered("n1"), registered("n2"))
    return desk


def a_running_pair(desk: Desk[LifecycleCore], **spec: object) -> None:
    desk.feed(admitted(spec=a_spec(workers=2, **spec)), placed(nodes=("n1", "n2")))
    desk.feed(did_start(worker=0), did_start(worker=1, node="n2"))


def refused(desk: Desk[LifecycleCore], code: Code, *, epoch: int = 1, command: type = LaunchWorkers) -> CommandRefused:
    return CommandRefused(
        command_id=desk.command_id(command),
        command=command.VERB,
        node="n1",
        epoch=epoch,
        job_id="j1",
        attempt=1,
        fence=1,
        reason=because(code),
    )


def lost(node: str, epoch: int = 1) -> NodeLost:
    return NodeLost(node=node, epoch=epoch, silent_seconds=300)


def preempted(attempt: int = 1) -> PreemptionPlanned:
    return PreemptionPlanned(
        plan_id="p1",
        preemptor="j9",
        victims=(Victim(job_id="j1", attempt=attempt),),
        rule="priority",
        grace_seconds=60,
    )


def test_a_job_runs_from_placement_to_success(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted())
    told = desk.feed(placed())
    assert kinds(told) == ["LaunchWorkers"]
    assert told[0].epoch == 1
    assert told[0].expires_at > desk.now
    assert kinds(desk.feed(did_start())) == ["JobRunning"]
    assert kinds(desk.feed(did_exit(code=0))) == []
    told = desk.feed(did_release())
    assert kinds(told) == ["AttemptEnded", "JobSucceeded"]
    assert told[0].outcome is AttemptOutcome.SUCCEEDED


def test_a_gang_gets_one_command_per_node_and_its_workers_find_each_other(desk: Desk[LifecycleCore]) -> None:
    spec = a_spec(workers=3, env={"MASTER_PORT": "1", "BERTH_JOB_ID": "fake", "MODE": "fast"})
    desk.feed(admitted(spec=spec), placed(nodes=("n1", "n2", "n2"), fence=5))
    first, second = desk.all(LaunchWorkers)
    assert (first.node, second.node) == ("n1", "n2")
    assert second.env["MASTER_ADDR"] == "10.0.0.1"
    assert second.env["MASTER_PORT"] == "1"  # the user's own
    assert second.env["BERTH_JOB_ID"] == "j1"  # never the user's
    assert second.env["WORLD_SIZE"] == "3"
    assert [(p.env["RANK"], p.env["LOCAL_RANK"]) for p in second.workers] == [("1", "0"), ("2", "1")]
    assert kinds(desk.feed(did_start(worker=0, fence=5), did_start(worker=1, node="n2", fence=5))) == []
    assert kinds(desk.feed(did_start(worker=2, node="n2", fence=5))) == ["JobRunning"]


def test_one_failed_worker_stops_its_gang_and_the_job_ends_when_the_last_card_is_released(
    desk: Desk[LifecycleCore],
) -> None:
    a_running_pair(desk)
    told = desk.feed(did_exit(worker=1, node="n2", code=3, message="boom"), did_release(worker=1, node="n2"))
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    assert told[1].workers == (0,)
    assert kinds(desk.feed(did_exit(worker=0, code=143))) == []
    told = desk.feed(did_release(worker=0))
    assert kinds(told) == ["AttemptEnded", "JobFailed"]
    assert told[0].cause.code is Code.PROGRAM_FAILED
    assert told[0].exit_code == 3
    assert told[1].message == "boom"


def test_own_failures_are_charged_and_wait_longer_each_time_until_all_restarts_are_spent(
    desk: Desk[LifecycleCore],
) -> None:
    desk.feed(policy(recovery={"max_restarts": 2, "backoff": {"first": 60, "factor": 2}}), admitted())
    for attempt, pause in ((1, 60), (2, 120)):
        desk.feed(placed(attempt=attempt, fence=attempt))
        ids = {"attempt": attempt, "fence": attempt}
        told = desk.feed(did_start(**ids), did_exit(code=1, **ids), did_release(**ids))
        assert kinds(told)[-1] == "JobRequeued"
        assert told[-1].not_before == desk.now + timedelta(seconds=pause)
        assert told[-1].charged == attempt
    desk.feed(placed(attempt=3, fence=3))
    told = desk.feed(did_start(attempt=3, fence=3), did_exit(code=1, attempt=3, fence=3))
    assert kinds(desk.feed(did_release(attempt=3, fence=3))) == ["AttemptEnded", "JobFailed"]


def test_a_jobs_own_max_restarts_wins_over_policy(desk: Desk[LifecycleCore]) -> None:
    desk.feed(policy(recovery={"max_restarts": 5}), admitted(spec=a_spec(max_restarts=0)), placed())
    assert kinds(desk.feed(did_start(), did_exit(code=1), did_release()))[-1] == "JobFailed"


def test_independent_workers_end_alone_and_the_job_fails_after_the_others(desk: Desk[LifecycleCore]) -> None:
    a_running_pair(desk, gang=False)
    told = desk.feed(did_exit(worker=0, code=1), did_release(worker=0))
    assert kinds(told) == ["AttemptEnded"]
    assert told[0].workers == (0,)
    told = desk.feed(did_exit(worker=1, node="n2"), did_release(worker=1, node="n2"))
    assert kinds(told) == ["AttemptEnded", "JobFailed"]
    assert told[0].workers is None


def test_independent_workers_placed_later_join_the_attempt(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(spec=a_spec(workers=2, gang=False)), placed(nodes=("n1",)))
    told = desk.feed(did_start(), did_exit(), did_release())
    assert kinds(told) == ["JobRunning", "AttemptEnded"]  # worker 1 has had no place yet
    late = placed(fence=2, nodes=("n2", "n2"))
    desk.feed(late.model_copy(update={"assignments": late.assignments[1:]}))
    assert desk.last(LaunchWorkers).fence == 2
    report = {"worker": 1, "node": "n2", "fence": 2}
    told = desk.feed(did_start(**report), did_exit(**report), did_release(**report))
    assert kinds(told) == ["AttemptEnded", "JobSucceeded"]


def test_the_time_limit_counts_from_running(desk: Desk[LifecycleCore]) -> None:
    desk.feed(policy(recovery={"max_restarts": 3}), admitted(spec=a_spec(time_limit=600)), placed())
    desk.wait(50)
    desk.feed(did_start())
    assert kinds(desk.wait(599)) == []
    told = desk.wait(1)
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    told = desk.feed(did_exit(code=0), did_release())
    assert kinds(told) == ["AttemptEnded", "JobFailed"]
    assert told[1].cause.code is Code.TIME_LIMIT


def test_cancel_before_placement_is_remembered_and_nothing_is_launched(desk: Desk[LifecycleCore]) -> None:
    desk.feed(cancel())
    told = desk.feed(admitted(), placed())
    assert kinds(told) == ["AttemptEnded", "JobCancelled"]
    assert desk.all(LaunchWorkers) == []


def test_cancel_while_running_stops_with_the_jobs_grace_and_tells_the_end_once(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(spec=a_spec(stop_grace=20)), placed(), did_start())
    told = desk.feed(cancel(), cancel())
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    assert told[1].grace_seconds == 20
    told = desk.feed(did_exit(code=0), did_release(), cancel())
    assert kinds(told) == ["AttemptEnded", "JobCancelled"]
    assert told[0].outcome is AttemptOutcome.CANCELLED


def test_cancel_after_requeue_is_left_to_placement_and_then_forgotten(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), preempted())
    desk.feed(did_exit(code=143), did_release())
    assert kinds(desk.feed(cancel())) == []
    assert kinds(desk.feed(JobCancelled(job_id="j1", ended_at=START))) == []
    job = desk.core.job("j1")
    assert job is not None
    assert job.state is JobState.CANCELLED


def test_a_preempted_job_is_requeued_at_once_without_charge_whatever_its_last_words(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start())
    told = desk.feed(preempted())
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    assert told[0].by == "j9"
    told = desk.feed(did_exit(code=1), did_release())
    assert kinds(told) == ["AttemptEnded", "JobRequeued"]
    assert told[0].outcome is AttemptOutcome.PREEMPTED
    assert (told[1].charged, told[1].not_before) == (0, desk.now)


def test_a_plan_against_an_earlier_attempt_stops_nothing(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(attempt=2, fence=2), did_start(attempt=2, fence=2))
    assert kinds(desk.feed(preempted(attempt=1))) == []


def test_a_preempted_job_that_finished_in_its_grace_has_succeeded(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), preempted())
    assert kinds(desk.feed(did_exit(code=0), did_release())) == ["AttemptEnded", "JobSucceeded"]


def test_a_lost_node_ends_its_workers_and_the_rest_of_the_gang_is_stopped_first(desk: Desk[LifecycleCore]) -> None:
    a_running_pair(desk)
    told = desk.feed(lost("n2"))
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    told = desk.feed(did_exit(worker=0, code=143), did_release(worker=0))
    assert kinds(told) == ["AttemptEnded", "JobRequeued"]
    assert told[0].outcome is AttemptOutcome.LOST
    assert told[1].cause.code is Code.NODE_LOST
    assert told[1].charged == 0


def test_node_faults_are_charged_where_policy_says_so(desk: Desk[LifecycleCore]) -> None:
    desk.feed(policy(recovery={"max_restarts": 1, "charge_job_for_node_faults": True}))
    desk.feed(admitted(), placed(), did_start())
    assert desk.feed(lost("n1"))[-1].charged == 1


def test_a_registration_is_answered_with_reconcile_first_and_keeps_the_newest_fences(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(fence=3), did_start(fence=3))
    told = desk.feed(registered("n1", epoch=2, workers=(reported(fence=3), reported("old", fence=1))))
    assert kinds(told) == ["ReconcileNode"]
    assert [(k.job_id, k.fence) for k in told[0].keep] == [("j1", 3)]
    assert told[0].epoch == 2


def test_a_launch_that_never_arrived_is_sent_again_under_the_new_epoch(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed())
    told = desk.feed(registered("n1", epoch=2))
    assert kinds(told) == ["ReconcileNode", "LaunchWorkers"]
    assert (told[1].epoch, told[1].fence) == (2, 1)


def test_a_refusal_of_the_old_epochs_launch_does_not_send_a_third(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed())
    first = refused(desk, Code.WRONG_EPOCH, epoch=2)
    desk.feed(registered("n1", epoch=2))
    assert desk.feed(first) == []
    desk.feed(did_start(epoch=2))
    assert len(desk.all(LaunchWorkers)) == 2


def test_an_expired_launch_is_sent_again(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed())
    desk.wait(70)
    assert kinds(desk.feed(refused(desk, Code.EXPIRED))) == []
    assert kinds(desk.wait(1)) == ["LaunchWorkers"]


def test_a_launch_refused_for_good_gives_the_job_back_without_charge(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed())
    told = desk.feed(refused(desk, Code.GPU_BUSY))
    assert kinds(told) == ["AttemptEnded", "JobRequeued"]
    assert told[0].outcome is AttemptOutcome.NEVER_STARTED
    assert told[1].charged == 0


def test_a_command_that_no_node_could_start_is_the_jobs_own_failure(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed())
    told = desk.feed(did_exit(code=None, reason=because(Code.START_REFUSED, errno=2, error="no such file")))
    assert told == []
    told = desk.feed(did_release())
    assert kinds(told) == ["AttemptEnded", "JobFailed"]
    assert told[1].cause.facts["error"] == "no such file"


def test_a_start_that_the_node_refused_counts_against_the_node(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed())
    told = desk.feed(did_exit(code=None, reason=because(Code.START_REFUSED, errno=11)), did_release())
    assert kinds(told) == ["StartFailed", "AttemptEnded", "JobRequeued"]


def test_starts_that_keep_going_wrong_are_spaced_out(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted())
    pauses = []
    for attempt in range(1, 7):
        desk.feed(placed(attempt=attempt, fence=attempt))
        ids = {"attempt": attempt, "fence": attempt}
        told = desk.feed(did_exit(code=None, reason=because(Code.START_REFUSED), **ids), did_release(**ids))
        pauses.append((told[-1].not_before - desk.now).total_seconds())
    assert pauses == [0, 0, 0, 2, 4, 8]


def test_a_running_worker_that_the_node_no_longer_has_is_lost(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start())
    told = desk.feed(registered("n1", epoch=2))
    assert kinds(told) == ["ReconcileNode", "AttemptEnded", "JobRequeued"]
    assert told[2].cause.code is Code.WORKER_LOST


def test_an_end_the_node_has_yet_to_report_is_waited_for(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start())
    report = reported().model_copy(update={"state": "exited"})
    assert kinds(desk.feed(registered("n1", epoch=2, workers=(report,)))) == ["ReconcileNode"]
    assert kinds(desk.feed(did_exit(epoch=2), did_release(epoch=2))) == ["AttemptEnded", "JobSucceeded"]


def test_a_stop_not_done_is_sent_again_under_the_new_epoch(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), cancel())
    told = desk.feed(registered("n1", epoch=2, workers=(reported(),)))
    assert kinds(told) == ["ReconcileNode", "StopWorkers"]
    assert told[1].epoch == 2


def test_a_stop_without_effect_is_sent_again(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), cancel())
    assert kinds(desk.wait(3600)).count("StopWorkers") > 1


def test_repeats_and_late_reports_change_nothing_and_are_noted_once_per_kind(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), did_exit(), did_release())
    assert len(desk.all(JobSucceeded)) == 1
    for _ in range(3):
        desk.feed(did_start(), did_exit(code=1), did_release())
    assert [s.report for s in desk.all(StaleReportIgnored)] == ["WorkerStarted", "WorkerExited", "WorkerReleased"]
    assert len(desk.all(JobSucceeded)) == 1
    assert desk.all(JobFailed) == []


def test_reports_with_an_older_fence_are_ignored(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), preempted(), did_exit(code=1), did_release())
    desk.feed(placed(attempt=2, fence=7))
    desk.feed(did_start(), did_exit(code=0), did_release())
    assert len(desk.all(JobRunning)) == 1
    assert len(desk.all(AttemptEnded)) == 1


def test_reports_with_an_older_fence_are_ignored_within_one_attempt_too(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(spec=a_spec(workers=2, gang=False)), placed(nodes=("n1", "n2")))
    desk.feed(did_start(worker=0), did_start(worker=1, node="n2"), lost("n2"))
    again = placed(fence=2, nodes=("n1", "n1"))
    desk.feed(again.model_copy(update={"assignments": again.assignments[1:]}))
    assert kinds(desk.feed(did_exit(worker=1, fence=1), did_release(worker=1, fence=1))) == ["StaleReportIgnored"] * 2


def test_a_release_that_overtakes_the_exit_waits_for_it(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start())
    assert desk.feed(did_release()) == []
    assert kinds(desk.feed(did_exit(code=0))) == ["AttemptEnded", "JobSucceeded"]


def test_placement_before_admission_is_launched_when_the_job_is_known(desk: Desk[LifecycleCore]) -> None:
    assert desk.feed(placed()) == []
    assert kinds(desk.feed(admitted())) == ["LaunchWorkers"]


def test_a_job_placed_on_a_node_already_lost_is_given_back_unstarted(desk: Desk[LifecycleCore]) -> None:
    desk.feed(lost("n1"), admitted())
    told = desk.feed(placed())
    assert kinds(told) == ["AttemptEnded", "JobRequeued"]
    assert desk.all(LaunchWorkers) == []


def test_ids_are_unique_and_go_on_after_a_restart(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start())
    desk.restart(LifecycleCore())
    told = desk.feed(cancel())
    assert kinds(told) == ["JobStopping", "StopWorkers"]
    assert len(set(desk.ids)) == len(desk.ids)
    assert kinds(desk.feed(did_exit(code=9), did_release())) == ["AttemptEnded", "JobCancelled"]


def test_ended_jobs_leave_nothing_behind_but_a_tombstone_that_goes_too(desk: Desk[LifecycleCore]) -> None:
    desk.feed(admitted(), placed(), did_start(), did_exit(), did_release())
    assert ("spec", "j1") not in desk.records
    assert desk.records["job", "j1"]["workers"] == []
    desk.now += timedelta(hours=3)
    desk.settle()
    assert ("job", "j1") not in desk.records
