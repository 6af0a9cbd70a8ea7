"""The whole platform in one process: cores at a simulated bus, a simulated fleet, and what the gateway would do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import JobCancelRequested, JobSubmitted, NodeCordonRequested, PolicyProposed
from berth.contracts.jobs import JobSpec
from berth.decisions.core import Core
from berth.decisions.health import InventoryCore
from berth.decisions.lifecycle import LifecycleCore
from berth.sim.bus import SimBus
from berth.sim.clock import SimClock
from berth.sim.fleet import SimFleet

GATEWAY = "gateway"
MAX_ROUNDS = 10_000


class NeverSettles(RuntimeError):
    """The platform goes round in a circle at one instant: a defect of the decisions."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One event as audit keeps it: numbered in order, with the platform's time."""

    number: int
    recorded_at: datetime
    event: Envelope[Any]


def all_cores() -> list[Callable[[], Core]]:
    """The deciding services, in the order in which a batch passes them."""
    from berth.decisions.admission import AdmissionCore
    from berth.decisions.placement.core import PlacementCore
    from berth.decisions.serving import ServingCore

    return [InventoryCore, partial(AdmissionCore, runs_services=True), ServingCore, PlacementCore, LifecycleCore]


class Platform:
    """Runs cores against a fleet under a simulated clock.

    Args of the constructor:
        cores: what to run; None: all deciding services.
    """

    def __init__(
        self,
        start: datetime,
        *,
        cores: Sequence[Callable[[], Core]] | None = None,
        keep_records: bool = True,
        through_json: bool = False,
    ) -> None:
        self.clock = SimClock(start)
        self.bus = SimBus(self.clock, keep_records=keep_records, through_json=through_json)
        self.audit: list[AuditRecord] = []
        self.bus.listen(self._record)
        for make in all_cores() if cores is None else cores:
            self.bus.attach(make)
        self.fleet = SimFleet(self.clock, self.bus)
        self.bus.before_settle = self._before_settle
        self.after_round: Callable[[], None] = lambda: None
        self._jobs = 0
        self._proposals = 0

    # ----------------------------------------------------------------------------------------------- what users do
    def submit(self, spec: JobSpec, *, by: str = "user:somebody", job_id: str | None = None) -> str:
        """Hand in a job; its id."""
        self._jobs += 1
        job_id = job_id or f"j{self._jobs:06d}"
        fact = JobSubmitted(job_id=job_id, spec=spec, submitted_at=self.clock.now, submitted_by=by)
        self.tell(fact, job_id, tenant=spec.tenant, actor=by)
        return job_id

    def cancel(self, job_id: str, *, by: str = "user:somebody", tenant: str = "") -> None:
        """Ask for the end of a job."""
        self.tell(JobCancelRequested(job_id=job_id, requested_by=by), job_id, tenant=tenant, actor=by)

    def propose(self, document: dict[str, Any], *, by: str = "user:operator", why: str = "") -> str:
        """Hand in a policy; the proposal's id."""
        self._proposals += 1
        proposal = f"p{self._proposals:04d}"
        self.tell(PolicyProposed(proposal_id=proposal, document=document, author=by, why=why), proposal, actor=by)
        return proposal

    def cordon(self, node: str, *, cordoned: bool, by: str = "user:operator") -> None:
        """Take a node out of use for new work, or back."""
        self.tell(NodeCordonRequested(node=node, cordoned=cordoned, requested_by=by), node, actor=by)

    def tell(self, fact: Fact, entity: str, *, tenant: str = "", actor: str = "") -> Envelope[Any]:
        """Publish a fact of the gateway's."""
        return self.bus.tell(fact, entity, service=GATEWAY, tenant=tenant, actor=actor)

    def restart(self) -> None:
        """All deciding services go and come back with what they stored."""
        for name in self.bus.services:
            self.bus.restart(name)

    def stop_bus(self) -> None:
        """Nothing passes between the parts."""
        self.fleet.beat()
        self.fleet.inventory.goes_deaf()
        self.bus.stop()

    def start_bus(self) -> None:
        """The bus is back: what was kept goes out, and silence counts from now."""
        self.bus.start()
        self.fleet.inventory.was_deaf(now=self.clock.now)
        self.fleet.beat()
        self.bus.batch(InventoryCore.NAME)
        self.fleet.flush()

    # ------------------------------------------------------------------------------------------------------- time
    def settle(self) -> None:
        """Let everything follow that can follow at this instant."""
        for _ in range(MAX_ROUNDS):
            rang = self.clock.ring()
            worked = self.bus.step()
            self.after_round()
            if not rang and not worked:
                return
        last = [event.id for event in self.bus.log[-6:]]
        raise NeverSettles(f"still busy at {self.clock.now.isoformat()} after {MAX_ROUNDS} rounds; last {last}")

    def advance(self, to: datetime) -> None:
        """Let time pass up to `to`; what falls due up to and at that instant happens, in order."""
        self.settle()
        while True:
            due = [time for time in (self.clock.next_alarm(), self.bus.next_timer()) if time is not None]
            if not due or min(due) > to:
                break
            self.clock.advance(min(due))
            self.settle()
        self.clock.advance(to)
        self.settle()

    def _before_settle(self, core: Core) -> None:
        if isinstance(core, InventoryCore):
            self.fleet.beat()

    def _record(self, event: Envelope[Any]) -> None:
        self.audit.append(AuditRecord(len(self.audit) + 1, self.clock.now, event))
