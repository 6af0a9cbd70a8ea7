"""One node: its session with the platform, its workers, what it remembers."""

from __future__ import annotations

import os
import socket
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from berth.contracts.base import TOKEN
from berth.contracts.events import GpuConditionReported
from berth.contracts.nodes import GpuDescription, MigLayout, NodeDescription, RegisterNode, WorkerReport
from berth.contracts.reasons import Reason
from services.node_agent.driver.base import GpuDriver, GpuInfo, MigState, Topology
from services.node_agent.journal import Journal
from services.node_agent.process.runtime import WorkerKey
from services.node_agent.process.zygote import boot_id
from services.node_agent.rules import NodeView
from services.node_agent.workers import Phase, Worker

WORKER: Final = "worker"
REFUSED: Final = "refused"
REMEMBER_SECONDS: Final = 600.0
"""So long after its expiry a command is remembered; a repeat after that is refused as expired."""
AGENT_VERSION: Final = "0.1.0"


@dataclass(slots=True)
class Session:
    """What an accepted registration gave the node."""

    epoch: int
    lease_seconds: float
    deadline_ns: int
    """CLOCK_BOOTTIME; when it passes, the node's work is stopped."""
    telemetry_every_seconds: float
    stop_seconds: float = 0.0
    """From the deadline until the platform may give the cards away; 0: not known."""
    sequence: int = 0
    sent_ns: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Sequence -> CLOCK_BOOTTIME of frames not yet answered."""


class Node:
    """State of one node. Only its handlers change it, all in one event loop."""

    def __init__(
        self,
        name: str,
        driver: GpuDriver,
        journal: Journal,
        *,
        domain: dict[str, str],
        is_shareable: bool,
        runtime: str,
    ) -> None:
        if not TOKEN.match(name):
            raise ValueError(f"node name {name!r}: letters, digits, _ and - only")
        self.name = name
        self.driver = driver
        self.view = NodeView(name)
        self.session: Session | None = None
        self.workers: dict[WorkerKey, Worker] = {}
        self.unclean: dict[str, int] = {}
        self.gpus: tuple[GpuInfo, ...] = ()
        self.topology = Topology(())
        self.is_registering = False
        self.silent_until = 0.0
        """Event-loop time until which a simulated node pretends to be cut off."""
        self._journal = journal
        self._domain = domain
        self._is_shareable = is_shareable
        self._runtime = runtime
        self._carried_out: dict[str, float] = {}
        """Stops and reconcilings of this session -> when they expire."""
        self._by_attempt: dict[tuple[str, int], list[Worker]] = {}
        self._live: dict[WorkerKey, Worker] = {}

    def open(self) -> None:
        """Look at the cards and remember what the journal holds."""
        self.look_at_cards()
        for _, entry in self._journal.entries(WORKER, f"{self.name}/"):
            self._remember(Worker.from_entry(entry))

    def look_at_cards(self) -> None:
        """Read cards and links again; blocks."""
        self.gpus = self.driver.gpus()
        self.topology = self.driver.topology()
        uuids = {gpu.uuid for gpu in self.gpus}
        self.view.gpu_uuids = frozenset(uuids | {m.uuid for gpu in self.gpus for m in gpu.mig_instances})

    # -- workers

    def live(self) -> list[Worker]:
        """Workers that may hold cards or processes."""
        return list(self._live.values())

    def workers_of_attempt(self, job_id: str, attempt: int) -> list[Worker]:
        return self._by_attempt.get((job_id, attempt), [])

    def add(self, worker: Worker) -> None:
        """Take on a worker; the caller flushes the journal before it is started."""
        self._remember(worker)
        self.save(worker)

    def save(self, worker: Worker) -> None:
        """Note the worker as it is now."""
        self._journal.put(WORKER, worker.journal_key, worker)
        if worker.phase is Phase.RELEASED:
            self._live.pop(worker.key, None)

    def _remember(self, worker: Worker) -> None:
        self.workers[worker.key] = worker
        self._by_attempt.setdefault((worker.job_id, worker.attempt), []).append(worker)
        if worker.phase is not Phase.RELEASED:
            self._live[worker.key] = worker
        self.view.job_fences[worker.job_id] = max(worker.fence, self.view.job_fences.get(worker.job_id, 0))
        for gpu in worker.gpus:
            self.view.remember_gpu(gpu, worker.fence, is_exclusive=worker.is_exclusive)

    def devices_for(self, gpus: tuple[str, ...], slice_profile: str | None) -> tuple[str, ...] | None:
        """What a program on these cards is given: the cards, or for a slice a free instance of each.

        None when a card has no free instance of the profile.
        """
        if slice_profile is None:
            return gpus
        taken = {device for worker in self._live.values() for device in worker.devices}
        devices = []
        for gpu in self.gpus:
            if gpu.uuid not in gpus:
                continue
            if gpu.mig is not MigState.ENABLED:  # a simulated card has no instances
                devices.append(gpu.uuid)
                continue
            free = (m.uuid for m in gpu.mig_instances if m.profile == slice_profile and m.uuid not in taken)
            if (found := next(free, None)) is None:
                return None
            devices.append(found)
        return tuple(devices)

    # -- refused commands

    def note_refused(self, command_id: str, expires_at: float, reason: Reason) -> None:
        """A launch that was refused once is refused for good, even if it would be right by now."""
        entry = {"expires_at": expires_at, "reason": reason.model_dump(mode="json")}
        self._journal.put(REFUSED, f"{self.name}/{command_id}", entry)

    def was_refused(self, command_id: str) -> Reason | None:
        """Why this command was refused before; None if it was not."""
        entry = self._journal.get(REFUSED, f"{self.name}/{command_id}")
        return None if entry is None else Reason.model_validate(entry["reason"])

    def is_repeated(self, command_id: str, expires_at: float) -> bool:
        """Whether this stop or reconciling was carried out in this session before; from now on it was.

        A bus that restarts sends all commands of the last minutes again. In a later session they are refused by epoch.
        """
        if command_id in self._carried_out:
            return True
        self._carried_out[command_id] = expires_at
        return False

    def forget_old(self, now: float) -> None:
        """Drop what no repeated command can ask for any more. `now`: the platform's clock, seconds since 1970."""
        for key, worker in tuple(self.workers.items()):
            if worker.is_told and worker.expires_at + REMEMBER_SECONDS < now:
                del self.workers[key]
                self._by_attempt.pop((worker.job_id, worker.attempt), None)
                self._journal.remove(WORKER, worker.journal_key)
                if not any(other.job_id == worker.job_id for other in self._live.values()):
                    self.view.job_fences.pop(worker.job_id, None)
                    self.view.stopped_fences.pop(worker.job_id, None)
        for name, entry in self._journal.entries(REFUSED, f"{self.name}/"):
            expires_at = entry["expires_at"]
            if isinstance(expires_at, int | float) and expires_at + REMEMBER_SECONDS < now:
                self._journal.remove(REFUSED, name)

    # -- session

    def begin_session(
        self, epoch: int, lease_seconds: float, every_seconds: float, asked_at_ns: int, stop_seconds: float = 0.0
    ) -> None:
        """Inventory has accepted the node; nothing is launched before it is reconciled."""
        deadline_ns = asked_at_ns + int(lease_seconds * 1e9)
        self.session = Session(epoch, lease_seconds, deadline_ns, every_seconds, stop_seconds)
        self.view.epoch = epoch
        self.view.is_reconciled = False

    def end_session(self) -> None:
        """The lease is gone: no command is taken before the node is registered anew."""
        self.session = None
        self.view.epoch = 0
        self.view.is_reconciled = False

    def description(self) -> NodeDescription:
        """What inventory and placement need to know."""
        return NodeDescription(
            node=self.name,
            hostname=socket.gethostname(),
            driver_version=self.gpus[0].driver_version if self.gpus else "",
            gpus=tuple(_described(gpu) for gpu in self.gpus),
            link_groups=self.topology.link_groups,
            link_matrix=tuple(tuple(str(link) for link in row) for row in self.topology.matrix),
            domain=self._domain,
            shareable=self._is_shareable,
            cpu_count=os.cpu_count() or 0,
            memory_mib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
            enforcement="none",
            runtime=self._runtime,
            agent_version=AGENT_VERSION,
            boot_id=boot_id(),
        )

    def registration(self, sent_at: float) -> RegisterNode:
        """The request: what the node is, what it still runs, what ended and is not confirmed."""
        workers = tuple(
            WorkerReport(
                job_id=worker.job_id,
                attempt=worker.attempt,
                fence=worker.fence,
                worker=worker.worker,
                state=str(worker.phase),
            )
            for worker in self.workers.values()
            if not worker.is_told
        )
        return RegisterNode(
            description=self.description(), workers=workers, sent_at=datetime.fromtimestamp(sent_at, tz=UTC)
        )

    def condition(
        self, gpu: str, at: float, *, xid: int | None = None, used: int | None = None, passed: bool = False
    ) -> GpuConditionReported:
        """A report on a card."""
        return GpuConditionReported(
            node=self.name,
            epoch=self.view.epoch,
            gpu=gpu,
            xid=xid,
            memory_used_mib=used,
            passed_check=passed,
            at=datetime.fromtimestamp(at, tz=UTC),
        )


def boottime_ns() -> int:
    """The clock of leases: it goes on while the machine sleeps, and nobody sets it."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def _described(gpu: GpuInfo) -> GpuDescription:
    return GpuDescription(
        uuid=gpu.uuid,
        index=gpu.index,
        card_type=gpu.card_type,
        model=gpu.model,
        memory_mib=gpu.memory_mib,
        pci_bus_id=gpu.pci_bus_id,
        numa_node=gpu.numa_node,
        mig=_mig(gpu),
    )


def _mig(gpu: GpuInfo) -> MigLayout | None:
    if gpu.mig is not MigState.ENABLED:
        return None
    slices: dict[str, int] = {}
    for instance in gpu.mig_instances:
        slices[instance.profile] = slices.get(instance.profile, 0) + 1
    return MigLayout(slices=slices)
