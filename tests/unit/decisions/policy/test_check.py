"""What `berth policy check` finds: one row for each fault, with the path it names."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.decisions.policy.check import check, warnings

ROOT = Path(__file__).resolve().parents[4]
FLEET = {"H100-80G": 16, "A100-40G": 4}
NOW = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
DAY = {"days": ["mon", "tue"], "from": "08:00", "to": "20:00", "zone": "Europe/Berlin"}
EVENING = DAY | {"from": "19:00", "to": "23:00"}
NIGHT = DAY | {"from": "20:00", "to": "08:00"}


def a_line(**fields: Any) -> dict[str, Any]:
    return {"name": "line", "class": "inference", "reserved": {"H100-80G": 4}, **fields}


def a_reservation(**fields: Any) -> dict[str, Any]:
    return {
        "name": "event",
        "tenant": "lab",
        "gpus": {"H100-80G": 8},
        "from": "2026-04-01T09:00:00+02:00",
        "to": "2026-04-01T18:00:00+02:00",
        **fields,
    }


def a_document(**parts: Any) -> dict[str, Any]:
    """A document without fault."""
    return {
        "card_types": {"H100-80G": {"memory_gib": 80}, "A100-40G": {"memory_gib": 40}},
        "tenants": {
            "lab": {"quota": {"H100-80G": 8, "A100-40G": 2}, "cohort": "all"},
            "shop": {"quota": {"H100-80G": 8, "A100-40G": 2}, "cohort": "all"},
        },
        "class_order": ["inference", "interactive", "training", "general"],
        **parts,
    }


def tenant(**fields: Any) -> dict[str, Any]:
    return {"tenants": {"lab": {"quota": {"H100-80G": 8}, **fields}}}


def lines(*found: dict[str, Any], **parts: Any) -> dict[str, Any]:
    return {"protection": [line | {"name": f"line-{n}"} for n, line in enumerate(found)], **parts}


PROBLEMS: list[tuple[str, dict[str, Any], str]] = [
    # form
    ("a misspelt key", {"defalts": {}}, "defalts"),
    ("a negative quota", tenant(quota={"H100-80G": -1}), "tenants.lab.quota.H100-80G"),
    ("a quota in quotes", tenant(quota={"H100-80G": "8"}), "tenants.lab.quota.H100-80G"),
    ("an unknown discipline", {"defaults": {"queue": {"discipline": "maybe"}}}, "defaults.queue.discipline"),
    ("an unknown class", {"classes": {"batch": {}}}, "classes.batch"),
    ("a duration without unit", {"defaults": {"preemption": {"grace": "soon"}}}, "defaults.preemption.grace"),
    (
        "a window without a zone",
        lines(a_line(windows=[{"from": "08:00", "to": "20:00"}])),
        "protection.0.windows.0.zone",
    ),
    (
        "a window in no known zone",
        lines(a_line(windows=[DAY | {"zone": "Mars/Base"}])),
        "protection.0.windows.0.zone",
    ),
    ("a time without zone", {"reservations": [a_reservation(to="2026-04-01T18:00:00")]}, "reservations.0.to"),
    # tenants
    ("a quota of an unknown type", tenant(quota={"B200": 1}), "tenants.lab.quota.B200"),
    (
        "a borrow limit of an unknown type",
        tenant(cohort="c", borrow_limit={"B200": 1}),
        "tenants.lab.borrow_limit.B200",
    ),
    ("more lent than owned", tenant(cohort="c", lend_limit={"H100-80G": 9}), "tenants.lab.lend_limit.H100-80G"),
    ("a user twice", tenant(users=[{"name": "ann"}, {"name": "ann", "role": "viewer"}]), "tenants.lab.users"),
    ("a shared amount of an unknown type", {"cohorts": {"all": {"shared": {"B200": 1}}}}, "cohorts.all.shared.B200"),
    (
        "fair order where all weigh nothing",
        {"tenants": {"a": {"weight": 0}, "b": {"weight": 0}}, "defaults": {"fair_share": {"basis": "current"}}},
        "tenants",
    ),
    # classes
    (
        "lost before suspect",
        {"defaults": {"recovery": {"suspect_after": "2m", "lost_after": "90s"}}},
        "defaults.recovery.lost_after",
    ),
    (
        "lost when suspect",
        {"defaults": {"recovery": {"suspect_after": "2m", "lost_after": "2m"}}},
        "defaults.recovery.lost_after",
    ),
    (
        "no time for a node to stop its work",
        {"defaults": {"recovery": {"lost_after": "59s"}}},
        "defaults.recovery.lost_after",
    ),
    (
        "the longest pause shorter than the first",
        {"defaults": {"recovery": {"backoff": {"first": "1m", "max": "30s"}}}},
        "defaults.recovery.backoff.max",
    ),
    (
        "a class whose pause is longer than the common longest",
        {
            "defaults": {"recovery": {"backoff": {"max": "30s"}}},
            "classes": {"training": {"recovery": {"backoff": {"first": "1m"}}}},
        },
        "classes.training.recovery.backoff.max",
    ),
    (
        "an idle warning at once",
        {"classes": {"interactive": {"idle": {"timeout": "10m", "warn_before": "10m"}}}},
        "classes.interactive.idle.warn_before",
    ),
    (
        "idle without any activity that counts",
        {"defaults": {"idle": {"timeout": "10m", "counts": []}}},
        "defaults.idle.counts",
    ),
    (
        "a lifetime warning at once",
        {"defaults": {"lifetime": {"max": "1h", "warn_before": "1h"}}},
        "defaults.lifetime.warn_before",
    ),
    (
        "a criterion twice",
        {"defaults": {"preemption": {"victim_order": ["fewest_gpus", "fewest_gpus"]}}},
        "defaults.preemption.victim_order",
    ),
    (
        "silence of nodes set for one class",
        {"classes": {"training": {"recovery": {"lost_after": "5m"}}}},
        "classes.training.recovery.lost_after",
    ),
    ("a class twice in the order", {"class_order": ["training", "training"]}, "class_order"),
    # lines
    ("a line for nobody", {"protection": [{"name": "x", "reserved": {"H100-80G": 1}}]}, "protection.0"),
    ("a line of an unknown tenant", lines(a_line(tenant="nobody")), "protection.0.tenant"),
    ("a line of a class without place", lines(a_line(), class_order=["training"]), "protection.0.class"),
    ("a line of an unknown type", lines(a_line(reserved={"B200": 1})), "protection.0.reserved.B200"),
    ("a class that preempts itself", lines(a_line(may_preempt=["inference"])), "protection.0.may_preempt"),
    ("two lines of one name", {"protection": [a_line(), a_line(windows=[DAY])]}, "protection"),
    ("a window without days", lines(a_line(windows=[DAY | {"days": []}])), "protection.0.windows.0.days"),
    ("a window without length", lines(a_line(windows=[DAY | {"to": "08:00"}])), "protection.0.windows.0"),
    ("a window from the end of a day", lines(a_line(windows=[DAY | {"from": "24:00"}])), "protection.0.windows.0.from"),
    (
        "lines that lend and do not lend at once",
        lines(a_line(windows=[DAY]), a_line(windows=[EVENING], lend_when_idle=True)),
        "protection.1.lend_when_idle",
    ),
    (
        "lines that wait and take at once",
        lines(a_line(), a_line(windows=[DAY], when_unmet="preempt_lower_class")),
        "protection.1.when_unmet",
    ),
    (
        "classes that stop each other",
        lines(
            a_line(may_preempt=["training"]),
            a_line(**{"class": "training"}, may_preempt=["inference"]),
            class_order=[],
        ),
        "protection.1.may_preempt",
    ),
    # installed cards
    (
        "a guarantee above the installed cards",
        lines(a_line(reserved={"H100-80G": 17})),
        "protection.0.reserved.H100-80G",
    ),
    (
        "guarantees that together are above them",
        lines(a_line(reserved={"H100-80G": 9}), a_line(**{"class": "training"}, reserved={"H100-80G": 8})),
        "protection.1.reserved.H100-80G",
    ),
    (
        "guarantees that are above them for one hour a week",
        lines(
            a_line(reserved={"H100-80G": 9}, windows=[DAY]),
            a_line(**{"class": "training"}, reserved={"H100-80G": 8}, windows=[EVENING]),
        ),
        "protection.1.reserved.H100-80G",
    ),
    ("a floor above the installed cards", lines(a_line(floor={"A100-40G": 5})), "protection.0.floor.A100-40G"),
    # reservations
    (
        "a reservation that ends before it begins",
        {"reservations": [a_reservation(to="2026-04-01T08:00:00+02:00")]},
        "reservations.0.to",
    ),
    ("a reservation of an unknown tenant", {"reservations": [a_reservation(tenant="x")]}, "reservations.0.tenant"),
    (
        "a reservation of an unknown type",
        {"reservations": [a_reservation(gpus={"B200": 1})]},
        "reservations.0.gpus.B200",
    ),
    ("two reservations of one name", {"reservations": [a_reservation(), a_reservation()]}, "reservations"),
    (
        "a reservation above the installed cards",
        {"reservations": [a_reservation(gpus={"H100-80G": 17})]},
        "reservations.0.gpus.H100-80G",
    ),
    (
        "overlapping reservations above the installed cards",
        {"reservations": [a_reservation(), a_reservation(name="other", gpus={"H100-80G": 9})]},
        "reservations.1.gpus.H100-80G",
    ),
    # health
    ("a code that is fatal and harmless", {"health": {"fatal_xids": [79, 48], "harmless_xids": [48]}}, "health"),
]

WARNINGS: list[tuple[str, dict[str, Any], str]] = [
    ("a borrow limit without a cohort", tenant(borrow_limit={"H100-80G": 4}), "tenants.lab.borrow_limit"),
    ("a lend limit without a cohort", tenant(lend_limit={"H100-80G": 4}), "tenants.lab.lend_limit"),
    (
        "a borrow limit without a quota",
        tenant(cohort="all", borrow_limit={"A100-40G": 1}),
        "tenants.lab.borrow_limit.A100-40G",
    ),
    (
        "a borrow limit above what others lend",
        {
            "tenants": {
                "lab": {"quota": {"H100-80G": 8}, "cohort": "c", "borrow_limit": {"H100-80G": 8}},
                "shop": {"quota": {"H100-80G": 8}, "cohort": "c", "lend_limit": {"H100-80G": 2}},
            }
        },
        "tenants.lab.borrow_limit.H100-80G",
    ),
    ("a quota that no one can reach", tenant(quota={"H100-80G": 17}), "tenants.lab.quota.H100-80G"),
    ("a cohort without members", {"cohorts": {"all": {}, "empty": {}}}, "cohorts.empty"),
    ("a cohort of one", tenant(cohort="one") | {"cohorts": {"one": {}}}, "cohorts.one"),
    ("a cohort that is not listed", {"cohorts": {"al": {}}}, "tenants.lab.cohort"),
    (
        "a planned start where nobody overtakes",
        {"defaults": {"queue": {"discipline": "strict", "reserve_after": "1h"}}},
        "defaults.queue.reserve_after",
    ),
    ("a half life without history", {"defaults": {"fair_share": {"half_life": "1d"}}}, "defaults.fair_share.half_life"),
    (
        "a half life of one class",
        {"classes": {"training": {"fair_share": {"basis": "history", "half_life": "1d"}}}},
        "classes.training.fair_share.half_life",
    ),
    (
        "extensions of no length",
        {"defaults": {"lifetime": {"max": "8h", "extensions": 2}}},
        "defaults.lifetime.extend_by",
    ),
    (
        "an extension that is never granted",
        {"defaults": {"lifetime": {"max": "8h", "extend_by": "1h"}}},
        "defaults.lifetime.extensions",
    ),
    ("a lifetime warning without lifetime", {"defaults": {"lifetime": {"warn_before": "1h"}}}, "defaults.lifetime"),
    ("an idle warning without timeout", {"defaults": {"idle": {"warn_before": "5m"}}}, "defaults.idle.warn_before"),
    (
        "a threshold of what does not count",
        {"defaults": {"idle": {"timeout": "1h", "counts": ["execution"], "gpu_util_at_least": 0.1}}},
        "defaults.idle.gpu_util_at_least",
    ),
    ("a grace of hours", {"defaults": {"preemption": {"grace": "2h"}}}, "defaults.preemption.grace"),
    ("no grace", {"defaults": {"preemption": {"grace": "0s"}}}, "defaults.preemption.grace"),
    ("a minimum of days", {"defaults": {"preemption": {"min_runtime": "2d"}}}, "defaults.preemption.min_runtime"),
    ("restarts without pause", {"defaults": {"recovery": {"max_restarts": 3}}}, "defaults.recovery.backoff.first"),
    (
        "taking back where nothing is lent",
        tenant() | {"defaults": {"preemption": {"reclaim": "borrowed"}}},
        "defaults.preemption.reclaim",
    ),
    (
        "final shares where nothing is lent",
        tenant() | {"defaults": {"preemption": {"fair": "final_share"}}},
        "defaults.preemption.fair",
    ),
    ("a hole in the order of classes", {"class_order": ["inference", "training"]}, "class_order"),
    (
        "a lower class that may preempt a higher",
        lines(a_line(**{"class": "training"}, may_preempt=["inference"])),
        "protection.0.may_preempt",
    ),
    ("a line without content", {"protection": [{"name": "x", "class": "training"}]}, "protection.0"),
    ("a cap on nothing", lines(a_line(max_preempt_share=0.5)), "protection.0.max_preempt_share"),
    (
        "a cap of nothing",
        lines(a_line(may_preempt=["training"], max_preempt_share=0)),
        "protection.0.max_preempt_share",
    ),
    ("a notice for what always holds", lines(a_line(clear_before="1h")), "protection.0.clear_before"),
    (
        "a notice for what is lent",
        lines(a_line(clear_before="1h", windows=[DAY], lend_when_idle=True, may_preempt=["general"])),
        "protection.0.clear_before",
    ),
    (
        "taking nothing from lower classes",
        lines(a_line(reserved={}, may_preempt=["general"], when_unmet="preempt_lower_class")),
        "protection.0.when_unmet",
    ),
    (
        "lower classes without an order",
        lines(a_line(when_unmet="preempt_lower_class"), class_order=[]),
        "protection.0.when_unmet",
    ),
    ("lending without a way back", lines(a_line(lend_when_idle=True)), "protection.0.lend_when_idle"),
    (
        "two amounts for one class at once",
        lines(a_line(windows=[DAY]), a_line(windows=[EVENING])),
        "protection.1.reserved",
    ),
    (
        "more kept for a tenant than it may hold",
        tenant() | lines(a_line(tenant="lab", reserved={"H100-80G": 9})),
        "protection.0.reserved.H100-80G",
    ),
    (
        "a reservation that is over",
        {
            "reservations": [
                a_reservation(**{"from": "2026-03-01T08:00:00Z"}, to="2026-03-02T08:00:00Z"),
            ]
        },
        "reservations.0",
    ),
    (
        "a reservation announced too late",
        {"reservations": [a_reservation(announced="2026-04-01T09:00:00+02:00")]},
        "reservations.0.announced",
    ),
    (
        "a notice where jobs finish",
        {"reservations": [a_reservation(clear_before="1h")]},
        "reservations.0.clear_before",
    ),
    ("a reservation of nothing", {"reservations": [a_reservation(gpus={})]}, "reservations.0.gpus"),
    ("an unknown fault code", {"health": {"fatal_xids": [790]}}, "health.fatal_xids"),
    ("a fault code twice", {"health": {"harmless_xids": [13, 13]}}, "health.harmless_xids"),
    ("killing without waiting", {"cleaning": {"kill_unknown": True}}, "cleaning.kill_unknown"),
    (
        "readings that prove more than the timeout",
        {"telemetry": {"stale_after": "1h"}, "defaults": {"idle": {"timeout": "30m"}}},
        "defaults.idle.timeout",
    ),
]


def test_the_sound_document_has_neither_problem_nor_warning() -> None:
    assert check(a_document(), installed=FLEET) == []
    assert warnings(a_document(), installed=FLEET, now=NOW) == []


@pytest.mark.parametrize(("parts", "path"), [row[1:] for row in PROBLEMS], ids=[row[0] for row in PROBLEMS])
def test_is_refused_with_its_path_and_a_remedy(parts: dict[str, Any], path: str) -> None:
    found = check(a_document(**parts), installed=FLEET)
    assert path in [problem.path for problem in found]
    assert all(problem.fault and problem.remedy for problem in found)


@pytest.mark.parametrize(("parts", "path"), [row[1:] for row in WARNINGS], ids=[row[0] for row in WARNINGS])
def test_is_warned_of_and_not_refused(parts: dict[str, Any], path: str) -> None:
    document = a_document(**parts)
    assert check(document, installed=FLEET) == []
    found = warnings(document, installed=FLEET, now=NOW)
    assert path in [problem.path for problem in found]
    assert all(problem.fault and problem.remedy for problem in found)


def test_every_fault_is_listed_at_once() -> None:
    parts: dict[str, Any] = {
        "class_order": ["training", "training"],
        "health": {"fatal_xids": [48], "harmless_xids": [48]},
    }
    assert {problem.path for problem in check(a_document(**parts))} == {"class_order", "health"}


def test_lines_whose_windows_do_not_meet_may_share_cards() -> None:
    day, night = (
        a_line(reserved={"H100-80G": 12}, windows=[DAY]),
        a_line(**{"class": "training"}, reserved={"H100-80G": 12}, windows=[NIGHT]),
    )
    assert check(a_document(**lines(day, night)), installed=FLEET) == []
    assert (
        warnings(a_document(**lines(day, day | {"windows": [NIGHT], "lend_when_idle": False})), installed=FLEET) == []
    )


def test_windows_of_different_zones_are_compared_in_time() -> None:
    berlin = a_line(reserved={"H100-80G": 12}, windows=[DAY | {"from": "08:00", "to": "09:00"}])
    shanghai = a_line(
        **{"class": "training"},
        reserved={"H100-80G": 12},
        windows=[DAY | {"from": "14:30", "to": "15:00", "zone": "Asia/Shanghai"}],
    )
    [problem] = check(a_document(**lines(berlin, shanghai)), installed=FLEET)
    assert problem.path == "protection.1.reserved.H100-80G", "half past two in Shanghai is half past eight in summer"
    assert "line-0, line-1" in problem.fault


def test_guarantees_are_not_compared_with_an_unknown_fleet() -> None:
    document = a_document(**lines(a_line(reserved={"H100-80G": 170})))
    assert check(document) == [] == check(document, installed={})


def test_a_faster_clock_may_lose_nodes_sooner() -> None:
    document = a_document(defaults={"recovery": {"suspect_after": 1, "lost_after": 5}})
    assert check(document, shortest_lost_after=0) == []


@pytest.mark.parametrize("document", [None, 3, "text", [], [1], {1: 2}, {"tenants": {1: {}}}, {"protection": {}}, True])
def test_what_is_no_policy_is_named_not_raised(document: Any) -> None:
    assert check(document)
    assert warnings(document) == []


@pytest.mark.parametrize("path", sorted((ROOT / "policies").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_policy_suits_the_embedded_fleet(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert check(document, installed=FLEET) == []
    assert warnings(document, installed=FLEET, now=NOW) == []
