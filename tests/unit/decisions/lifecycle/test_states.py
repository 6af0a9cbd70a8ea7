"""Every pair of state and trigger: the table says where it leads, or it is refused and final states have no way out."""

from __future__ import annotations

import itertools

import pytest

from berth.contracts.jobs import FINAL_STATES, JobState
from berth.decisions.lifecycle import (
    JOB_TRANSITIONS,
    WORKER_TRANSITIONS,
    InvalidTransition,
    JobTrigger,
    WorkerPhase,
    WorkerTrigger,
    advance,
)


@pytest.mark.parametrize(("state", "trigger"), list(itertools.product(JobState, JobTrigger)))
def test_every_pair_of_a_job_is_allowed_by_the_table_or_refused(state: JobState, trigger: JobTrigger) -> None:
    if (state, trigger) in JOB_TRANSITIONS:
        assert advance(JOB_TRANSITIONS, state, trigger) is JOB_TRANSITIONS[state, trigger]
        assert state not in FINAL_STATES
    else:
        with pytest.raises(InvalidTransition, match=trigger.value):
            advance(JOB_TRANSITIONS, state, trigger)


@pytest.mark.parametrize(("phase", "trigger"), list(itertools.product(WorkerPhase, WorkerTrigger)))
def test_every_pair_of_a_worker_is_allowed_by_the_table_or_refused(phase: WorkerPhase, trigger: WorkerTrigger) -> None:
    if (phase, trigger) in WORKER_TRANSITIONS:
        assert advance(WORKER_TRANSITIONS, phase, trigger) is WORKER_TRANSITIONS[phase, trigger]
        assert phase is not WorkerPhase.OVER
    else:
        with pytest.raises(InvalidTransition):
            advance(WORKER_TRANSITIONS, phase, trigger)


def test_every_state_of_lifecycle_can_be_reached_from_waiting() -> None:
    reached, todo = {JobState.WAITING}, [JobState.WAITING]
    while todo:
        state = todo.pop()
        after = {to for (at, _), to in JOB_TRANSITIONS.items() if at is state} - reached
        reached |= after
        todo += after
    assert reached == set(JobState) - {JobState.SUBMITTED, JobState.REFUSED}
