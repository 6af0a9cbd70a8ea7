"""A fault of a policy document, or something in it that is hardly meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault. path: dotted, from the top of the document."""

    path: str
    fault: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The shape that events and answers carry."""
        return {"path": self.path, "fault": self.fault, "remedy": self.remedy}


def unknown_types(asked: Iterable[str], known: Mapping[str, object], where: str) -> Iterator[Problem]:
    """Card types that the document does not list; none where it lists no types at all."""
    for card_type in asked:
        if known and card_type not in known:
            yield Problem(
                f"{where}.{card_type}",
                f"card type {card_type} is not under card_types",
                f"add it to card_types or use one of {', '.join(sorted(known))}",
            )


def repeated(values: Iterable[T]) -> list[tuple[T, int]]:
    """What stands there more than once, with how often, in order of first appearance."""
    counts: dict[T, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return [(value, times) for value, times in counts.items() if times > 1]
