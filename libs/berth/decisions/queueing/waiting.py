"""The jobs that wait, grouped by claim, so that a pass costs what changed and not what waits.

Order: higher priority first, then the tenant's share where a basis is set, then time of first submission, then id.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from berth.decisions.placement.claim import Claim, Shape


@dataclass(slots=True, eq=False)
class Group:
    """Waiting jobs with one claim, first submitted first."""

    claim: Claim
    jobs: list[tuple[int, str]] = field(default_factory=list)

    @property
    def head(self) -> tuple[int, str]:
        """Submission time (microseconds) and id of the first job."""
        return self.jobs[0]

    @property
    def key(self) -> Key:
        """Order of the first job where no shares decide."""
        return (-self.claim.priority, *self.jobs[0])


Key = tuple[int, int, str]
ANY_TYPE = ""


class WaitingSet:
    """All waiting jobs. Groups that could have a new answer are awake; all others keep the answer they had."""

    def __init__(self) -> None:
        """Empty."""
        self._groups: dict[Claim, Group] = {}
        self._by_type: dict[str, dict[Shape, dict[Claim, Group]]] = {}
        self._queues: dict[Shape, list[tuple[Key, int, Group]]] = {}
        self._entries = 0
        self.awake: dict[Claim, Group] = {}
        self.size = 0

    def add(self, claim: Claim, submitted: int, job_id: str) -> Group:
        """Let a job wait. Its group is not woken by this, unless it is new."""
        group = self._groups.get(claim)
        if group is None:
            group = self._groups[claim] = Group(claim)
            for card_type in claim.shape.types or (ANY_TYPE,):
                self._by_type.setdefault(card_type, {}).setdefault(claim.shape, {})[claim] = group
            self.awake[claim] = group
        at = bisect_left(group.jobs, (submitted, job_id))
        if at == len(group.jobs) or group.jobs[at] != (submitted, job_id):  # workers of one job may come back singly
            group.jobs.insert(at, (submitted, job_id))
            self.size += 1
        if at == 0:
            self.queue(group)
        return group

    def queue(self, group: Group) -> None:
        """Note a group's place among those of its shape; a place that is no longer right is passed over later."""
        self._entries += 1
        heapq.heappush(self._queues.setdefault(group.claim.shape, []), (group.key, self._entries, group))

    def first(self, shape: Shape) -> Group | None:
        """The group of a shape whose first job is served first."""
        queue = self._queues.get(shape)
        while queue:
            key, _, group = queue[0]
            if group.jobs and group.key == key and self._groups.get(group.claim) is group:
                return group
            heapq.heappop(queue)
        return None

    def take_first(self, shape: Shape) -> None:
        """Pass over the first group of a shape until it is queued again."""
        heapq.heappop(self._queues[shape])

    def remove(self, claim: Claim, submitted: int, job_id: str) -> None:
        """Take a job out; nothing happens where it does not wait."""
        group = self._groups.get(claim)
        if group is None:
            return
        at = bisect_left(group.jobs, (submitted, job_id))
        if at == len(group.jobs) or group.jobs[at] != (submitted, job_id):
            return
        del group.jobs[at]
        self.size -= 1
        if at == 0 and group.jobs:
            self.awake[claim] = group
            self.queue(group)
        if not group.jobs:
            del self._groups[claim]
            self.awake.pop(claim, None)
            for card_type in claim.shape.types or (ANY_TYPE,):
                shapes = self._by_type[card_type]
                del shapes[claim.shape][claim]
                if not shapes[claim.shape]:
                    del shapes[claim.shape]
                    self._queues.pop(claim.shape, None)

    def shapes(self, card_type: str) -> Iterator[tuple[Shape, dict[Claim, Group]]]:
        """What waits for a card type (or for any), by shape."""
        for key in (card_type, ANY_TYPE):
            yield from self._by_type.get(key, {}).items()

    def wake(self, groups: Iterable[Group]) -> None:
        """Have these tried in the next pass."""
        for group in groups:
            self.awake[group.claim] = group

    def wake_all(self) -> None:
        """Have everything tried in the next pass."""
        self.awake.update(self._groups)

    def group(self, claim: Claim) -> Group | None:
        """The group of a claim, if any job with it waits."""
        return self._groups.get(claim)

    def groups(self) -> Iterator[Group]:
        """All groups, in no particular order."""
        return iter(self._groups.values())
