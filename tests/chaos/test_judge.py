"""The judge finds what it is there to find: each broken promise is planted once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.chaos.judge import Asked, Placed, Use, Violation, judge_ledger, judge_outside
from tests.chaos.records import Run, runs_of


def a_run(
    job: str = "j-1", *, attempt: int = 1, worker: int = 0, fence: int = 1, at: int = 0, code: int | None = 0
) -> Run:
    return Run(
        job=job,
        attempt=attempt,
        worker=worker,
        fence=fence,
        node="n1",
        pid=100 + fence,
        gpus=("GPU-a",),
        start_ns=at,
        started_wall_ns=at,
        end_ns=None if code is None else at + 10,
        ended_wall_ns=None if code is None else at + 10,
        code=code,
    )


def asked(variant: str = "plain", *job_ids: str, workers: int = 1) -> Asked:
    return Asked("key", variant, workers, 1, list(job_ids or ("j-1",)))


def rules(found: list[Violation]) -> set[str]:
    return {violation.rule for violation in found}


GOOD = [("j-1", "berth.job.succeeded.v1")]


def test_a_clean_campaign_is_clean() -> None:
    runs = [a_run("j-1"), a_run("j-2", fence=2, at=20, code=3), a_run("j-2", attempt=2, fence=3, at=40)]
    jobs = [asked(), Asked("k2", "fail_once", 1, 1, ["j-2", "j-2"]), Asked("k3", "too_large", 1, 99, ["j-3"])]
    ends = [*GOOD, ("j-2", "berth.job.succeeded.v1"), ("j-3", "berth.job.refused.v1")]
    states = {"j-1": "succeeded", "j-2": "succeeded", "j-3": "refused"}
    assert judge_outside(jobs, runs, states, ends) == []


@pytest.mark.parametrize(
    ("rule", "jobs", "runs", "states", "ends"),
    [
        ("one key, one job", [asked("plain", "j-1", "j-2")], [a_run()], {"j-1": "succeeded"}, GOOD),
        ("one submission, one job", [asked()], [a_run()], {"j-1": "succeeded", "j-9": "waiting"}, GOOD),
        ("an answered job is not forgotten", [asked()], [a_run()], {}, GOOD),
        ("every answered job ends", [asked()], [], {"j-1": "waiting"}, []),
        ("exactly one terminal event", [asked()], [a_run()], {"j-1": "succeeded"}, GOOD + GOOD),
        ("exactly one terminal event", [asked()], [a_run()], {"j-1": "succeeded"}, []),
        ("API and record agree", [asked()], [a_run()], {"j-1": "succeeded"}, [("j-1", "berth.job.failed.v1")]),
        ("no terminal event of a stranger", [asked()], [a_run()], {"j-1": "succeeded"}, [*GOOD, ("j-8", "b.x.v1")]),
        ("no attempt runs twice", [asked()], [a_run(), a_run(at=50)], {"j-1": "succeeded"}, GOOD),
        ("only answered jobs run", [asked()], [a_run(), a_run("j-7", at=50, fence=2)], {"j-1": "succeeded"}, GOOD),
        ("a fence belongs to one attempt", [asked()], [a_run(), a_run("j-7", at=50)], {"j-1": "succeeded"}, GOOD),
        ("no GPU is held twice", [asked()], [a_run(), a_run("j-2", fence=2, at=9)], {"j-1": "succeeded"}, GOOD),
        ("no GPU is held twice", [asked()], [replace(a_run(), taken="GPU-a held by x")], {"j-1": "succeeded"}, GOOD),
        ("one attempt at a time", [asked()], [replace(a_run(), taken="j-1.0 held by x")], {"j-1": "succeeded"}, GOOD),
        ("one attempt at a time", [asked()], [a_run(), a_run(attempt=2, fence=2, at=9)], {"j-1": "succeeded"}, GOOD),
        ("fences grow", [asked()], [a_run(fence=5), a_run(attempt=2, fence=2, at=90)], {"j-1": "succeeded"}, GOOD),
        ("succeeded means it did", [asked()], [a_run(code=1)], {"j-1": "succeeded"}, GOOD),
        ("succeeded means it did", [asked("plain", workers=2)], [a_run()], {"j-1": "succeeded"}, GOOD),
        ("work done counts", [asked()], [a_run()], {"j-1": "failed"}, [("j-1", "berth.job.failed.v1")]),
        ("no work is lost", [asked()], [a_run(code=None)], {"j-1": "succeeded"}, GOOD),
        (
            "nothing runs again after success",
            [asked()],
            [a_run(), a_run(attempt=2, fence=2, at=90)],
            {"j-1": "succeeded"},
            GOOD,
        ),
    ],
)
def test_a_broken_promise_is_found(
    rule: str, jobs: list[Asked], runs: list[Run], states: dict[str, str], ends: list[tuple[str, str]]
) -> None:
    assert rule in rules(judge_outside(jobs, runs, states, ends))


def test_a_ledger_that_disagrees_with_the_programs_is_found() -> None:
    run = replace(a_run(), started_wall_ns=int(5e9), ended_wall_ns=int(9e9))
    grant = Placed("j-1", 1, 1, 0, frozenset({"GPU-a"}))
    fine = Use("j-1", 1, 1.0, 4.0, 9.5)
    assert judge_ledger([run], [fine], [grant]) == []
    assert rules(judge_ledger([run], [], [grant])) == {"what runs is in the ledger"}
    assert rules(judge_ledger([run], [replace(fine, released_s=8.0)], [grant])) == {
        "a card is free when its program is gone"
    }
    assert rules(judge_ledger([run], [replace(fine, released_s=None)], [grant])) == {"all cards are free again"}
    assert rules(judge_ledger([run], [fine], [replace(grant, gpus=frozenset({"GPU-b"}))])) == {
        "programs have what was placed"
    }


def test_records_are_read_back_as_runs() -> None:
    base = {"job": "j", "attempt": 1, "worker": 0, "fence": 7, "node": "n", "pid": 5, "wall_ns": 1}
    lines = [
        {**base, "what": "start", "ns": 10, "gpus": ["GPU-a"]},
        {**base, "what": "end", "ns": 20, "code": 0},
        {**base, "what": "start", "ns": 30, "gpus": ["GPU-a"], "pid": 6, "attempt": 2},
        {**base, "what": "taken", "ns": 31, "lock": "GPU-a", "holder": "x", "pid": 6},
    ]
    first, second = runs_of(lines)
    assert (first.attempt, first.end_ns, first.code) == (1, 20, 0)
    assert (second.attempt, second.end_ns, second.taken) == (2, None, "GPU-a held by x")
