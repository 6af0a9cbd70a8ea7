"""Random histories of the whole platform, held to the ground rules at every instant.

Every verb of the scenarios may come at any time, on a random cluster under a random policy. What is watched is what the
scenarios' player watches (`berth.sim.scenarios.nevers`), and that at the end, when everything is ended, nothing is held.

`python -m tests.properties.histories --count 2000` runs many and prints how often each verb and fault came.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from datetime import UTC, datetime, timedelta
from statistics import median
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from berth.contracts.jobs import JobState
from berth.sim.scenarios.nevers import Watch
from berth.sim.scenarios.player import Stage
from berth.sim.scenarios.scenario import Scenario, duration

START = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
TYPES = ("H100-80G", "A10-24G")
TENANTS = ("red", "blue", "green")
SPANS = ("1s", "5s", "20s", "1m", "2m", "6m", "20m", "1h", "5h")

nodes = st.sampled_from(["n1", "n2", "n3", "s1"])
jobs = st.integers(0, 40)


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    """Any mixture of the knobs."""
    policy: dict[str, Any] = {
        "queue": {"discipline": draw(st.sampled_from(["best_effort", "strict", "backfill"]))},
        "preemption": {
            "by_priority": draw(st.sampled_from(["off", "same_tenant", "any_tenant"])),
            "reclaim": draw(st.sampled_from(["off", "borrowed"])),
            "fair": draw(st.sampled_from(["off", "off", "final_share"])),
            "trim_elastic": draw(st.booleans()),
            "victim_order": draw(
                st.sampled_from([["lowest_priority", "latest_started"], ["borrowed_first", "fewest_gpus"]])
            ),
            "grace": "5m",
            "min_runtime": draw(st.sampled_from(["0s", "2m"])),
        },
        "placement": {
            "strategy": draw(st.sampled_from(["pack", "spread"])),
            "keep_links_whole": draw(st.booleans()),
        },
        "fair_share": {"basis": draw(st.sampled_from(["none", "current", "history"])), "half_life": "1d"},
        "recovery": {
            "suspect_after": "30s",
            "lost_after": "2m",
            "gang_grace": draw(st.sampled_from(["0s", "3m"])),
            "max_restarts": draw(st.integers(0, 2)),
            "backoff": {"first": "10s", "factor": 2, "max": "1m"},
            "charge_job_for_node_faults": draw(st.booleans()),
        },
        "health": {"fatal_xids": [79], "harmless_xids": [31]},
        "cleaning": {"wait": "30s", "kill_unknown": draw(st.booleans())},
        "quota_cut": draw(st.sampled_from(["drain", "preempt"])),
        "types": {"when_full": draw(st.sampled_from(["next_type_first", "preempt_first"]))},
    }
    if draw(st.booleans()):
        policy["idle"] = {"timeout": "10m", "warn_before": "2m", "counts": ["kernel_busy", "gpu_util"]}
        policy["lifetime"] = {"max": "2h", "warn_before": "10m", "extend_by": "30m", "extensions": 1}
        policy["telemetry"] = {"stale_after": "5m"}
    if draw(st.booleans()):
        policy["recovery"]["quarantine"] = {"failures": 2, "within": "10m"}
    if draw(st.booleans()):
        policy["class_order"] = ["inference", "interactive", "training", "general"]
    return policy


@st.composite
def job_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Any job that a user could ask for."""
    job: dict[str, Any] = {
        "tenant": draw(st.sampled_from(TENANTS)),
        "class": draw(st.sampled_from(["training", "inference", "interactive", "general"])),
        "priority": draw(st.sampled_from([10, 50, 50, 90])),
    }
    unit = draw(st.sampled_from(["gpus", "gpus", "gpus", "gang", "gang", "share", "memory", "elastic", "loose"]))
    if unit == "gpus":
        job["gpus"] = draw(st.integers(1, 4))
    elif unit == "share":
        job |= {"share": draw(st.sampled_from([0.1, 0.25, 0.5])), "types": ["A10-24G"]}
    elif unit == "memory":
        job |= {"memory_gib": draw(st.sampled_from([3, 8, 12])), "types": ["A10-24G"]}
    else:
        job |= {"workers": draw(st.integers(2, 4)), "gpus": draw(st.integers(1, 2))}
        if unit == "elastic":
            job["min_workers"] = 1
        elif unit == "loose":
            job["gang"] = False
    if "types" not in job and draw(st.booleans()):
        job["types"] = draw(st.sampled_from([["H100-80G"], ["H100-80G", "A10-24G"]]))
    if draw(st.booleans()):
        job["runtime"] = draw(st.sampled_from(SPANS[2:]))
    if draw(st.booleans()):
        job["stop_time"] = draw(st.sampled_from(["10s", "1m"]))
    if draw(st.integers(0, 4)) == 0:
        job["time_limit"] = draw(st.sampled_from(["5m", "1h"]))
    if draw(st.integers(0, 4)) == 0:
        job["crashes"] = {
            "after": "5s",
            "times": draw(st.sampled_from([1, 2, "always"])),
            "as": draw(st.sampled_from(["program_failed", "start_refused"])),
        }
    job["checkpoint"] = draw(st.booleans())
    return job


class Histories(RuleBasedStateMachine):
    """One history."""

    seen: ClassVar[Counter[str]] = Counter()
    lengths: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.stage: Stage | None = None
        self.names: list[str] = []
        self.services: list[str] = []
        self.verbs: set[str] = set()
        self.steps = 0

    # ----------------------------------------------------------------------------------------------------- set up
    @initialize(policy=policies(), quotas=st.lists(st.integers(2, 12), min_size=3, max_size=3), limits=st.booleans())
    def begin(self, policy: dict[str, Any], quotas: list[int], limits: bool) -> None:
        tenants: list[dict[str, Any]] = [
            {"name": name, "cohort": "all", "quota": {"H100-80G": quota, "A10-24G": 2}}
            for name, quota in zip(TENANTS, quotas, strict=True)
        ]
        if limits:
            tenants[0]["borrow_limit"] = {"H100-80G": 2}
            tenants[1]["lend_limit"] = {"H100-80G": 1}
        body = {
            "cluster": {
                "levels": ["rack"],
                "nodes": [
                    {"names": ["n1", "n2"], "type": "H100-80G", "gpus": 4, "domain": {"rack": "r1"}},
                    {"names": ["n3"], "type": "H100-80G", "gpus": 4, "links": [[0, 1], [2, 3]]},
                    {"names": ["s1"], "type": "A10-24G", "gpus": 2, "memory_gib": 24, "shareable": True},
                ],
            },
            "policy": policy,
            "tenants": tenants,
        }
        self.stage = Stage(Scenario("history", "core", START, body, ()))
        self.watch = Watch(self.stage)
        self.stage.platform.after_round = self.watch.look
        self.stage.build()

    def do(self, verb: str, **args: Any) -> None:
        assert self.stage is not None
        self.verbs.add(verb)
        self.steps += 1
        self.stage.do(verb, args)
        self.stage.platform.settle()

    def name(self, pick: int) -> str | None:
        return self.names[pick % len(self.names)] if self.names else None

    # ------------------------------------------------------------------------------------------------------- users
    @rule(job=job_bodies())
    def submit(self, job: dict[str, Any]) -> None:
        name = f"j{len(self.names) + 1}"
        self.names.append(name)
        self.do("submit", job={**job, "name": name})

    @rule(job=job_bodies(), times=st.integers(2, 5))
    def submit_many(self, job: dict[str, Any], times: int) -> None:
        name = f"m{len(self.names) + 1}"
        self.names += [f"{name}-{n + 1}" for n in range(times)]
        self.do("submit", job={**job, "name": name}, times=times)

    @rule(pick=jobs, verb=st.sampled_from(["cancel", "cancel", "forget", "rerun", "extend", "deliver_twice"]))
    def user(self, pick: int, verb: str) -> None:
        name = self.name(pick)
        if name is not None:
            key = "submission" if verb == "deliver_twice" else "job"
            self.do(verb, **{key: name})

    @rule(pick=jobs, outcome=st.sampled_from(["succeeded", "succeeded", "failed"]), whole=st.booleans())
    def end(self, pick: int, outcome: str, whole: bool) -> None:
        name = self.name(pick)
        if name is not None:
            self.do("end", job=name, outcome=outcome, **({} if whole else {"worker": 0}))

    @rule(span=st.sampled_from(SPANS))
    def time_passes(self, span: str) -> None:
        assert self.stage is not None
        self.steps += 1
        self.stage.platform.advance(self.stage.platform.clock.now + duration(span))

    @rule(pick=jobs, says=st.sampled_from(["running", "succeeded", "failed", "released"]), times=st.integers(1, 3))
    def told_again(self, pick: int, says: str, times: int) -> None:
        """About an attempt that is over: what a node says of a live one is true."""
        assert self.stage is not None
        name = self.name(pick)
        job = self.stage.job(name) if name else None
        if job is not None and job.attempt > 1:
            self.do("event", job=name, attempt=job.attempt - 1, says=says, times=times)
        elif job is not None and job.attempt == 1 and not job.holds:
            self.do("event", job=name, attempt=1, says=says, times=times)

    @rule(pick=jobs, busy=st.booleans(), fresh=st.booleans(), gpu=st.sampled_from([0.0, 0.5]))
    def signal(self, pick: int, busy: bool, fresh: bool, gpu: float) -> None:
        name = self.name(pick)
        if name is not None:
            self.do("signal", job=name, kernel="busy" if busy else "idle", gpu_util=gpu, fresh=fresh)

    # -------------------------------------------------------------------------------------------------------- nodes
    @rule(node=nodes)
    def node_silent(self, node: str) -> None:
        assert self.stage is not None
        if self.stage.platform.fleet.agents[node].is_reachable:
            self.do("node_silent", node=node)

    @rule(node=nodes, keeps=st.booleans())
    def node_back(self, node: str, keeps: bool) -> None:
        assert self.stage is not None
        agent = self.stage.platform.fleet.agents[node]
        if not agent.is_reachable:
            running = {w.job_id for w in agent.workers.values() if not w.is_fenced} if keeps else set()
            self.do("node_back", node=node, still_running=[n for n, j in self.stage.names.items() if j in running])

    @rule(node=nodes, verb=st.sampled_from(["cordon", "uncordon", "agent_stop", "agent_start", "clock"]))
    def operate(self, node: str, verb: str) -> None:
        assert self.stage is not None
        agent = self.stage.platform.fleet.agents[node]
        if verb == "clock":
            self.do(verb, node=node, off_by="+1h")
        elif verb != "agent_start" or not agent.is_up:
            self.do(verb, node=node)

    @rule(node=nodes, gpu=st.integers(0, 1), what=st.sampled_from(["fatal", "harmless", "repaired", "dirty", "clean"]))
    def card(self, node: str, gpu: int, what: str) -> None:
        match what:
            case "fatal" | "harmless":
                self.do("gpu_fault", node=node, gpu=gpu, xid=79 if what == "fatal" else 31)
            case "repaired":
                self.do("gpu_repaired", node=node, gpu=gpu)
            case "dirty" | "clean":
                self.do("gpu_memory_seen", node=node, gpu=gpu, used_gib=20 if what == "dirty" else 0)

    @rule(verb=st.sampled_from(["controller_restart", "bus_stop", "bus_start", "bus_start", "node_added"]))
    def platform_part(self, verb: str) -> None:
        assert self.stage is not None
        platform = self.stage.platform
        if verb == "node_added":
            name = f"x{len(platform.fleet.agents)}"
            self.do(verb, nodes={"names": [name], "type": "H100-80G", "gpus": 2})
        elif verb == "controller_restart" or (verb == "bus_stop") is platform.bus.is_up:
            self.do(verb)

    # ------------------------------------------------------------------------------------------------------- policy
    @rule(tenant=st.sampled_from(TENANTS), gpus=st.integers(0, 12))
    def set_quota(self, tenant: str, gpus: int) -> None:
        self.do("set_quota", tenant=tenant, quota={"H100-80G": gpus, "A10-24G": 2})

    @rule(policy=policies())
    def set_policy(self, policy: dict[str, Any]) -> None:
        self.do("set_policy", policy=policy)

    @rule(tenant=st.sampled_from(TENANTS))
    def leave_cohort(self, tenant: str) -> None:
        self.do("leave_cohort", tenant=tenant)

    # ----------------------------------------------------------------------------------------------------- services
    @precondition(lambda self: len(self.services) < 2)
    @rule(least=st.integers(0, 2), timeout=st.booleans())
    def serve(self, least: int, timeout: bool) -> None:
        name = f"svc{len(self.services) + 1}"
        self.services.append(name)
        service = {"min": least, "max": 4, "load_per_replica": 10, "scale_down_after": "2m", "cold_start": "20s"}
        service |= {"to_zero_after": "5m"} if least == 0 else {}
        service |= {"ready_timeout": "1m"} if timeout else {}
        self.do("submit", job={"name": name, "tenant": "red", "class": "inference", "gpus": 1, "service": service})

    @precondition(lambda self: self.services)
    @rule(
        pick=st.integers(0, 1),
        verb=st.sampled_from(["load", "load", "rollout", "rollback", "version_health", "set_rollout"]),
        number=st.integers(0, 50),
    )
    def service(self, pick: int, verb: str, number: int) -> None:
        name = self.services[pick % len(self.services)]
        arguments: dict[str, dict[str, Any]] = {
            "load": {"in_flight": number},
            "rollout": {"version": f"v{number % 3}"},
            "rollback": {},
            "version_health": {"version": f"v{number % 3}", "healthy": number % 2 == 0},
            "set_rollout": {"surge": number % 2, "unavailable": number % 3},
        }
        self.do(verb, service=name, **arguments[verb])

    # -------------------------------------------------------------------------------------------------------- rules
    @invariant()
    def ground_rules_hold(self) -> None:
        if self.stage is None:
            return
        if self.stage.platform.bus.is_up:
            self.watch.settled()
        if self.watch.found:
            note(f"at {self.stage.platform.clock.now}")
        assert self.watch.found == []
        assert [f"{p.service}: {p.event.id}: {p.why}" for p in self.stage.platform.bus.parked] == []

    def teardown(self) -> None:
        """Everything that was broken is mended and everybody cancels: then nothing is held and every end was told."""
        if self.stage is None:
            return
        stage, platform = self.stage, self.stage.platform
        if self.watch.found:
            return
        if not platform.bus.is_up:
            stage.do("bus_start", {})
        for agent in platform.fleet.agents.values():
            if not agent.is_up:
                platform.fleet.start_agent(agent.node)
            if not agent.is_reachable:
                platform.fleet.back(agent.node)
            for gpu in range(len(agent.description.gpus)):
                platform.fleet.memory(agent.node, gpu, 0)
        platform.settle()
        for name in [*self.names, *self.services]:
            stage.do("cancel", {"job": name})
        platform.advance(platform.clock.now + timedelta(hours=2))
        assert self.watch.found == []
        open_ = [
            (job.spec.name, job.state.value)
            for job in stage.views.jobs.values()
            if not job.state.is_final and job.state is not JobState.REFUSED
        ]
        assert open_ == []
        assert [line for line in stage.placement.quota(None, platform.clock.now).lines if line.used] == []
        assert [agent.node for agent in platform.fleet.agents.values() if agent.workers] == []
        Histories.lengths.append(self.steps)
        Histories.seen.update(self.verbs)


def history_settings(count: int, *, steps: int = 65) -> settings:
    """So many histories, whatever time each takes."""
    return settings(
        max_examples=count,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        derandomize="HISTORIES" not in os.environ,
        print_blob=True,
    )


def main() -> None:
    """Run many, and say what they were made of."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    run_state_machine_as_test(Histories, settings=history_settings(args.count))
    total = len(Histories.lengths)
    print(f"{total} histories, median {median(Histories.lengths)} steps")
    for verb, count in sorted(Histories.seen.items(), key=lambda entry: -entry[1]):
        print(f"  {verb:<20} in {100 * count / total:5.1f} %")


if __name__ == "__main__":
    main()
