"""Which of the possible victims leave: a set that is enough, with nothing superfluous, best by the policy's criteria.

Small choices are searched completely. Large ones take victims in order of preference until they are enough, look at
single nodes completely where one worker needs one node, and then spare whoever can be spared, least preferred first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import combinations

from berth.decisions.placement.claim import Amount
from berth.decisions.placement.jobs import Held
from berth.decisions.preemption.victims import Piece

EXACT = 10
"""Up to so many pieces every subset is looked at."""
NODES_LOOKED_AT = 8
FEW = 8
TRIES = 255
NODE_TRIES = 12
"""Most sets that are put to the test for one answer, and for an answer on single nodes."""
PREFIXES = 400
"""Most victims that are thought of for one job."""
SPARED = 64
"""Most victims that are tried to be spared one by one."""

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
    whole = [piece for piece in pieces if piece.is_whole]
    if len(whole) <= PREFIXES and not question.enough(whole):
        return None
    if len(pieces) <= EXACT:
        found = _best_of((chosen for chosen in _subsets(pieces) if question.may_do(chosen)), question, TRIES)
        if found is not None or len(pieces) <= FEW:
            return found
    if question.node_short is not None:
        found = _on_single_nodes(pieces, question, question.node_short)
        if found is not None:
            return found
    return _greedy(sorted(pieces, key=lambda piece: (piece.is_whole, question.key([piece]))), question)


def _subsets(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
    for size in range(1, len(pieces) + 1):
        yield from combinations(pieces, size)


def _best_of(sets: Iterable[tuple[Piece, ...]], question: Question, tries: int) -> list[Piece] | None:
    for chosen in nsmallest(tries, sets, key=question.key):
        if question.does(chosen):
            return list(chosen)
    return None


def _on_single_nodes(
    pieces: Sequence[Piece], question: Question, node_short: Callable[[str], Amount]
) -> list[Piece] | None:
    """The best set on one node: roughly for all nodes, then completely for the most promising ones."""
    by_node: dict[str, list[Piece]] = {}
    for piece in sorted(pieces, key=lambda piece: question.key([piece])):
        for node in {entry.node: None for entry in _held(piece)}:
            by_node.setdefault(node, []).append(piece)
    rough: list[tuple[tuple[object, ...], str, list[Piece]]] = []
    for node, ranked in by_node.items():
        short = node_short(node)
        got: Amount = 0
        prefix: list[Piece] = []
        for piece in ranked:
            prefix.append(piece)
            got += _on_node(piece, node)
            if got >= short:
                rough.append((question.key(prefix), node, ranked[:EXACT]))
                break
    sets: dict[tuple[Piece, ...], None] = {}
    for _, node, ranked in nsmallest(NODES_LOOKED_AT, rough, key=lambda entry: entry[:2]):
        sets.update(dict.fromkeys(_least_on(node, ranked, node_short(node))))
    return _best_of(sets, question, NODE_TRIES)


def _least_on(node: str, ranked: Sequence[Piece], short: Amount) -> Iterator[tuple[Piece, ...]]:
    """Sets that free enough of a node, and would not without any one of theirs."""
    amounts = {piece: _on_node(piece, node) for piece in ranked}
    for chosen in _subsets(ranked):
        got = [amounts[piece] for piece in chosen]
        if sum(got) >= short and sum(got) - min(got) < short:
            yield chosen


def _held(piece: Piece) -> Iterator[Held]:
    workers = piece.taken.workers
    return (entry for entry in piece.job.held if workers is None or entry.worker in workers)


def _on_node(piece: Piece, node: str) -> int:
    return sum(len(entry.gpus) for entry in _held(piece) if entry.node == node)


def _greedy(ranked: Sequence[Piece], question: Question) -> list[Piece] | None:
    """Take in order of preference until it is enough (what is enough stays enough with more), then spare whom one can."""
    allowed: list[Piece] = []
    prefixes: list[list[Piece]] = []
    for piece in ranked:
        kept = [other for other in allowed if not (piece.is_whole and other.job is piece.job)]
        if question.allowed([*kept, piece]):
            allowed = [*kept, piece]
            prefixes.append(allowed)
            if len(prefixes) >= PREFIXES:
                break
    low, high = 0, len(prefixes)
    while low < high:
        middle = (low + high) // 2
        if question.may_do(prefixes[middle]) and question.enough(prefixes[middle]):
            high = middle
        else:
            low = middle + 1
    if low == len(prefixes):
        return None
    chosen = prefixes[low]
    for piece in list(reversed(chosen))[:SPARED]:
        without = [other for other in chosen if other is not piece]
        if question.may_do(without) and question.does(without):
            chosen = without
    return chosen
