"""Placement under arbitrary histories and policies: the ground rules hold, and a restart changes no decision."""

from __future__ import annotations

import os
from collections import Counter
from fractions import Fraction
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from berth.contracts.events import AttemptOutcome, JobPlaced, JobStopping, PreemptionPlanned
from berth.contracts.nodes import NodeState
from berth.contracts.reasons import Code, because
from tests.unit.decisions.builders import Pool, a_node, of_type

HISTORIES = int(os.environ.get("BERTH_TEST_HISTORIES", "60"))
"""More of them make a long run."""
TENANTS = ("lab", "shop", "ops")
CLASSES = ("training", "inference", "interactive", "general")

preemption = st.fixed_dictionaries(
    {},
    optional={
        "by_priority": st.sampled_from(["off", "same_tenant", "any_tenant"]),
        "reclaim": st.sampled_from(["off", "borrowed"]),
        "fair": st.sampled_from(["off", "final_share"]),
        "trim_elastic": st.booleans(),
        "min_runtime": st.sampled_from([0, 60]),
        "grace": st.just(60),
        "victim_order": st.permutations(["borrowed_first", "lowest_priority", "fewest_gpus", "latest_started"]),
    },
)
line = st.fixed_dictionaries(
    {"class": st.sampled_from(CLASSES), "reserved": st.just({"H100-80G": 4})},
    optional={
        "lend_when_idle": st.booleans(),
        "when_unmet": st.sampled_from(["wait", "preempt_lower_class"]),
        "may_preempt": st.just(["general"]),
        "max_preempt_share": st.sampled_from([0.25, 0.5]),
        "windows": st.just([{"from": "08:02", "to": "08:05", "zone": "UTC"}]),
        "clear_before": st.just("1m"),
    },
)
class_settings = st.fixed_dictionaries(
    {},
    optional={
        "queue": st.fixed_dictionaries(
            {"discipline": st.sampled_from(["strict", "backfill", "best_effort"])},
            optional={"reserve_after": st.sampled_from([0, 90])},
        ),
        "preemption": preemption,
        "fair_share": st.fixed_dictionaries({"basis": st.sampled_from(["none", "current", "history"])}),
        "placement": st.fixed_dictionaries({"strategy": st.sampled_from(["pack", "spread"])}),
        "quota_cut": st.sampled_from(["drain", "preempt"]),
    },
)
tenant = st.fixed_dictionaries(
    {},
    optional={
        "quota": st.fixed_dictionaries({"H100-80G": st.sampled_from([0, 4, 10, 0.5])}),
        "cohort": st.just("all"),
        "lend_limit": st.just({"H100-80G": 2}),
        "borrow_limit": st.just({"H100-80G": 3}),
        "weight": st.sampled_from([0, 1, 2]),
    },
)
policies = st.fixed_dictionaries(
    {"tenants": st.fixed_dictionaries(dict.fromkeys(TENANTS, tenant)), "defaults": class_settings},
    optional={
        "class_order": st.just(["inference", "interactive", "training", "general"]),
        "protection": st.lists(line, max_size=2).map(
            lambda lines: [{**each, "name": f"line{n}"} for n, each in enumerate(lines) if _is_sane(each)]
        ),
        "cohorts": st.just({"all": {"shared": {"H100-80G": 2}}}),
    },
)


def _is_sane(each: dict[str, Any]) -> bool:
    return each["class"] not in each.get("may_preempt", ())


job = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(TENANTS),
        "class": st.sampled_from(CLASSES),
        "priority": st.sampled_from([10, 50, 90]),
    },
    optional={
        "workers": st.integers(1, 3),
        "time_limit": st.sampled_from(["1m", "5m"]),
        "preemptible": st.booleans(),
    },
)
need = st.one_of(
    st.fixed_dictionaries({"gpus": st.integers(0, 6)}),
    st.fixed_dictionaries({"share": st.sampled_from([0.1, 0.5, 1.0])}),
    st.fixed_dictionaries({"memory_gib": st.sampled_from([10, 30])}),
    st.fixed_dictionaries({"gpus": st.integers(1, 3), "gang": st.just(False)}),
    st.fixed_dictionaries({"gpus": st.integers(1, 3), "workers": st.just(3), "min_workers": st.integers(1, 2)}),
    st.fixed_dictionaries({"gpus": st.integers(1, 4), "within": st.sampled_from(["rack", "node"])}),
)
step = st.one_of(
    st.tuples(st.just("submit"), job, need),
    st.tuples(st.just("submit"), job, need),
    st.tuples(st.just("end"), st.integers(0, 20), st.sampled_from(list(AttemptOutcome))),
    st.tuples(st.just("evict"), st.integers(0, 20)),
    st.tuples(st.just("lose"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("node"), st.integers(1, 3), st.sampled_from(list(NodeState))),
    st.tuples(st.just("wait"), st.integers(1, 120)),
    st.tuples(st.just("policy"), policies),
)


class History:
    def __init__(self, policy: dict[str, Any]) -> None:
        nodes = [a_node(f"n{i}", domain={"rack": f"r{i % 2}"}, shareable=i == 3) for i in (1, 2, 3)]
        self.pool = Pool(*nodes, policy=policy)
        self.number = 0
        self.versions = Counter({1: 1, 2: 1, 3: 1})
        self.notices: Counter[tuple[str, int, tuple[int, ...] | None]] = Counter()
        self.attempts: Counter[str] = Counter()

    def play(self, verb: str, *args: Any) -> None:
        before = len(self.pool.said)
        getattr(self, "do_" + verb)(*args)
        for plan in of_type(self.pool.said[before:], PreemptionPlanned):
            for victim in plan.victims:
                self.notices[victim.job_id, victim.attempt, victim.workers] += 1
        for placed in of_type(self.pool.said[before:], JobPlaced):
            if placed.attempt > self.attempts[placed.job_id]:
                assert placed.attempt == self.attempts[placed.job_id] + 1
                self.attempts[placed.job_id] = placed.attempt

    def do_submit(self, fields: dict[str, Any], need: dict[str, Any]) -> None:
        self.number += 1
        self.pool.submit(f"j{self.number}", **{**fields, **need})

    def _some(self, pick: int, *, leaving: bool = False) -> str | None:
        core = self.pool.core
        names = sorted(n for n, each in core.books.placed.items() if each.leaving or not leaving)
        return names[pick % len(names)] if names else None

    def do_end(self, pick: int, outcome: AttemptOutcome) -> None:
        name = self._some(pick)
        if name is not None:
            self.pool.end(name, outcome)
            if name in self.pool.core.jobs:
                self.pool.requeue(name, seconds=pick)

    def do_evict(self, pick: int) -> None:
        """One that was told to stop is gone."""
        name = self._some(pick, leaving=True)
        if name is None:
            return
        each = self.pool.core.jobs[name]
        if each.is_leaving:
            self.pool.tell(JobStopping(job_id=name, attempt=each.attempt, cause=because(Code.PREEMPTED)))
            self.pool.end(name, AttemptOutcome.PREEMPTED)
            self.pool.requeue(name)
        else:
            self.pool.end(name, AttemptOutcome.PREEMPTED, workers=sorted(each.leaving))

    def do_lose(self, pick: int) -> None:
        name = self._some(pick)
        if name is not None and len(self.pool.core.jobs[name].held) > 1:
            self.pool.end(name, AttemptOutcome.LOST, workers=[self.pool.core.jobs[name].held[-1].worker])

    def do_cancel(self, pick: int) -> None:
        names = sorted(self.pool.core.jobs)
        if names:
            self.pool.cancel(names[pick % len(names)])

    def do_node(self, number: int, state: NodeState) -> None:
        self.versions[number] += 1
        domain = {"rack": f"r{number % 2}"}
        self.pool.tell(
            a_node(f"n{number}", version=self.versions[number], state=state, domain=domain, shareable=number == 3)
        )

    def do_wait(self, seconds: int) -> None:
        self.pool.after(seconds=seconds)

    def do_policy(self, policy: dict[str, Any]) -> None:
        self.pool.set_policy(policy)


def check(history: History) -> None:
    core = history.pool.core
    books = core.books
    whole: Counter[str] = Counter()
    shares: dict[str, Fraction] = {}
    used: dict[str, Any] = {}
    for each in core.jobs.values():
        assert bool(each.held) <= (each.phase.value == "placed")
        for held in each.held:
            used[each.claim.tenant] = used.get(each.claim.tenant, 0) + held.amount
            for gpu in held.gpus:
                if held.part is None:
                    whole[gpu] += 1
                else:
                    shares[gpu] = shares.get(gpu, Fraction(0)) + (held.part.share or 0)
        shape = each.claim.shape
        if each.held and shape.is_gang and shape.min_workers is None and each.id not in core._cancels:
            assert each.leaving or len(each.held) + len(each.missing) == shape.workers
        if each.phase.value in ("waiting", "resting"):
            assert core.explain(each.id, history.pool.now).reasons
            assert each.told
    assert not whole or max(whole.values()) == 1
    assert all(share <= 1 for share in shares.values())
    assert not set(whole) & set(shares)
    for name, amount in used.items():
        assert books.quota.of(name, "H100-80G").used == amount
    for _, _, standing in books.quota.used_lines():
        assert standing.leaving >= 0
        assert standing.claimed >= 0
    free = 0
    for node, card in books.fleet.all_cards():
        free += books.fleet.is_free(node, card)
        if card.owner.startswith("hold:"):
            assert books.held_for[card.uuid] == card.owner[5:] in core.state.plans
    pool = books.fleet.pools["H100-80G"]
    assert free == pool.free_total == int(pool.free.sum())
    assert not history.notices or max(history.notices.values()) == 1
    for plan in core.state.plans.values():
        assert core.jobs[plan.job_id].phase.value == "waiting" or core.jobs[plan.job_id].missing


def check_quota(history: History, before: dict[str, Any]) -> None:
    """Nobody comes to hold more than its quota and what it may borrow."""
    book = history.pool.core.books.quota
    for name in TENANTS:
        standing = book.of(name, "H100-80G")
        ceiling = book.ceiling(name, "H100-80G")
        if ceiling is not None and standing.used > before.get(name, 0):
            assert standing.used <= ceiling
            if standing.cohort is not None:
                assert book.pot_left(standing.cohort, "H100-80G") >= 0 or book.excess(name, "H100-80G") == 0


@settings(max_examples=HISTORIES, deadline=None)
@given(policies, st.lists(step, min_size=1, max_size=40))
def test_ground_rules_hold_in_any_history(policy: dict[str, Any], steps: list[tuple[Any, ...]]) -> None:
    history = History(policy)
    for verb, *args in steps:
        book = history.pool.core.books.quota
        before = {name: book.of(name, "H100-80G").used for name in TENANTS}
        history.play(verb, *args)
        check(history)
        if verb != "policy":
            check_quota(history, before)


@settings(max_examples=HISTORIES * 2 // 3, deadline=None)
@given(policies, st.lists(step, min_size=1, max_size=25), st.lists(step, min_size=1, max_size=15))
def test_restart_at_any_point_changes_no_decision(
    policy: dict[str, Any], before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]
) -> None:
    history = History(policy)
    for verb, *args in before:
        history.play(verb, *args)
    other = History.__new__(History)
    other.__dict__ = {
        **history.__dict__,
        "versions": Counter(history.versions),
        "notices": Counter(),
        "attempts": Counter(history.attempts),
    }
    other.pool = Pool.__new__(Pool)
    other.pool.__dict__ = history.pool.restarted().__dict__
    history.pool.said, history.pool.ids = [], []
    for verb, *args in after:
        history.play(verb, *args)
        other.play(verb, *args)
        assert history.pool.said == other.pool.said
    assert history.pool.ids == other.pool.ids
    assert history.pool.store == other.pool.store
