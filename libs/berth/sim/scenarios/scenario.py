"""A scenario file as values, and its parts in the product's own words: policy document, job specification, nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from berth.contracts.base import parse_duration
from berth.contracts.jobs import JobSpec
from berth.contracts.nodes import GpuDescription, MigLayout, NodeDescription
from berth.sim.programs import Program

DEFAULT_MEMORY_GIB = 80
POOL_WIDE = (
    "class_order",
    "protection",
    "reservations",
    "telemetry",
    "health",
    "cleaning",
    "idempotency",
    "events",
)
"""Policy words that stand at the top of the document; the others are defaults of every class."""
NOT_SPEC = ("by", "runtime", "stop_time", "crashes", "checkpoint_every")
"""Words of a job that say how its program behaves, not what is asked for."""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 would read times and `off` as something else."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


@dataclass(frozen=True, slots=True)
class Step:
    """One moment: what is done, then what must hold."""

    number: int
    at: datetime
    do: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    expect: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One file."""

    id: str
    level: str
    start: datetime
    body: Mapping[str, Any]
    steps: tuple[Step, ...]

    @property
    def never(self) -> Mapping[str, Any]:
        """What must not be, at any time."""
        found: Mapping[str, Any] = self.body.get("never") or {}
        return found

    def moment(self, text: str) -> datetime:
        """`+10m` after the start, or a time with zone."""
        return moment(text, self.start)


def load(path: Path) -> Scenario:
    """Read one file.

    Raises:
        ValueError: not a scenario.
    """
    body = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    if not isinstance(body, dict) or "id" not in body or "steps" not in body:
        raise ValueError(f"{path} is not a scenario")
    start = datetime.fromisoformat(body["clock"]["start"])
    steps = tuple(
        Step(
            number=number,
            at=moment(step["at"], start),
            do=tuple(next(iter(action.items())) for action in step.get("do", ())),
            expect=step.get("expect") or {},
            note=step.get("note", ""),
        )
        for number, step in enumerate(body["steps"], 1)
    )
    return Scenario(body["id"], body["level"], start, body, steps)


def moment(text: str, start: datetime) -> datetime:
    """`+10m` after the start, or a time with zone."""
    return start + duration(text) if text.startswith(("+", "-")) else datetime.fromisoformat(text)


def seconds(text: str | int | float) -> float:
    """Seconds of `1h30m`, `+1h` or `-10m`."""
    if not isinstance(text, str):
        return float(text)
    sign = -1 if text.startswith("-") else 1
    value = parse_duration(re.sub(r"^[+-]", "", text))
    assert isinstance(value, int)
    return float(sign * value)


def duration(text: str) -> timedelta:
    """The span of `1h30m`, `+1h` or `-10m`."""
    return timedelta(seconds=seconds(text))


# ------------------------------------------------------------------------------------------------------------- policy
def policy_document(scenario: Scenario, policy: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The document for what a scenario sets."""
    words = scenario.body["policy"] if policy is None else policy
    document: dict[str, Any] = {
        "defaults": {key: value for key, value in words.items() if key not in POOL_WIDE},
        "tenants": {tenant["name"]: _tenant(tenant, scenario.start) for tenant in scenario.body["tenants"]},
        "cohorts": {c["name"]: {"shared": c.get("shared", {})} for c in scenario.body.get("cohorts", ())},
    }
    for tenant in document["tenants"].values():
        if tenant.get("cohort"):
            document["cohorts"].setdefault(tenant["cohort"], {"shared": {}})
    document |= {key: value for key, value in words.items() if key in POOL_WIDE}
    if "reservations" in document:
        document["reservations"] = [
            {**r, **({"announced": scenario.moment(r["announced"]).isoformat()} if "announced" in r else {})}
            for r in document["reservations"]
        ]
    return document


def _tenant(tenant: Mapping[str, Any], start: datetime) -> dict[str, Any]:
    body = {key: value for key, value in tenant.items() if key != "name"}
    if "used_before" in body:
        used = dict(body["used_before"])
        if "until" in used:
            used["until"] = moment(used["until"], start).isoformat()
        else:
            used["until"] = start.isoformat()
        body["used_before"] = used
    return body


# ---------------------------------------------------------------------------------------------------------------- jobs
def job_spec(job: Mapping[str, Any], *, name: str | None = None) -> JobSpec:
    """What a tenant asks for with a job."""
    body = {key: value for key, value in job.items() if key not in NOT_SPEC}
    if name is not None:
        body["name"] = name
    if "stop_time" in job:
        body["stop_grace"] = job["stop_time"]
    env, secret = dict(job.get("env", {})), tuple(job.get("secret_env", ()))
    body["env"] = {key: value for key, value in env.items() if key not in secret}
    body.setdefault("command", ["program"])
    return JobSpec.model_validate(body)


def program_of(job: Mapping[str, Any]) -> Program:
    """How a job's program behaves."""
    crashes: Mapping[str, Any] = job.get("crashes") or {}
    service: Mapping[str, Any] = job.get("service") or {}
    return Program(
        runtime=seconds(job["runtime"]) if "runtime" in job else None,
        stop_seconds=seconds(job.get("stop_time", 0)),
        crash_after=seconds(crashes["after"]) if crashes else None,
        crashes=(None if crashes["times"] == "always" else crashes["times"]) if crashes else 0,
        crash_as_refusal=bool(crashes) and crashes.get("as") == "start_refused",
        is_resumed=job.get("checkpoint", True),
        checkpoint_every=seconds(job["checkpoint_every"]) if "checkpoint_every" in job else None,
        cold_start=seconds(service.get("cold_start", 0)) if service else None,
    )


# --------------------------------------------------------------------------------------------------------------- nodes
def nodes_of(cluster: Mapping[str, Any]) -> Iterator[tuple[NodeDescription, Mapping[str, Any]]]:
    """Each node with the group it is from."""
    for group in cluster["nodes"]:
        yield from nodes_of_group(group, levels=cluster.get("levels", ()))


def nodes_of_group(
    group: Mapping[str, Any], *, levels: tuple[str, ...] | list[str] = ()
) -> Iterator[tuple[NodeDescription, Mapping[str, Any]]]:
    """Each node of a group."""
    memory = round(float(group.get("memory_gib", _memory_of(group["type"]))) * 1024)
    given = group.get("domain", {})
    for name in group["names"]:
        gpus = tuple(
            GpuDescription(
                uuid=f"GPU-{name}-{index}",
                index=index,
                card_type=group["type"],
                memory_mib=memory,
                mig=_mig(group, index),
            )
            for index in range(group["gpus"])
        )
        yield (
            NodeDescription(
                node=name,
                hostname=name,
                gpus=gpus,
                link_groups=tuple(tuple(links) for links in group.get("links", ())),
                domain={level: given.get(level, f"only-{name}") for level in levels},
                shareable=group.get("shareable", False),
            ),
            group,
        )


def _memory_of(card_type: str) -> int:
    """GiB that the name of a card type ends with: `A10-24G`."""
    found = re.search(r"(\d+)G$", card_type)
    return int(found.group(1)) if found else DEFAULT_MEMORY_GIB


def _mig(group: Mapping[str, Any], index: int) -> MigLayout | None:
    for layout in group.get("mig", ()):
        if index in layout["gpus"]:
            return MigLayout(
                slices=layout.get("slices", {}),
                compute_slices=layout.get("compute", 0),
                memory_slices=layout.get("memory", 0),
                profiles={
                    name: (profile["compute"], profile["memory"])
                    for name, profile in layout.get("profiles", {}).items()
                },
            )
    return None
