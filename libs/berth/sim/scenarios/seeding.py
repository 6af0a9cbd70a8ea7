"""Jobs that run before a scenario begins are put where it says, by the only part that may give out GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from berth.decisions.placement.core import PlacementCore
from berth.decisions.placement.jobs import Held, Job, Phase
from berth.decisions.placement.turn import Turn

Places = Mapping[str, int | Sequence[int]]


class SeededPlacement(PlacementCore):
    """Placement with places decided beforehand for some jobs; all else is as ever."""

    def __init__(self) -> None:
        super().__init__()
        self.pins: dict[str, Places] = {}

    def _pass(self) -> None:
        for job_id in list(self.pins):
            job = self.jobs.get(job_id)
            if job is not None and job.phase is Phase.WAITING:
                places = self.pins.pop(job_id)
                self._place(job, Turn(held=self._held(job, places)))
        super()._pass()

    def _held(self, job: Job, places: Places) -> list[Held]:
        cards: dict[str, list[str]] = {}
        types: dict[str, str] = {}
        for name, wanted in places.items():
            node = self.books.fleet.nodes[name]
            if isinstance(wanted, int):
                free = sorted((c for c in node.cards if not c.owner), key=lambda c: c.description.index)
                chosen = free[:wanted]
            else:
                chosen = [card for card in node.cards if card.description.index in wanted]
            cards[name] = [card.uuid for card in chosen]
            types[name] = chosen[0].card_type
        held = []
        worker = 0
        for kind in job.claim.shape.kinds:
            for _ in range(kind.count):
                name = next(n for n, left in cards.items() if len(left) >= max(kind.gpus, 1))
                mine, cards[name] = cards[name][: kind.gpus], cards[name][kind.gpus :]
                held.append(Held(worker, name, tuple(mine), types[name], kind.role, kind.gpus))
                worker += 1
        return held
