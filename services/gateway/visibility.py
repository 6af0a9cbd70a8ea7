"""Hides from outsiders whose jobs are in their way: numbers stay, names of others go. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from berth.client.texts import WORDS

OPEN_FACTS: Final = frozenset(
    (
        *("card_type", "types", "class", "until", "since", "from", "to", "not_before", "within", "within_mode"),
        *("level", "domain", "node", "gpu", "slice", "role", "rule", "window", "zone", "state", "unit", "field"),
        *("reason", "signal"),
    )
)
"""Facts whose text names no job, user or tenant. Numbers are always shown."""
HIDDEN_DATA: Final = frozenset({"receipt", "victims", "preemptor", "preemptor_tenant", "workers_of_node"})
"""Parts of events that speak of others."""


def reason_for(reason: Mapping[str, Any], *, own_jobs: Collection[str], tenant: str) -> dict[str, Any]:
    """A reason as a member of `tenant` may see it. own_jobs: those of its `blocked_by` that are the tenant's."""
    hidden: set[str] = set()
    facts = {}
    for key, value in (reason.get("facts") or {}).items():
        if _is_open(key, value, tenant):
            facts[key] = value
        else:
            hidden.update(_texts(value))
    blocked_by = [job for job in reason.get("blocked_by") or () if job in own_jobs]
    hidden.update(set(reason.get("blocked_by") or ()) - set(blocked_by))
    shown: dict[str, Any] = {"code": reason.get("code")}
    if facts:
        shown["facts"] = facts
    if blocked_by:
        shown["blocked_by"] = blocked_by
    remedy = str(reason.get("remedy") or "")
    if remedy and any(text and text in remedy for text in hidden):
        words = WORDS.get(str(reason.get("code")))
        remedy = words.remedy if words is not None else ""
    if remedy:
        shown["remedy"] = remedy
    return shown


def _is_open(key: str, value: Any, tenant: str) -> bool:
    if isinstance(value, (bool, int, float)) or value is None or key in OPEN_FACTS:
        return True
    if isinstance(value, str):
        return value == tenant
    if isinstance(value, Mapping):
        return all(_is_open("", item, tenant) for item in value.values()) and key.endswith("by_type")
    return False


def _texts(value: Any) -> set[str]:
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        return {text for item in value.values() for text in _texts(item)} | {str(key) for key in value}
    if isinstance(value, (list, tuple)):
        return {text for item in value for text in _texts(item)}
    return set()


def jobs_named_in(data: Any) -> set[str]:
    """Job ids in `blocked_by` and `by` anywhere in an event's data or a job's view."""
    found: set[str] = set()
    if isinstance(data, Mapping):
        for key, value in data.items():
            if key == "blocked_by" and isinstance(value, (list, tuple)):
                found.update(str(item) for item in value)
            elif key == "by" and isinstance(value, str):
                found.add(value)
            else:
                found |= jobs_named_in(value)
    elif isinstance(data, (list, tuple)):
        for item in data:
            found |= jobs_named_in(item)
    return found


def data_for(data: Any, *, own_jobs: Collection[str], tenant: str) -> Any:
    """An event's data, or a job's view, as a member of `tenant` may see it: every reason in it is filtered."""
    if isinstance(data, Mapping):
        if "code" in data and ("facts" in data or "blocked_by" in data or set(data) <= {"code", "remedy"}):
            return reason_for(data, own_jobs=own_jobs, tenant=tenant)
        shown = {}
        for key, value in data.items():
            if key in HIDDEN_DATA:
                continue
            if key == "by" and isinstance(value, str) and value not in own_jobs:
                continue
            shown[key] = value if key == "spec" else data_for(value, own_jobs=own_jobs, tenant=tenant)
        return shown
    if isinstance(data, (list, tuple)):
        return [data_for(item, own_jobs=own_jobs, tenant=tenant) for item in data]
    return data
