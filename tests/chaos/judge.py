"""Judges a campaign by what lies outside Berth: the answers users got, and the programs' own records.

Berth's ledger and record are compared with them afterwards; they prove nothing by themselves. Every rule returns its
violations with the evidence, so that a failure can be looked into without running it again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.records import Run

FINAL = frozenset({"refused", "succeeded", "failed", "cancelled", "reclaimed"})
EXPECTED: Mapping[str, frozenset[str]] = {
    "plain": frozenset({"succeeded"}),
    "stubborn": frozenset({"succeeded"}),
    "fail_once": frozenset({"succeeded"}),
    "deaf": frozenset({"succeeded"}),
    "fail": frozenset({"failed"}),
    "too_large": frozenset({"refused"}),
}
"""Outcomes by variant; a job that a user cancelled may end as `cancelled` too."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise and what shows it."""

    rule: str
    evidence: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.evidence}"


@dataclass(slots=True)
class Asked:
    """One submission as its user knows it. job_ids: of every answer that came, in order; more than one after retries."""

    key: str
    variant: str
    workers: int
    gpus: int
    """For each worker."""
    job_ids: list[str] = field(default_factory=list)
    cancelled: bool = False
    """Whether a cancel was asked for, answered or not."""

    @property
    def job_id(self) -> str | None:
        """None: never answered."""
        return self.job_ids[0] if self.job_ids else None


@dataclass(frozen=True, slots=True)
class Use:
    """What the ledger says: one attempt's hold on its cards, in wall-clock seconds; None while it lasts."""

    job: str
    attempt: int
    gpus: float
    taken_s: float
    released_s: float | None


@dataclass(frozen=True, slots=True)
class Placed:
    """What the record says was given to one worker."""

    job: str
    attempt: int
    fence: int
    worker: int
    gpus: frozenset[str]


def judge_outside(
    asked: Sequence[Asked],
    runs: Sequence[Run],
    states: Mapping[str, str],
    terminal_events: Sequence[tuple[str, str]],
    *,
    control_plane_faults_only: bool = True,
) -> list[Violation]:
    """Everything that users and programs can tell.

    Args:
        states: job id -> state, of every job that the API lists.
        terminal_events: (job id, event type) for every terminal event in the record.
        control_plane_faults_only: nothing was done to the programs or their nodes, so no attempt may be lost.
    """
    known = {job.job_id: job for job in asked if job.job_id is not None}
    return [
        *_one_job_for_each_submission(asked, states),
        *_one_outcome(known, states, terminal_events),
        *_nothing_runs_twice(runs, known),
        *_no_card_held_twice(runs),
        *_attempts_follow_each_other(runs),
        *_outcome_fits_runs(known, states, runs),
        *(_no_work_lost(known, runs) if control_plane_faults_only else ()),
    ]


def _one_job_for_each_submission(asked: Sequence[Asked], states: Mapping[str, str]) -> Iterable[Violation]:
    for job in asked:
        if job.job_id is None:
            yield Violation("every submission is answered in the end", job.key)
        if len(set(job.job_ids)) > 1:
            yield Violation("one key, one job", f"{job.key} was answered with {job.job_ids}")
    answered = {job.job_id for job in asked}
    for job_id in states.keys() - answered:
        yield Violation("one submission, one job", f"{job_id} is listed, but answers no submission")


def _one_outcome(
    known: Mapping[str, Asked], states: Mapping[str, str], terminal_events: Sequence[tuple[str, str]]
) -> Iterable[Violation]:
    ends: dict[str, list[str]] = defaultdict(list)
    for job_id, type_ in terminal_events:
        ends[job_id].append(type_)
    for job_id, job in known.items():
        state = states.get(job_id)
        allowed = EXPECTED[job.variant] | (frozenset({"cancelled"}) if job.cancelled else frozenset())
        if state is None:
            yield Violation("an answered job is not forgotten", f"{job_id} ({job.key}) is not listed")
        elif state not in FINAL:
            yield Violation("every answered job ends", f"{job_id} ({job.variant}) is {state}")
        elif state not in allowed:
            yield Violation("the outcome is the program's", f"{job_id} ({job.variant}) is {state}, not {set(allowed)}")
        told = ends.pop(job_id, [])
        if len(told) != 1:
            yield Violation("exactly one terminal event", f"{job_id} ({job.variant}, {state}): {told or 'none'}")
        elif state in FINAL and told[0].split(".")[-2] != state:
            yield Violation("API and record agree", f"{job_id} is {state}, the record says {told[0]}")
    for stranger, told in ends.items():
        yield Violation("no terminal event of a stranger", f"{stranger}: {told}")


def _nothing_runs_twice(runs: Sequence[Run], known: Mapping[str, Asked]) -> Iterable[Violation]:
    starts = Counter((run.job, run.attempt, run.worker) for run in runs)
    for (job, attempt, worker), times in starts.items():
        if times > 1:
            names = [run.name for run in runs if (run.job, run.attempt, run.worker) == (job, attempt, worker)]
            yield Violation("no attempt runs twice", "; ".join(names))
    fences: dict[int, tuple[str, int]] = {}
    for run in runs:
        if run.job not in known:
            yield Violation("only answered jobs run", run.name)
        owner = fences.setdefault(run.fence, (run.job, run.attempt))
        if owner != (run.job, run.attempt):
            yield Violation("a fence belongs to one attempt", f"{run.name} and {owner}")


def _no_card_held_twice(runs: Sequence[Run]) -> Iterable[Violation]:
    for run in runs:
        if run.taken:
            rule = "one attempt at a time" if run.taken.startswith(f"{run.job}.") else "no GPU is held twice"
            yield Violation(rule, f"{run.name} could not lock {run.taken}")
    by_card: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        for gpu in run.gpus:
            by_card[gpu].append(run)
    for gpu, holders in by_card.items():
        for before, after in pairwise(sorted(holders, key=lambda run: run.start_ns)):
            if before.end_ns is not None and before.end_ns > after.start_ns:  # no end: killed; the lock has judged
                overlap = (before.end_ns - after.start_ns) / 1e6
                yield Violation("no GPU is held twice", f"{gpu} for {overlap:.1f} ms by {before.name} and {after.name}")


def _attempts_follow_each_other(runs: Sequence[Run]) -> Iterable[Violation]:
    by_job: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_job[run.job].append(run)
    for of_job in by_job.values():
        for before in of_job:
            for after in of_job:
                if before.attempt >= after.attempt:
                    continue
                if before.fence >= after.fence:
                    yield Violation("fences grow", f"{before.name}, then {after.name}")
                if before.end_ns is not None and before.end_ns > after.start_ns:
                    yield Violation("one attempt at a time", f"{after.name} began before {before.name} ended")


def _outcome_fits_runs(
    known: Mapping[str, Asked], states: Mapping[str, str], runs: Sequence[Run]
) -> Iterable[Violation]:
    by_attempt: dict[str, dict[int, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        by_attempt[run.job][run.attempt].append(run)
    for job_id, job in known.items():
        attempts = by_attempt.get(job_id, {})
        good = [number for number, of in attempts.items() if len(of) == job.workers and all(r.code == 0 for r in of)]
        state = states.get(job_id)
        if state == "succeeded" and not good:
            told = {number: [r.code for r in of] for number, of in attempts.items()}
            yield Violation("succeeded means it did", f"{job_id} ({job.variant}): exit codes by attempt {told}")
        if good and state != "succeeded" and not job.cancelled:
            yield Violation("work done counts", f"{job_id} is {state}, but attempt {good[0]} ended well")
        if good and max(attempts) > good[0]:
            yield Violation("nothing runs again after success", f"{job_id}: attempts {sorted(attempts)}, good {good}")
        for of in attempts.values():
            for run in of:
                if len(run.gpus) != job.gpus:
                    yield Violation("a worker gets the cards it asked for", f"{run.name}: {len(run.gpus)}/{job.gpus}")


def _no_work_lost(known: Mapping[str, Asked], runs: Sequence[Run]) -> Iterable[Violation]:
    """Losing any part of the control plane kills no work: only what failed by itself is run again."""
    for run in runs:
        job = known.get(run.job)
        if job is None or job.cancelled:
            continue
        if run.end_ns is None or run.code == 143:
            yield Violation("no work is lost", f"{run.name} ({job.variant}) was stopped; nobody asked for that")


def judge_ledger(runs: Sequence[Run], uses: Sequence[Use], placed: Sequence[Placed]) -> list[Violation]:
    """What Berth says it gave, against what the programs had. Its clock is this machine's."""
    found: list[Violation] = []
    by_attempt = {(use.job, use.attempt): use for use in uses}
    if len(by_attempt) != len(uses):
        found.append(Violation("one use for each attempt", f"{len(uses)} rows for {len(by_attempt)} attempts"))
    given = {(p.job, p.attempt, p.worker): p for p in placed}
    for use in uses:
        if use.released_s is None:
            found.append(Violation("all cards are free again", f"{use.job} attempt {use.attempt} holds {use.gpus}"))
    for run in runs:
        grant = given.get((run.job, run.attempt, run.worker))
        if grant is None or grant.gpus != frozenset(run.gpus) or grant.fence != run.fence:
            found.append(Violation("programs have what was placed", f"{run.name} had {run.gpus}, placed: {grant}"))
        held = by_attempt.get((run.job, run.attempt))
        if held is None:
            found.append(Violation("what runs is in the ledger", run.name))
            continue
        ended = run.ended_wall_ns  # the record hears of a release after it happened, never before
        if held.released_s is not None and ended is not None and held.released_s < ended / 1e9:
            early = ended / 1e9 - held.released_s
            found.append(
                Violation("a card is free when its program is gone", f"{run.name}: released {early:.3f} s early")
            )
    return found
