"""Which of the possible victims leave: a set that is enough, with nothing superfluous, best by the policy's criteria.

Small choices are searched completely. Large ones take victims in order of preference until they are enough, look at
single nodes completely where one worker needs one node, and then spare whoever can be spared, least preferred first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from berth.decisions.placement.claim import Amount
from berth.decisions.placement.jobs import Held
from berth.decisions.preemption.victims import Piece

EXACT = 12
"""Up to so many pieces every subset is looked at."""
NODES_LOOKED_AT = 24
TRIES = 400
"""Most sets that are put to the test for one answer."""

Test = Callable[[Sequence[Piece]], bool]


Key = Callable[[Sequence[Piece]], tuple[object, ...]]


def order_key(
    pieces: Sequence[Piece], criteria: Sequence[str], *, trims: bool = False, lowest_class_first: bool = False
) -> tuple[object, ...]:
    """What the policy prefers: smaller is better.

    trims: whole jobs are stopped only where taking single workers does not do.
    """
    key: list[object] = [sum(piece.is_whole for piece in pieces) if trims else 0]
    if lowest_class_first:
        key.append(tuple(sorted((-piece.class_rank for piece in pieces), reverse=True)))
    for criterion in criteria:
        if criterion == "borrowed_first":
            key.append(sum(not piece.is_borrowed for piece in pieces))
        elif criterion == "lowest_priority":
            key.append(tuple(sorted((piece.priority for piece in pieces), reverse=True)))
        elif criterion == "fewest_gpus":
            key.append(sum(piece.total for piece in pieces))
        elif criterion == "latest_started":
            key.append(tuple(sorted((-piece.since for piece in pieces), reverse=True)))
        else:
            key.append(sum(piece.lost for piece in pieces))
    key.append(sum(piece.total for piece in pieces))
    key.append(len(pieces))
    key.append(tuple(sorted((piece.job.id, tuple(sorted(-w for w in piece.taken.workers or ()))) for piece in pieces)))
    return tuple(key)


@dataclass(frozen=True, slots=True)
class Question:
    """What a choice is about.

    allowed: may these be taken together? enough: would it do, if they were? short: GPUs that must come free at least.
    node_short: for a job that is one worker: GPUs that must come free on a node, else None.
    """

    allowed: Test
    enough: Test
    key: Key
    short: Amount
    node_short: Callable[[str], Amount] | None = None

    def may_do(self, pieces: Sequence[Piece]) -> bool:
        """A cheap necessary condition."""
        return sum(piece.amount for piece in pieces) >= self.short

    def does(self, pieces: Sequence[Piece]) -> bool:
        """The full test."""
        return self.allowed(pieces) and self.enough(pieces)


def choose(pieces: Sequence[Piece], question: Question) -> list[Piece] | None:
    """The best set that is enough; None where none is."""
    if not pieces or not question.may_do(pieces):
        return None
    if len(pieces) <= EXACT:
        return _best_of((chosen for chosen in _subsets(pieces) if question.may_do(chosen)), question)
    if question.node_short is not None:
        found = _on_single_nodes(pieces, question, question.node_short)
        if found is not None:
            return found
    return _greedy(sorted(pieces, key=lambda piece: (piece.is_whole, question.key([piece]))), question)


def _subsets(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    for size in range(1, len(pieces) + 1):
        yield from combinations(pieces, size)


def _best_of(sets: Iterable[tuple[Piece, ...]], question: Question) -> list[Piece] | None:
    for chosen in sorted(sets, key=question.key)[:TRIES]:
        if question.does(chosen):
            return list(chosen)
    return None


def _on_single_nodes(
    pieces: Sequence[Piece], question: Question, node_short: Callable[[str], Amount]
) -> list[Piece] | None:
    by_node: dict[str, list[Piece]] = {}
    for piece in pieces:
        for node in sorted({entry.node for entry in _held(piece)}):
            by_node.setdefault(node, []).append(piece)
    rough: list[tuple[tuple[object, ...], str, list[Piece]]] = []
    for node, here in by_node.items():
        ranked = sorted(here, key=lambda piece: question.key([piece]))
        short, got, prefix = node_short(node), 0, []
        for piece in ranked:
            prefix.append(piece)
            got += _on_node(piece, node)
            if got >= short:
                rough.append((question.key(prefix), node, ranked[:EXACT]))
                break
    sets: dict[tuple[Piece, ...], None] = {}
    for _, node, ranked in sorted(rough, key=lambda entry: entry[:2])[:NODES_LOOKED_AT]:
        short = node_short(node)
        for chosen in _subsets(ranked):
            if sum(_on_node(piece, node) for piece in chosen) >= short:
                sets[chosen] = None
    return _best_of(sets, question)


def _held(piece: Piece) -> Iterator[Held]:
    workers = piece.taken.workers
    return (entry for entry in piece.job.held if workers is None or entry.worker in workers)


def _on_node(piece: Piece, node: str) -> int:
    return sum(len(entry.gpus) for entry in _held(piece) if entry.node == node)


def _greedy(ranked: Sequence[Piece], question: Question) -> list[Piece] | None:
    chosen: list[Piece] = []
    is_enough = False
    for piece in ranked:
        kept = [other for other in chosen if not (piece.is_whole and other.job is piece.job)]
        if any(other.job is piece.job and other.is_whole for other in kept) or not question.allowed([*kept, piece]):
            continue
        chosen = [*kept, piece]
        if question.may_do(chosen) and question.enough(chosen):
            is_enough = True
            break
    if not is_enough:
        return None
    for piece in list(reversed(chosen[:-1])):
        without = [other for other in chosen if other is not piece]
        if question.may_do(without) and question.does(without):
            chosen = without
    return chosen
