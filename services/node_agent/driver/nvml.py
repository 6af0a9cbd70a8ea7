"""`GpuDriver` over NVIDIA's management library, through the package nvidia-ml-py (module `pynvml`).

Traps of the binding and of the library that are met here, each where it bites:

* `NVMLError` defines equality without hash, so it is turned into our own error at once;
* a function the installed driver lacks is noticed only when it is called: asked once per card and call, then left out;
* the first memory call counts the driver's own reserve as used, the second does not;
* utilisation covers 1/6 to 1 s before the call, so the card's own sample buffer is read since the last time stamp;
* "not found" of per-process utilisation means nobody used the card; values above 100 and pid 0 are garbage;
* the layout of the process list changed within driver 535 without a new name: a list is checked before it is believed;
* field values carry a return code each.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from services.node_agent.driver.base import (
    FaultKind,
    GpuDriverError,
    GpuEvent,
    GpuHealth,
    GpuInfo,
    GpuProcess,
    GpuTelemetry,
    HealthLevel,
    LinkClass,
    MigInstance,
    MigState,
    Tier,
    Topology,
    groups_from,
)
from services.node_agent.driver.cards import card_type

SYSFS_PCI: Final = Path("/sys/bus/pci/devices")
PROC: Final = Path("/proc")
MIB: Final = 1 << 20

# Return codes (nvml.h). Whatever is not listed is asked again.
_KINDS: Final = {
    1: FaultKind.RELOAD,  # uninitialized
    3: FaultKind.UNSUPPORTED,  # not supported
    4: FaultKind.DENIED,
    9: FaultKind.RELOAD,  # driver not loaded
    12: FaultKind.RELOAD,  # library not found
    13: FaultKind.UNSUPPORTED,  # function not found
    15: FaultKind.LOST,  # GPU is lost
    16: FaultKind.LOST,  # reset required
    18: FaultKind.RELOAD,  # library and kernel module do not match
    25: FaultKind.UNSUPPORTED,  # argument version mismatch
    26: FaultKind.UNSUPPORTED,  # deprecated
}
_NOT_FOUND, _INSUFFICIENT_SIZE, _TIMEOUT = 6, 7, 10

_P2P_NVLINK: Final = 2
_REMOTE_SWITCH: Final = 2
_FIELD_MEMORY_TEMPERATURE, _FIELD_LINK_COUNT, _FIELD_RECOVERY_ACTION = 82, 91, 230
_MAX_LINKS: Final = 36
_EVENT_XID, _EVENT_DOUBLE_BIT = 0x8, 0x2
_DEGRADING_REASONS: Final = 0x20 | 0x40 | 0x80
_ANCESTORS: Final = {
    0: LinkClass.PIX,  # same board
    10: LinkClass.PIX,
    20: LinkClass.PXB,
    30: LinkClass.PHB,
    40: LinkClass.NODE,
    50: LinkClass.SYS,
}
_FABRIC_COMPLETED: Final = 3
_WRONG_DISTRIBUTION: Final = "nvidia-ml-py3"


@dataclass(slots=True)
class _Card:
    """What is kept of a card between calls; fetching handles anew is the costly part."""

    handle: Any
    info: GpuInfo
    unsupported: set[str] = field(default_factory=set)
    is_lost: bool = False
    samples_until_us: int = 0
    processes_until_us: int = 0
    energy_mj: int | None = None
    energy_at: float = 0.0


class NvmlDriver:
    """The machine's own cards. One instance per process, used by one thread at a time, `events` by another."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._driver_version = ""
        self._cards: list[_Card] = []
        self._missing: set[int] = set()
        self._event_set: Any = None
        self._events_lock = threading.Lock()

    # -- opening

    def open(self) -> None:
        """Load the library and list the cards. Kept open for the agent's life: opening anew re-initialises the cards.

        Raises:
            GpuDriverError: no driver, no library, or the wrong package under the name `pynvml`.
        """
        if self._nvml is not None:
            return
        self._nvml = _load_binding()
        self._call("nvmlInit")
        self._driver_version = _text(self._call("nvmlSystemGetDriverVersion"))
        self._missing = set(range(self._call("nvmlDeviceGetCount")))
        self._look_for_missing()

    def _look_for_missing(self) -> None:
        """Take in cards that could not be read so far: busy with a reset, or off the bus before we came."""
        for index in sorted(self._missing):
            try:
                self._cards.append(self._card(self._call("nvmlDeviceGetHandleByIndex", index), index))
                self._missing.discard(index)
            except GpuDriverError as error:
                if error.kind is FaultKind.RELOAD:
                    raise
        self._cards.sort(key=lambda card: card.info.index)

    def close(self) -> None:
        if self._nvml is None:
            return
        with self._events_lock:
            self._free_events()
        try:
            self._call("nvmlShutdown")
        except GpuDriverError:
            pass  # going anyway
        self._nvml = None
        self._cards.clear()

    def _card(self, handle: Any, index: int) -> _Card:
        model = _text(self._call("nvmlDeviceGetName", handle))
        uuid = _text(self._call("nvmlDeviceGetUUID", handle))
        total_mib = int(self._call("nvmlDeviceGetMemoryInfo", handle).total) // MIB
        card = _Card(handle, GpuInfo(uuid, index, model, card_type(model, total_mib), total_mib))
        bus_id = _bus_id(self._optional(card, "nvmlDeviceGetPciInfo"))
        capability = self._optional(card, "nvmlDeviceGetCudaComputeCapability")
        persistence = self._optional(card, "nvmlDeviceGetPersistenceMode")
        mig, instances = self._mig(card)
        card.info = GpuInfo(
            uuid=uuid,
            index=index,
            model=model,
            card_type=card.info.card_type,
            memory_mib=total_mib,
            driver_version=self._driver_version,
            pci_bus_id=bus_id,
            numa_node=_numa_node(bus_id),
            compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
            serial=_text(self._optional(card, "nvmlDeviceGetSerial") or ""),
            minor=self._optional(card, "nvmlDeviceGetMinorNumber"),
            mig=mig,
            mig_instances=instances,
            persistence=None if persistence is None else bool(persistence),
        )
        return card

    # -- GpuDriver

    def gpus(self) -> tuple[GpuInfo, ...]:
        if self._missing:
            self._look_for_missing()
        return tuple(card.info for card in self._cards)

    def topology(self) -> Topology:
        size = len(self._cards)
        matrix = [[LinkClass.SELF] * size for _ in range(size)]
        for row, first in enumerate(self._cards):
            for column in range(row + 1, size):
                matrix[row][column] = matrix[column][row] = self._link(first, self._cards[column])
        frozen = tuple(tuple(row) for row in matrix)
        return Topology(frozen, groups_from(frozen), self._fabric())

    def telemetry(self, tier: Tier) -> tuple[GpuTelemetry, ...]:
        return tuple(self._read(card, tier) for card in self._cards)

    def health(self) -> tuple[GpuHealth, ...]:
        return tuple(self._health(card) for card in self._cards)

    def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        with self._events_lock:
            if self._event_set is None and not self._register_events():
                time.sleep(timeout_seconds)  # nothing reports events here; `health` is what is left
                return ()
            try:
                event = self._call("nvmlEventSetWait", self._event_set, int(timeout_seconds * 1000))
            except GpuDriverError as error:
                if error.code == _TIMEOUT:
                    return ()
                if error.kind is not FaultKind.LOST:
                    raise
                # Some card is lost and the library does not say which: look at all, and go on without the lost one.
                self._free_events()
                self.health()
                return (GpuEvent("", 79, time.time_ns()),)
            if not int(event.eventType) & _EVENT_XID:
                return ()
            return (GpuEvent(self._uuid_of(event.device), int(event.eventData), time.time_ns()),)

    # -- readings

    def _read(self, card: _Card, tier: Tier) -> GpuTelemetry:
        uuid, now_ns = card.info.uuid, time.time_ns()
        if card.is_lost:
            return GpuTelemetry(uuid, now_ns)
        memory = self._memory(card)
        processes, are_trusted = self._processes(card, with_utilization=tier is Tier.WARM)
        watts, energy = self._power(card)
        is_warm = tier is Tier.WARM
        rates = self._optional(card, "nvmlDeviceGetUtilizationRates")
        reading = GpuTelemetry(
            uuid,
            now_ns,
            utilization_percent=self._utilization(card, None if rates is None else float(rates.gpu)),
            memory_used_mib=None if memory is None else int(memory.used) // MIB,
            memory_reserved_mib=None if memory is None else int(getattr(memory, "reserved", 0)) // MIB,
            memory_total_mib=None if memory is None else int(memory.total) // MIB,
            memory_busy_percent=None if rates is None else float(rates.memory),
            power_watts=watts,
            energy_millijoules=energy,
            temperature_celsius=self._temperature(card) if is_warm else None,
            memory_temperature_celsius=self._field(card, _FIELD_MEMORY_TEMPERATURE) if is_warm else None,
            sm_clock_mhz=self._optional(card, "nvmlDeviceGetClockInfo", 1) if is_warm else None,
            memory_clock_mhz=self._optional(card, "nvmlDeviceGetClockInfo", 2) if is_warm else None,
            clock_reasons=self._clock_reasons(card),
            processes=processes,
            processes_trusted=are_trusted,
        )
        return GpuTelemetry(uuid, now_ns) if card.is_lost else reading

    def _memory(self, card: _Card) -> Any:
        version = getattr(self._binding, "nvmlMemory_v2", None)
        memory = None if version is None else self._optional(card, "nvmlDeviceGetMemoryInfo", version)
        return (
            self._optional(card, "nvmlDeviceGetMemoryInfo", label="nvmlDeviceGetMemoryInfo v1")
            if memory is None
            else memory
        )

    def _utilization(self, card: _Card, otherwise: float | None) -> float | None:
        """Mean of the card's own samples since the last call."""
        found = self._optional(card, "nvmlDeviceGetSamples", 1, card.samples_until_us)
        if found is None:
            return otherwise
        samples = [sample for sample in found[1] if int(sample.timeStamp) > card.samples_until_us]
        values = [int(sample.sampleValue.uiVal) for sample in samples]
        values = [value for value in values if 0 <= value <= 100]
        if samples:
            card.samples_until_us = max(int(sample.timeStamp) for sample in samples)
        return round(sum(values) / len(values), 1) if values else otherwise

    def _power(self, card: _Card) -> tuple[float | None, int | None]:
        """Mean watts since the last call from the energy counter, else what is drawn now; and the counter."""
        now = time.monotonic()
        energy = self._optional(card, "nvmlDeviceGetTotalEnergyConsumption")
        before, before_at = card.energy_mj, card.energy_at
        card.energy_mj, card.energy_at = (None if energy is None else int(energy)), now
        if energy is not None and before is not None and energy > before and now > before_at:
            return round((int(energy) - before) / 1000 / (now - before_at), 1), int(energy)
        milliwatts = self._optional(card, "nvmlDeviceGetPowerUsage")
        return (None if milliwatts is None else milliwatts / 1000), (None if energy is None else int(energy))

    def _temperature(self, card: _Card) -> float | None:
        found = self._optional(card, "nvmlDeviceGetTemperatureV", 0)
        if found is None:
            found = self._optional(card, "nvmlDeviceGetTemperature", 0)
        return None if found is None else float(found)

    def _clock_reasons(self, card: _Card) -> int | None:
        found = self._optional(card, "nvmlDeviceGetCurrentClocksEventReasons")
        if found is None:
            found = self._optional(card, "nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if found is None else int(found)

    def _processes(self, card: _Card, *, with_utilization: bool) -> tuple[tuple[GpuProcess, ...] | None, bool]:
        """Processes of all kinds, and whether the list can be believed."""
        memory_of: dict[int, int | None] = {}
        is_known = False
        for call in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
            "nvmlDeviceGetMPSComputeRunningProcesses",
        ):
            found = self._optional(card, call)
            if found is None:
                continue
            is_known = True
            for process in found:
                used = process.usedGpuMemory
                memory_of[int(process.pid)] = None if used is None else int(used) // MIB
        if not is_known:
            return None, False
        busy = self._process_utilization(card) if with_utilization else {}
        processes = tuple(GpuProcess(pid, mib, busy.get(pid)) for pid, mib in sorted(memory_of.items()))
        return processes, all(_is_plausible(process, card.info.memory_mib) for process in processes)

    def _process_utilization(self, card: _Card) -> dict[int, int]:
        if card.info.mig is MigState.ENABLED:
            return {}
        try:
            samples = self._of_card(card, "nvmlDeviceGetProcessUtilization", card.processes_until_us)
        except GpuDriverError as error:
            if error.kind is FaultKind.UNSUPPORTED:
                card.unsupported.add("nvmlDeviceGetProcessUtilization")
            return {}  # not found: nobody has used the card since
        busy: dict[int, int] = {}
        for sample in samples or ():
            card.processes_until_us = max(card.processes_until_us, int(sample.timeStamp))
            if int(sample.pid) > 0 and int(sample.smUtil) <= 100:
                busy[int(sample.pid)] = max(busy.get(int(sample.pid), 0), int(sample.smUtil))
        return busy

    # -- health

    def _health(self, card: _Card) -> GpuHealth:
        uuid = card.info.uuid
        was_lost, card.is_lost = card.is_lost, False
        try:
            self._of_card(card, "nvmlDeviceGetUUID")  # the cheapest question a lost card cannot answer
        except GpuDriverError as error:
            card.is_lost = error.kind is FaultKind.LOST or was_lost
            level = HealthLevel.LOST if card.is_lost else HealthLevel.UNKNOWN
            return GpuHealth(uuid, level, why=str(error))
        rows = self._optional(card, "nvmlDeviceGetRemappedRows")
        pending, failed = (bool(rows[2]), bool(rows[3])) if rows is not None else (False, False)
        ecc = self._optional(card, "nvmlDeviceGetTotalEccErrors", 1, 0)
        action = self._field(card, _FIELD_RECOVERY_ACTION)
        reasons = self._clock_reasons(card)
        level, why = _level(failed=failed, pending=pending, action=action, reasons=reasons)
        if card.is_lost:
            level, why = HealthLevel.LOST, "lost while it was looked at"
        return GpuHealth(
            uuid,
            level,
            ecc_uncorrected=None if ecc is None else int(ecc),
            remap_pending=pending,
            remap_failed=failed,
            recovery_action=action,
            why=why,
        )

    def _register_events(self) -> bool:
        """Ask every card that can for Xid events; false when none can."""
        event_set = self._call("nvmlEventSetCreate")
        registered = 0
        for card in self._cards:
            supported = None if card.is_lost else self._optional(card, "nvmlDeviceGetSupportedEventTypes")
            wanted = (_EVENT_XID | _EVENT_DOUBLE_BIT) & int(supported or 0)
            if not wanted:
                continue
            try:
                self._of_card(card, "nvmlDeviceRegisterEvents", wanted, event_set)
                registered += 1
            except GpuDriverError as error:
                if error.kind is FaultKind.RELOAD:
                    raise
        if not registered:
            self._call("nvmlEventSetFree", event_set)
            return False
        self._event_set = event_set
        return True

    def _free_events(self) -> None:
        if self._event_set is not None:
            event_set, self._event_set = self._event_set, None
            try:
                self._call("nvmlEventSetFree", event_set)
            except GpuDriverError:
                pass

    def _uuid_of(self, handle: Any) -> str:
        try:
            return _text(self._call("nvmlDeviceGetUUID", handle))
        except GpuDriverError:
            return ""

    # -- links

    def _link(self, first: _Card, second: _Card) -> LinkClass:
        status = self._optional(first, "nvmlDeviceGetP2PStatus", second.handle, _P2P_NVLINK)
        if status == 0:
            return LinkClass.NVSWITCH if self._is_switched(first) else LinkClass.NVLINK
        ancestor = self._optional(first, "nvmlDeviceGetTopologyCommonAncestor", second.handle)
        return _ANCESTORS.get(-1 if ancestor is None else int(ancestor), LinkClass.SYS)

    def _is_switched(self, card: _Card) -> bool:
        count = self._field(card, _FIELD_LINK_COUNT)
        for link in range(min(_MAX_LINKS if count is None else count, _MAX_LINKS)):
            try:
                if self._of_card(card, "nvmlDeviceGetNvLinkRemoteDeviceType", link) == _REMOTE_SWITCH:
                    return True
            except GpuDriverError as error:
                if error.kind is FaultKind.UNSUPPORTED and error.code == 13:
                    return False
        return False

    def _fabric(self) -> str:
        """`clusterUuid/cliqueId` of the fabric the first card has joined; empty: none, or not yet."""
        kind = getattr(self._binding, "c_nvmlGpuFabricInfo_v3_t", None)
        if kind is None or not self._cards:
            return ""
        info = kind()
        if self._optional(self._cards[0], "nvmlDeviceGetGpuFabricInfoV", ctypes.byref(info)) is None:
            return ""
        cluster = bytes(info.clusterUuid)
        if info.state != _FABRIC_COMPLETED or info.status != 0 or not any(cluster):
            return ""
        return f"{cluster.hex()}/{info.cliqueId}"

    # -- partitioned cards

    def _mig(self, card: _Card) -> tuple[MigState, tuple[MigInstance, ...]]:
        modes = self._optional(card, "nvmlDeviceGetMigMode")
        if modes is None:
            return MigState.UNSUPPORTED, ()
        current, pending = modes
        if current != pending:
            return MigState.CHANGING, ()
        if not current:
            return MigState.DISABLED, ()
        return MigState.ENABLED, tuple(self._mig_instances(card))

    def _mig_instances(self, card: _Card) -> Iterator[MigInstance]:
        for index in range(self._optional(card, "nvmlDeviceGetMaxMigDeviceCount") or 0):
            try:
                handle = self._of_card(card, "nvmlDeviceGetMigDeviceHandleByIndex", index)
                attributes = self._call("nvmlDeviceGetAttributes", handle)
                memory_mib = int(attributes.memorySizeMB)
                yield MigInstance(
                    uuid=_text(self._call("nvmlDeviceGetUUID", handle)),
                    profile=f"{int(attributes.gpuInstanceSliceCount)}g.{round(memory_mib / 1024)}gb",
                    memory_mib=memory_mib,
                    gpu_instance=int(self._call("nvmlDeviceGetGpuInstanceId", handle)),
                    compute_instance=int(self._call("nvmlDeviceGetComputeInstanceId", handle)),
                )
            except GpuDriverError as error:
                if error.code != _NOT_FOUND:  # the numbering has holes
                    raise

    # -- calling

    @property
    def _binding(self) -> ModuleType:
        if self._nvml is None:
            raise GpuDriverError(FaultKind.RELOAD, "open", text="not open")
        return self._nvml

    def _call(self, name: str, *args: Any) -> Any:
        """One call, with its error turned into ours. Size-then-fetch calls race with starting processes: once more."""
        function: Callable[..., Any] | None = getattr(self._binding, name, None)
        if function is None:
            raise GpuDriverError(FaultKind.UNSUPPORTED, name, 13, "not in this version of nvidia-ml-py")
        for is_last in (False, True):
            try:
                return function(*args)
            except self._binding.NVMLError as error:
                code = int(error.value)
                if code == _INSUFFICIENT_SIZE and not is_last:
                    continue
                raise GpuDriverError(_KINDS.get(code, FaultKind.TRANSIENT), name, code, str(error)) from None
        raise AssertionError("unreachable")

    def _of_card(self, card: _Card, name: str, *args: Any) -> Any:
        try:
            return self._call(name, card.handle, *args)
        except GpuDriverError as error:
            card.is_lost = card.is_lost or error.kind is FaultKind.LOST
            raise

    def _optional(self, card: _Card, name: str, *args: Any, label: str = "") -> Any:
        """A reading, or None when the card does not give it. What it never gives is not asked again.

        Raises:
            GpuDriverError: RELOAD only.
        """
        label = label or name
        if card.is_lost or label in card.unsupported:
            return None
        try:
            return self._of_card(card, name, *args)
        except GpuDriverError as error:
            if error.kind is FaultKind.RELOAD:
                raise
            if error.kind in (FaultKind.UNSUPPORTED, FaultKind.DENIED):
                card.unsupported.add(label)
            return None

    def _field(self, card: _Card, number: int) -> int | None:
        label = f"field {number}"
        values = self._optional(card, "nvmlDeviceGetFieldValues", [number], label=label)
        if values is None:
            return None
        if values[0].nvmlReturn != 0:
            if _KINDS.get(int(values[0].nvmlReturn)) is FaultKind.UNSUPPORTED:
                card.unsupported.add(label)
            return None
        return int(values[0].value.uiVal)


def _load_binding() -> ModuleType:
    """Three packages provide a module `pynvml`; only NVIDIA's own is used, and never the abandoned one of 2017."""
    try:
        import pynvml
    except ImportError as error:
        raise GpuDriverError(FaultKind.RELOAD, "import pynvml", text="install nvidia-ml-py") from error
    module: ModuleType = pynvml
    names = importlib.metadata.packages_distributions().get("pynvml", [])
    if _WRONG_DISTRIBUTION in names or not hasattr(module, "nvmlDeviceGetFieldValues"):
        raise GpuDriverError(
            FaultKind.RELOAD, "import pynvml", text=f"provided by {', '.join(names)}; install nvidia-ml-py instead"
        )
    return module


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bus_id(pci: Any) -> str:
    """`00000000:3B:00.0` as sysfs writes it, `0000:3b:00.0`."""
    if pci is None:
        return ""
    domain, _, rest = _text(pci.busId).lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _numa_node(bus_id: str) -> int | None:
    """The kernel's word on it; NVML's own call is about cards that are NUMA nodes themselves."""
    try:
        node = int((SYSFS_PCI / bus_id / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _is_plausible(process: GpuProcess, memory_mib: int) -> bool:
    return (process.memory_mib or 0) <= memory_mib and (PROC / str(process.pid)).exists()


def _level(*, failed: bool, pending: bool, action: int | None, reasons: int | None) -> tuple[HealthLevel, str]:
    if failed:
        return HealthLevel.FAILED, "row remapping failed"
    if action in (2, 7):
        return HealthLevel.FAILED, f"recovery action {action}: reboot"
    if pending or action:
        return HealthLevel.DRAINING, "row remapping pending" if pending else f"recovery action {action}"
    if reasons is not None and reasons & _DEGRADING_REASONS:
        return HealthLevel.DEGRADED, f"clocks held down: {reasons & _DEGRADING_REASONS:#x}"
    return HealthLevel.OK, ""
