"""Placement under arbitrary histories: the ground rules hold, and a restart changes no decision."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from berth.contracts.events import AttemptOutcome
from berth.contracts.nodes import NodeState
from tests.unit.decisions.builders import Pool, a_node, a_policy

QUOTA = {"lab": 12, "shop": 6}

step = st.one_of(
    st.tuples(
        st.just("submit"),
        st.sampled_from(["lab", "shop"]),
        st.integers(1, 3),
        st.integers(0, 8),
        st.sampled_from([10, 50, 90]),
    ),
    st.tuples(st.just("end"), st.integers(0, 20), st.sampled_from(list(AttemptOutcome))),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("node"), st.integers(1, 3), st.sampled_from(list(NodeState))),
    st.tuples(st.just("wait"), st.integers(1, 90)),
)


class History:
    def __init__(self) -> None:
        quotas = {tenant: {"quota": {"H100-80G": amount}} for tenant, amount in QUOTA.items()}
        self.pool = Pool(*(a_node(f"n{i}") for i in (1, 2, 3)), policy=a_policy(tenants=quotas))
        self.number = 0
        self.versions = Counter({1: 1, 2: 1, 3: 1})

    def play(self, verb: str, *args: Any) -> None:
        getattr(self, verb)(*args)

    def submit(self, tenant: str, workers: int, gpus: int, priority: int) -> None:
        self.number += 1
        self.pool.submit(f"j{self.number}", tenant=tenant, workers=workers, gpus=gpus, priority=priority)

    def end(self, pick: int, outcome: AttemptOutcome) -> None:
        running = sorted(self.pool.core.books.placed)
        if running:
            name = running[pick % len(running)]
            self.pool.end(name, outcome)
            if name in self.pool.core.jobs:
                self.pool.requeue(name, seconds=pick)

    def cancel(self, pick: int) -> None:
        names = sorted(self.pool.core.jobs)
        if names:
            self.pool.cancel(names[pick % len(names)])

    def node(self, number: int, state: NodeState) -> None:
        self.versions[number] += 1
        self.pool.tell(a_node(f"n{number}", version=self.versions[number], state=state))

    def wait(self, seconds: int) -> None:
        self.pool.after(seconds=seconds)


def check(pool: Pool) -> None:
    core = pool.core
    holdings = core.ledger(None).holdings
    cards = Counter(holding.gpu for holding in holdings)
    assert not cards or max(cards.values()) == 1
    for tenant, quota in QUOTA.items():
        held = sum(holding.tenant == tenant for holding in holdings)
        assert held == pool.used(tenant) <= quota
    for job in core.jobs.values():
        if job.held:
            assert len(job.held) == job.claim.shape.workers
            assert all(len(held.gpus) == job.claim.shape.largest for held in job.held)
            assert len({held.node for held in job.held}) <= 3
        elif job.phase.value in ("waiting", "resting"):
            reasons = core.explain(job.id, pool.now).reasons
            assert reasons and job.told
    free = sum(core.books.fleet.is_free(node, card) for node, card in core.books.fleet.all_cards())
    assert free == (core.books.fleet.pools["H100-80G"].free_total)
    assert int(core.books.fleet.pools["H100-80G"].free.sum()) == free


@settings(max_examples=60, deadline=None)
@given(st.lists(step, min_size=1, max_size=40))
def test_ground_rules_hold_in_any_history(steps: list[tuple[Any, ...]]) -> None:
    history = History()
    for verb, *args in steps:
        history.play(verb, *args)
        check(history.pool)


@settings(max_examples=40, deadline=None)
@given(st.lists(step, min_size=1, max_size=25), st.lists(step, min_size=1, max_size=15))
def test_restart_at_any_point_changes_no_decision(before: list[tuple[Any, ...]], after: list[tuple[Any, ...]]) -> None:
    history = History()
    for verb, *args in before:
        history.play(verb, *args)
    other = History.__new__(History)
    other.__dict__ = {**history.__dict__, "versions": Counter(history.versions)}
    other.pool = Pool.__new__(Pool)
    other.pool.__dict__ = history.pool.restarted().__dict__
    history.pool.said, history.pool.ids = [], []
    for verb, *args in after:
        history.play(verb, *args)
        other.play(verb, *args)
    assert history.pool.ids == other.pool.ids
    assert history.pool.said == other.pool.said
    assert history.pool.store == other.pool.store
