"""A simulated pool whose decisions are recorded as the services record theirs, and any history played on it.

A history is a list of steps, each a verb and two numbers that say what exactly; so a seed, or a property test, can make
any history, and the same one twice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import orjson

from berth.contracts.envelope import Envelope
from berth.contracts.jobs import JobSpec
from berth.contracts.nodes import GpuDescription, NodeDescription
from berth.decisions.core import DECISIONS_VERSION
from berth.decisions.health import InventoryCore
from berth.decisions.recording import Note, Tally, emission_body, event_id
from berth.replay.record_file import (
    Header,
    RecordedEvent,
    Start,
    commit_line,
    end_line,
    event_line,
    header_line,
    parse,
)
from berth.replay.rerun import Difference, Verdict, replay
from berth.sim.bus import Batch, SimBus
from berth.sim.platform import Platform
from berth.sim.programs import Program

BEGIN: Final = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
STEPS: Final = 150

Step = tuple[str, int, int]
VERBS: Final = (
    "submit",
    "submit_gang",
    "submit_urgent",
    "cancel",
    "wait",
    "end",
    "crash",
    "silence",
    "back",
    "fault",
    "repair",
    "cordon",
    "uncordon",
    "agent",
    "restart",
    "restart_all",
    "policy",
    "split",
)
_WEIGHTS: Final = (8, 4, 3, 2, 8, 5, 2, 1, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1)
_TENANTS: Final = ("research", "product", "ops", "nobody")
_CLASSES: Final = ("training", "inference", "interactive", "general")
_NODES: Final = ("n1", "n2", "n3", "n4")


def random_steps(seed: int, count: int = STEPS) -> list[Step]:
    """A history from a seed."""
    chance = random.Random(seed)
    verbs = chance.choices(VERBS, weights=_WEIGHTS, k=count)
    return [(verb, chance.randrange(1 << 16), chance.randrange(1 << 16)) for verb in verbs]


def replay_simulation(seed: int, *, count: int = STEPS) -> Verdict:
    """Simulate twice with one seed and replay the first: all three must tell the same."""
    first, second = record_simulation(random_steps(seed, count)), record_simulation(random_steps(seed, count))
    verdict = replay(parse(first))
    if verdict.difference is None and first != second:
        at = next(n for n, (one, two) in enumerate(zip(first, second, strict=False)) if one != two)
        one, two = first[at].decode(), second[at].decode()
        what = f"two runs with seed {seed} differ from line {at + 1} of their records on"
        verdict.difference = Difference("sim", what, place=at + 1, expected=one, actual=two)
    return verdict


def record_simulation(steps: Sequence[Step], *, chance: random.Random | None = None) -> list[bytes]:
    """Play a history; its record as the lines of a file. chance: splits batches as it likes."""
    platform = Platform(BEGIN, through_json=True)
    recorder = _Recorder(platform.bus)
    if chance is not None:
        platform.bus.batch_size = lambda service, waiting: chance.randint(1, waiting) if waiting else 0
    play = _Play(platform)
    for step in steps:
        play.do(step)
    platform.settle()
    return list(recorder.lines())


class _Recorder:
    """Writes down what the deciding services would."""

    def __init__(self, bus: SimBus) -> None:
        self._bus = bus
        self._entries: list[tuple[int, int, bytes]] = []
        self._seqs: dict[str, int] = {}
        self._seq = 0
        self._positions: dict[str, int] = {}
        self._commits: dict[str, int] = {}
        self._loaded: dict[str, datetime] = {}
        bus.listen(self._event)
        bus.on_batch = self._batch
        bus.on_restart = self._restarted

    def lines(self) -> Iterator[bytes]:
        """The whole record."""
        starts = {name: Start(0, 0, commits) for name, commits in sorted(self._commits.items())}
        yield header_line(Header("sim", starts))
        commits = sum(is_commit for _, is_commit, _ in self._entries)
        for _, _, line in sorted(self._entries, key=lambda entry: entry[:2]):
            yield line
        yield end_line(events=len(self._entries) - commits, commits=commits)

    def _event(self, event: Envelope[Any]) -> None:
        self._seq += 1
        self._seqs[event.id] = self._seq
        recorded = RecordedEvent(self._seq, event.type, event.to_json(), self._bus.clock.now.isoformat())
        self._entries.append((self._seq, 0, event_line(recorded)))

    def _restarted(self, service: str) -> None:
        self._loaded[service] = self._bus.clock.now

    def _batch(self, batch: Batch) -> None:
        service = batch.service
        if service == InventoryCore.NAME:
            return
        seqs = [self._seqs[event.id] for event in batch.events]
        tally = Tally()
        for emission in batch.settled.emissions:
            tally.add(event_id(emission), emission_body(emission))
        is_first = service not in self._commits
        note = Note(sums=tally.sums, loaded=self._loaded.pop(service, batch.now if is_first else None))
        note.settings = self._bus.core(service).settings
        if len(batch.took) != len(batch.events):
            note.took = [self._seqs[event.id] for event in batch.took]
        position = self._positions.get(service, 0)
        self._commits[service] = number = self._commits.get(service, 0) + 1
        noted = note.to_json()
        last_seq = seqs[-1] if seqs else position
        row = {
            "id": number,
            "first_seq": seqs[0] if seqs else position + 1,
            "last_seq": last_seq,
            "timers": batch.settled.timers,
            "emitted": len(batch.settled.emissions),
            "clock": batch.now.isoformat(),
            "decisions_version": DECISIONS_VERSION,
            "policy_version": str(self._bus.core(service).policy_version),
            "digest": tally.digest().hex(),
            "note": None if noted is None else orjson.loads(noted),
        }
        self._positions[service] = last_seq
        self._entries.append((last_seq, 1, commit_line(service, row)))


class _Play:
    """Carries out steps; numbers choose among what there is."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.programs: dict[str, Program] = {}
        self.jobs: list[str] = []
        fleet = self.platform.fleet
        fleet.program_of = lambda job_id: self.programs.get(job_id, Program())
        self.platform.propose(_policy(0, 0))
        self.platform.settle()
        for index, node in enumerate(_NODES):
            fleet.add(_described(node, index))
        self.platform.settle()

    def do(self, step: Step) -> None:
        """One step, with all that follows from it at that instant."""
        verb, one, two = step
        getattr(self, f"_{verb}")(one, two)
        self.platform.settle()

    # ------------------------------------------------------------------------------------------------------- jobs
    def _submit(self, one: int, two: int) -> None:
        self._hand_in(one, two, {"gpus": 1 + one % 4, "priority": two % 5})

    def _submit_gang(self, one: int, two: int) -> None:
        self._hand_in(one, two, {"gpus": 1 + two % 4, "workers": 1 + one % 4, "priority": two % 3})

    def _submit_urgent(self, one: int, two: int) -> None:
        self._hand_in(one, two, {"gpus": 1 + one % 8, "priority": 100})

    def _hand_in(self, one: int, two: int, asked: dict[str, Any]) -> None:
        spec = {
            "name": f"job-{len(self.jobs)}",
            "tenant": _TENANTS[one % 13 % 4],
            "class": _CLASSES[two % 4],
            "command": ["true"],
            "max_restarts": two % 3,
            **asked,
        }
        if two % 5 == 0:
            spec["types"] = ["H100-80G"]
        job_id = f"j{len(self.jobs)}"
        ends = None if one % 3 == 0 else float(5 + two % 300)
        self.programs[job_id] = Program(runtime=ends, stop_seconds=one % 20, crashes=two % 3, crash_after=_crash(one))
        self.jobs.append(self.platform.submit(JobSpec.model_validate(spec), job_id=job_id))

    def _job(self, number: int) -> str | None:
        return self.jobs[-1 - number % min(len(self.jobs), 12)] if self.jobs else None

    def _cancel(self, one: int, two: int) -> None:
        self.platform.cancel(self._job(one) or "j-nobody-knows")

    def _end(self, one: int, two: int) -> None:
        if job := self._job(one):
            self.platform.fleet.end(job, succeeded=two % 3 > 0)

    def _crash(self, one: int, two: int) -> None:
        if job := self._job(one):
            self.platform.fleet.end(job, succeeded=False)

    # ----------------------------------------------------------------------------------------------- time and nodes
    def _wait(self, one: int, two: int) -> None:
        seconds = (1, 7, 45, 240, 1800)[one % 5] + two % 10
        self.platform.advance(self.platform.clock.now + timedelta(seconds=seconds))

    def _silence(self, one: int, two: int) -> None:
        agent = self.platform.fleet.agents[_NODES[one % len(_NODES)]]
        if agent.is_heard:
            self.platform.fleet.silence(agent.node)

    def _back(self, one: int, two: int) -> None:
        for agent in self.platform.fleet.agents.values():
            if not agent.is_reachable:
                self.platform.fleet.back(agent.node)

    def _fault(self, one: int, two: int) -> None:
        self.platform.fleet.fault(_NODES[one % len(_NODES)], two % 4, (79, 13, 48)[two % 3])

    def _repair(self, one: int, two: int) -> None:
        self.platform.fleet.repaired(_NODES[one % len(_NODES)], two % 4)

    def _cordon(self, one: int, two: int) -> None:
        self.platform.cordon(_NODES[one % len(_NODES)], cordoned=True)

    def _uncordon(self, one: int, two: int) -> None:
        for node in _NODES:
            self.platform.cordon(node, cordoned=False)

    def _agent(self, one: int, two: int) -> None:
        node = _NODES[one % len(_NODES)]
        if self.platform.fleet.agents[node].is_heard:
            self.platform.fleet.stop_agent(node)
            self.platform.advance(self.platform.clock.now + timedelta(seconds=1 + two % 5))
            self.platform.fleet.start_agent(node)

    # --------------------------------------------------------------------------------------------------- the platform
    def _restart(self, one: int, two: int) -> None:
        names = self.platform.bus.services
        self.platform.bus.restart(names[one % len(names)])

    def _restart_all(self, one: int, two: int) -> None:
        self.platform.restart()

    def _policy(self, one: int, two: int) -> None:
        self.platform.propose(_policy(one, two))

    def _split(self, one: int, two: int) -> None:
        """Many events at once, so that batches have something to be split."""
        for number in range(2 + one % 6):
            self._submit(one + 7 * number, two + 3 * number)


def _crash(number: int) -> float | None:
    return 3.0 if number % 11 == 0 else None


def _described(node: str, index: int) -> NodeDescription:
    kind, memory = ("H100-80G", 81_920) if index < 3 else ("A100-40G", 40_960)
    gpus = tuple(
        GpuDescription(uuid=f"GPU-{node}-{n}", index=n, card_type=kind, memory_mib=memory)
        for n in range(8 if index else 4)
    )
    return NodeDescription(node=node, address=f"10.0.0.{index + 1}", gpus=gpus)


def _policy(one: int, two: int) -> dict[str, Any]:
    """A sound policy, now and then an unsound one."""
    preemption: dict[str, Any] = {"grace": 10 + one % 30, "by_priority": ("off", "same_tenant", "any_tenant")[one % 3]}
    if two % 4 == 0:
        preemption["reclaim"] = "borrowed"
    document: dict[str, Any] = {
        "card_types": {
            "H100-80G": {"memory_gib": 80, "preference": 1},
            "A100-40G": {"memory_gib": 40, "preference": 2},
        },
        "cohorts": {"all": {"shared": {"H100-80G": two % 3}}},
        "tenants": {
            "research": {"quota": {"H100-80G": 4 + one % 9, "A100-40G": 8}, "cohort": "all"},
            "product": {"quota": {"H100-80G": 4 + two % 9, "A100-40G": 4}, "cohort": "all", "weight": 1 + one % 2},
            "ops": {"quota": {"H100-80G": 4, "A100-40G": 4}},
        },
        "defaults": {
            "queue": {"discipline": ("best_effort", "backfill", "strict")[two % 3]},
            "placement": {"strategy": ("pack", "spread")[one % 2]},
            "fair_share": {"basis": ("none", "current", "history")[(one + two) % 3]},
            "never_fits": "refuse",
            "preemption": preemption,
            "recovery": {
                "suspect_after": 10,
                "lost_after": 90,
                "max_restarts": 2,
                "backoff": {"first": 2, "factor": 2, "max": 60},
            },
        },
        "health": {"fatal_xids": [48, 79], "harmless_xids": [13]},
    }
    if one % 7 == 6:
        document["tenants"]["ops"] = {"quotas": {}}
    return document
