"""What differs between two policy documents, piece by piece and in words.

Lines, reservations and users are compared by name, not by their place in a list; durations are shown as people write
them. A key that is set to what it would be anyway still counts as a difference: the document has changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from berth.contracts.base import format_duration
from berth.decisions.policy.document import Policy

_NAMED: Final = frozenset({"protection", "reservations", "users"})
"""Lists whose members have names."""
_DURATIONS: Final = frozenset(
    {
        "clear_before",
        "extend_by",
        "first",
        "gang_grace",
        "grace",
        "half_life",
        "lost_after",
        "max",
        "min_runtime",
        "ready_timeout",
        "reserve_after",
        "share_window",
        "stale_after",
        "suspect_after",
        "timeout",
        "wait",
        "warn_before",
        "window",
        "within",
    }
)
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Change:
    """One difference. path: keys and names from the top; before, after: JSON values, None where there was (is) none."""

    path: tuple[str, ...]
    before: Any
    after: Any
    is_added: bool = False
    is_removed: bool = False

    @property
    def text(self) -> str:
        """In words, one line."""
        subject = _subject(self.path)
        key = self.path[-1] if self.path else ""
        if self.is_added and isinstance(self.after, Mapping):
            return f"{subject} is new{_details(self.after)}"
        if self.is_removed and isinstance(self.before, Mapping):
            return f"{subject} is removed"
        before = "(not set)" if self.is_added else _value(self.before, key)
        after = "(not set)" if self.is_removed else _value(self.after, key)
        return f"{subject}: {before} → {after}"

    def to_json(self) -> dict[str, Any]:
        """The shape that answers carry."""
        return {"path": ".".join(self.path), "before": self.before, "after": self.after, "text": self.text}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every difference, in the order of the keys of the document.

    Both documents are right in form; see `berth.decisions.policy.check`.
    """
    before, after = (Policy.from_document(document).to_document() for document in (old, new))
    return list(_compare(before, after, ()))


def in_short(found: Sequence[Change], *, limit: int = 3) -> str:
    """The first few in one line."""
    if not found:
        return "nothing"
    more = f"; and {len(found) - limit} more" if len(found) > limit else ""
    return "; ".join(change.text for change in found[:limit]) + more


def _compare(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Change]:
    if path and path[-1] in _NAMED:
        old, new = _by_name(old), _by_name(new)
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _compare(old.get(key, _MISSING), new.get(key, _MISSING), (*path, str(key)))
    elif old is _MISSING or new is _MISSING:
        yield from _one_sided(old, new, path)
    elif old != new:
        yield Change(path, old, new)


_WHOLES: Final = frozenset({"tenants", "cohorts", "card_types", "protection", "reservations"})


def _one_sided(old: Any, new: Any, path: tuple[str, ...]) -> Iterator[Change]:
    """What came or went, down to the pieces that people talk about: tenants, lines, single knobs."""
    value = new if old is _MISSING else old
    is_whole = len(path) == 2 and path[0] in _WHOLES
    if isinstance(value, Mapping) and value and not is_whole:
        for key, entry in value.items():
            was, is_ = (_MISSING, entry) if old is _MISSING else (entry, _MISSING)
            yield from _compare(was, is_, (*path, str(key)))
    elif old is _MISSING:
        yield Change(path, None, new, is_added=True)
    else:
        yield Change(path, old, None, is_removed=True)


def _by_name(value: Any) -> Any:
    if value is _MISSING:
        return {}
    return {str(entry["name"]): {k: v for k, v in entry.items() if k != "name"} for entry in value}


# ----------------------------------------------------------------------------------------------------------- words
_KINDS: Final = {
    "tenants": "tenant",
    "cohorts": "cohort",
    "card_types": "card type",
    "classes": "class",
    "protection": "line",
    "reservations": "reservation",
}


def _subject(path: tuple[str, ...]) -> str:
    kind = _KINDS.get(path[0]) if path else None
    if kind is None or len(path) < 2:
        head, rest = (path[0] if path else "document"), path[1:]
    else:
        head, rest = f"{kind} {path[1]}", path[2:]
    return f"{head}, {' '.join(rest)}" if rest else head


def _details(value: Mapping[str, Any]) -> str:
    told = ", ".join(f"{key} {_value(entry, key)}" for key, entry in value.items() if entry not in (None, [], {}, ""))
    return f": {told}" if told else ""


def _value(value: Any, key: str = "") -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and key in _DURATIONS:
        return format_duration(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        if "from" in value and "zone" in value:
            days = " ".join(value.get("days") or ["every day"])
            return f"{days} {value['from']}-{value['to']} {value['zone']}"
        return ", ".join(f"{name} {_value(entry, str(name))}" for name, entry in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        separator = "; " if any(isinstance(entry, Mapping) for entry in value) else ", "
        return separator.join(_value(entry) for entry in value) or "none"
    return str(value)
