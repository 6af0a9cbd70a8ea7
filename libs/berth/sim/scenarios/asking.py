"""Who may see and do what, as the gateway holds it: for questions in scenarios that are played on decisions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from berth.sim.scenarios.player import Answer, Stage

OPERATOR, VIEWER, AGENT = "operator", "viewer", "agent"
READS = frozenset({"read_job", "read_why", "read_logs"})


def ask(
    stage: Stage, *, by: str, what: str, job: str | None = None, tenant: str | None = None, node: str | None = None
) -> Answer:
    """What somebody is told. Denials are on record."""
    from berth.sim.scenarios.player import Answer

    outcome = _ANSWERS[what](stage, by, job or "", tenant or "", node or "")
    if outcome in ("forbidden", "not_found"):
        stage.deny(by, what)
    answer = Answer(outcome)
    if outcome == "answered" and what == "list_jobs":
        mine = [seen for seen in stage.views.jobs.values() if _may_see(stage, by, seen.spec.tenant)]
        wanted = [seen for seen in mine if seen.spec.tenant == (tenant or seen.spec.tenant) and not seen.service]
        answer.lists = tuple(seen.spec.name for seen in wanted if seen.id not in stage.forgotten)
        answer.text = " ".join(answer.lists)
    elif outcome == "answered" and job:
        answer.text = stage.told_about(job, by)
    return answer


def _may_see(stage: Stage, by: str, tenant: str) -> bool:
    mine, role = stage.role(by)
    return role == OPERATOR or (mine == tenant and role != AGENT)


def _read(stage: Stage, by: str, job: str, tenant: str, node: str) -> str:
    seen = stage.job(job)
    if seen is None or seen.id in stage.forgotten or not _may_see(stage, by, seen.spec.tenant):
        return "not_found"  # the same for what is not there and what is not theirs
    return "answered"


def _list(stage: Stage, by: str, job: str, tenant: str, node: str) -> str:
    return "answered"


def _cancel(stage: Stage, by: str, job: str, tenant: str, node: str) -> str:
    seen = stage.job(job)
    if seen is None or not _may_see(stage, by, seen.spec.tenant):
        return "not_found"
    if stage.role(by)[1] == VIEWER:
        return "forbidden"
    stage.platform.cancel(seen.id, by=f"user:{by}", tenant=seen.spec.tenant)
    return "accepted"


def _operator_only(stage: Stage, by: str, job: str, tenant: str, node: str) -> str:
    return "answered" if stage.role(by)[1] == OPERATOR else "forbidden"


def _report(stage: Stage, by: str, job: str, tenant: str, node: str) -> str:
    return "answered" if stage.role(by)[1] == AGENT and by == f"agent-{node}" else "forbidden"


def _audit(stage: Stage, by: str, job: str, tenant: str, node: str) -> str:
    return "answered" if _may_see(stage, by, tenant or stage.role(by)[0]) else "forbidden"


_ANSWERS: Mapping[str, Callable[[Stage, str, str, str, str], str]] = {
    **dict.fromkeys(READS, _read),
    "list_jobs": _list,
    "cancel_job": _cancel,
    "change_quota": _operator_only,
    "report_as_agent": _report,
    "read_audit": _audit,
}
