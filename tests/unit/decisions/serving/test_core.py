"""Replicas of a service: made, dismissed, replaced, rolled out and back."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from berth.contracts.events import (
    AttemptEnded,
    AttemptOutcome,
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobFailed,
    RollbackRequested,
    RolloutRefused,
    RolloutRequested,
    RolloutSettingsChanged,
    RolloutWithdrawn,
    ServiceAdmitted,
    ServiceLoadReported,
    ServiceScaled,
    WorkerReady,
)
from berth.contracts.jobs import ServiceSpec
from berth.contracts.reasons import Code, because
from berth.decisions.serving import ServingCore
from berth.decisions.serving.core import VERSION_LABEL
from tests.unit.decisions.desks import START, Desk, a_spec, kinds, placed, policy


class Front(Desk[ServingCore]):
    """A desk that plays the other parts: replicas get a place and become ready."""

    def __init__(self, **service: Any) -> None:
        super().__init__(ServingCore())
        self.feed(policy())
        spec = a_spec("chat", job_class="inference", service=ServiceSpec(**{"min": 1, "max": 6, **service}))
        self.begun = self.feed(
            ServiceAdmitted(job_id="s1", spec=spec, submitted_at=START, submitted_by="user:a", policy_version=1)
        )

    def load(self, in_flight: float) -> list[Any]:
        return self.feed(ServiceLoadReported(job_id="s1", in_flight=in_flight, sampled_at=self.now))

    def ready(self, *names: str) -> list[Any]:
        told = []
        for name in names:
            told += self.feed(placed(name))
            told += self.feed(
                WorkerReady(job_id=name, attempt=1, fence=1, worker=0, node="n1", epoch=1),
            )
        return told

    def gone(self, *names: str) -> list[Any]:
        return self.feed(*(JobCancelled(job_id=name, ended_at=self.now) for name in names))

    def rollout(self, to: str, canary: int | None = None) -> list[Any]:
        return self.feed(
            RolloutRequested(job_id="s1", request_id="q", to_version=to, canary=canary, requested_by="user:a")
        )


def made(told: list[Any]) -> list[str]:
    return [t.job_id for t in told if isinstance(t, JobAdmitted)]


def dismissed(told: list[Any]) -> list[str]:
    return [t.job_id for t in told if isinstance(t, JobCancelRequested)]


def test_a_service_begins_with_its_minimum_and_each_replica_is_a_job_without_service() -> None:
    front = Front(min=2)
    assert made(front.begun) == ["s1-r1", "s1-r2"]
    assert all(t.spec.service is None and t.spec.workers == 1 for t in front.begun)


def test_load_that_came_before_the_service_counts() -> None:
    desk = Desk(ServingCore())
    desk.feed(ServiceLoadReported(job_id="s1", in_flight=120, sampled_at=START))
    spec = a_spec("chat", job_class="inference", service=ServiceSpec(min=1, max=6, load_per_replica=50))
    told = desk.feed(
        ServiceAdmitted(job_id="s1", spec=spec, submitted_at=START, submitted_by="user:a", policy_version=1)
    )
    assert len(made(told)) == 3


def test_scaling_down_dismisses_those_that_do_not_answer_first_then_the_newest() -> None:
    front = Front(load_per_replica=10, scale_down_after=60)
    front.load(40)
    front.ready("s1-r1", "s1-r2", "s1-r4")
    front.wait(1)
    front.load(20)
    told = front.wait(60)
    assert dismissed(told) == ["s1-r3", "s1-r4"]
    assert (front.last(ServiceScaled).from_, front.last(ServiceScaled).to) == (4, 2)


def test_a_replica_lost_for_good_is_replaced_after_a_pause() -> None:
    front = Front()
    front.ready("s1-r1")
    failed = JobFailed(job_id="s1-r1", attempt=1, cause=because(Code.PROGRAM_FAILED), ended_at=front.now)
    assert made(front.feed(failed)) == []
    assert made(front.wait(2)) == ["s1-r2"]


def test_a_preempted_replica_waits_under_its_own_name() -> None:
    front = Front()
    front.ready("s1-r1")
    ended = AttemptEnded(job_id="s1-r1", attempt=1, fence=1, outcome=AttemptOutcome.PREEMPTED, ended_at=front.now)
    assert made(front.feed(ended)) == []


def test_to_zero_counts_from_when_a_ready_replica_falls_idle() -> None:
    front = Front(min=0, max=2, load_per_replica=10, to_zero_after=300)
    assert front.begun == []
    assert made(front.load(3)) == ["s1-r1"]
    assert front.wait(900) == []  # loading
    front.ready("s1-r1")
    front.load(0)
    assert dismissed(front.wait(299)) == []
    assert dismissed(front.wait(1)) == ["s1-r1"]


def test_a_rollout_adds_within_the_surge_and_removes_only_what_others_stand_in_for() -> None:
    front = Front(min=2, max=2, surge=1, unavailable=0)
    front.ready("s1-r1", "s1-r2")
    told = front.rollout("v2")
    assert (made(told), dismissed(told)) == (["s1-r3"], [])
    told = front.ready("s1-r3")
    assert (made(told), dismissed(told)) == (["s1-r4"], ["s1-r2"])
    told = front.ready("s1-r4")
    assert dismissed(told) == ["s1-r1"]
    assert kinds(told)[-1] == "RolloutFinished"


def test_without_surge_one_goes_before_one_comes() -> None:
    front = Front(min=2, max=2, surge=0, unavailable=1)
    front.ready("s1-r1", "s1-r2")
    told = front.rollout("v2")
    assert (made(told), dismissed(told)) == (["s1-r3"], ["s1-r2"])


def test_a_canary_stays_one_and_the_number_wanted_is_kept() -> None:
    front = Front(min=3, max=3, surge=1, unavailable=0)
    front.ready("s1-r1", "s1-r2", "s1-r3")
    assert made(front.rollout("v2", canary=1)) == ["s1-r4"]
    assert dismissed(front.ready("s1-r4")) == ["s1-r3"]
    assert made(front.wait(3600)) == []
    assert made(front.rollout("v2")) == ["s1-r5"]


def test_a_new_version_that_does_not_get_ready_is_withdrawn_once() -> None:
    front = Front(min=2, max=2, surge=1, unavailable=0, ready_timeout=180)
    front.ready("s1-r1", "s1-r2")
    front.rollout("v2", canary=1)
    front.feed(placed("s1-r3"))
    told = front.wait(180)
    assert kinds(told) == ["RolloutWithdrawn", "JobCancelRequested"]
    assert told[0].reason.code is Code.NOT_READY
    front.gone("s1-r3")
    assert front.feed(RollbackRequested(job_id="s1", requested_by="user:a")) == []
    assert len(front.all(RolloutWithdrawn)) == 1


def test_a_rollback_keeps_enough_ready_on_the_way_back() -> None:
    front = Front(min=2, max=2, surge=1, unavailable=0)
    front.ready("s1-r1", "s1-r2")
    front.rollout("v2")
    front.ready("s1-r3")
    front.gone("s1-r2")
    told = front.feed(RollbackRequested(job_id="s1", requested_by="user:a"))
    assert dismissed(told) == ["s1-r4"]  # it was still loading
    assert made(told) == ["s1-r5"]
    assert front.all(JobAdmitted)[-1].spec.labels[VERSION_LABEL] == "v1"
    assert dismissed(front.ready("s1-r5")) == ["s1-r3"]


def test_a_finished_rollout_can_be_taken_back() -> None:
    front = Front(min=1, max=1)
    front.ready("s1-r1")
    front.rollout("v2")
    front.ready("s1-r2")
    front.gone("s1-r1")
    told = front.feed(RollbackRequested(job_id="s1", requested_by="user:a"))
    assert kinds(told) == ["RolloutWithdrawn", "JobAdmitted"]


@pytest.mark.parametrize("settings", [{"surge": 0, "unavailable": 0}])
def test_a_rollout_that_could_never_move_is_refused(settings: dict[str, int]) -> None:
    front = Front(min=1, max=1)
    front.feed(RolloutSettingsChanged(job_id="s1", **settings))
    front.rollout("v2")
    assert len(front.all(RolloutRefused)) == 1


def test_a_cancelled_service_ends_when_its_last_replica_has() -> None:
    front = Front(min=2, max=2)
    cancel = JobCancelRequested(job_id="s1", requested_by="user:a")
    assert dismissed(front.feed(cancel, cancel)) == ["s1-r1", "s1-r2"]
    assert kinds(front.gone("s1-r1")) == []
    assert kinds(front.gone("s1-r2")) == ["JobCancelled"]


def test_stale_load_scales_nothing_down() -> None:
    front = Front(load_per_replica=10, scale_down_after=60)
    document = {"telemetry": {"stale_after": 120}}
    front.feed(policy(2).model_copy(update={"document": document}))
    front.load(40)
    frozen = ServiceLoadReported(job_id="s1", in_flight=1, sampled_at=START - timedelta(seconds=1))
    for _ in range(30):
        front.wait(60)
        front.feed(frozen)
    assert [s.to for s in front.all(ServiceScaled)] == [4]
    assert "TelemetryStale" in kinds([data for _, data in front.told])


def test_a_restart_goes_on_where_it_was() -> None:
    front = Front(min=1, max=4, load_per_replica=10, scale_down_after=60)
    front.load(30)
    front.ready("s1-r1", "s1-r2")
    front.wait(1)
    front.load(10)
    front.restart(ServingCore())
    assert dismissed(front.wait(60)) == ["s1-r3", "s1-r2"]
    assert len(set(front.ids)) == len(front.ids)
