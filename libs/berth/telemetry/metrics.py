"""Metrics in Prometheus' form: one registry per process, bounded labels, exemplars.

prometheus_client rather than OpenTelemetry metrics, because exemplars (the trace behind an outlier) work there.
Labels never hold ids: of jobs, users or tenants there may be any number. `bounded` caps what comes from outside.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from berth.telemetry.traceparent import is_sampled

OTHER: Final = "other"

# Seconds; from a fast commit on a local disk to a stuck one.
SECONDS_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Seconds that users wait: from at once to a week.
WAIT_SECONDS_BUCKETS: Final = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)
COUNT_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def new_registry() -> CollectorRegistry:
    """A registry with the process's own memory, CPU, file and garbage collection numbers."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def exemplar(traceparent: str | None) -> dict[str, str] | None:
    """The exemplar for a measurement inside a sampled trace; None, which prometheus_client ignores, otherwise."""
    if traceparent is None or not is_sampled(traceparent):
        return None
    return {"trace_id": traceparent[3:35], "span_id": traceparent[36:52]}


def counter(registry: CollectorRegistry, name: str, about: str, labels: Sequence[str] = ()) -> Counter:
    """A counter; its name gets `_total`."""
    return Counter(name, about, labels, registry=registry)


def gauge(registry: CollectorRegistry, name: str, about: str, labels: Sequence[str] = ()) -> Gauge:
    return Gauge(name, about, labels, registry=registry)


def histogram(
    registry: CollectorRegistry,
    name: str,
    about: str,
    labels: Sequence[str] = (),
    *,
    buckets: Sequence[float] = SECONDS_BUCKETS,
) -> Histogram:
    return Histogram(name, about, labels, registry=registry, buckets=buckets)


class BoundedLabel:
    """Caps the values of one label: the first `limit` distinct ones keep their name, later ones become `other`.

    For values that come from outside (card types, policy names), where the number of series must not follow the input.
    """

    __slots__ = ("_known", "_limit")

    def __init__(self, limit: int = 64, *, known: Iterable[str] = ()) -> None:
        self._limit = limit
        self._known = set(known)

    def __call__(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._limit:
            return OTHER
        self._known.add(value)
        return value


class PipelineMetrics:
    """What every event service reports about its part of the pipeline.

    One object per process; `consumer` is the label of durable consumers, of which a service has a handful.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.outbox_rows: Final = gauge(registry, "berth_outbox_rows", "Outbox rows not yet published")
        self.outbox_age_seconds: Final = gauge(
            registry, "berth_outbox_age_seconds", "Age of the oldest unpublished outbox row"
        )
        self.consumer_pending: Final = gauge(
            registry, "berth_consumer_pending", "Messages not yet delivered to the consumer", ["consumer"]
        )
        self.consumer_ack_pending: Final = gauge(
            registry, "berth_consumer_ack_pending", "Messages delivered, not yet acknowledged", ["consumer"]
        )
        self.consumer_redelivered: Final = gauge(
            registry, "berth_consumer_redelivered", "Unacknowledged messages delivered more than once", ["consumer"]
        )
        self.position_lag: Final = gauge(
            registry,
            "berth_consumer_position_lag",
            "Stream sequences between the stored position and the end",
            ["consumer"],
        )
        self.parked_rows: Final = gauge(registry, "berth_parked_rows", "Messages parked for an operator")
        self.parked: Final = counter(registry, "berth_parked", "Messages parked", ["reason"])
        self.publish_ack_seconds: Final = histogram(
            registry, "berth_publish_ack_seconds", "From publishing a batch to the stream's acknowledgement"
        )
        self.batch_rejected: Final = counter(
            registry, "berth_publish_batch_rejected", "Atomic batches refused by the stream, by error code", ["code"]
        )
        self.duplicate_batches: Final = self.batch_rejected.labels("10201")
        self.reconnects: Final = counter(registry, "berth_bus_reconnects", "Reconnections to the bus")
        self.lease_epoch: Final = gauge(
            registry, "berth_leader_epoch", "Epoch of the leadership this process holds; 0 on standby"
        )
        self.commit_seconds: Final = histogram(
            registry, "berth_commit_seconds", "One batch's transaction, begin to commit"
        )
        self.commit_failures: Final = counter(
            registry, "berth_commit_failures", "Transactions rolled back; the decision state was reloaded", ["reason"]
        )
        self.batch_messages: Final = histogram(
            registry, "berth_batch_messages", "Messages in one batch", buckets=COUNT_BUCKETS
        )
        self.events_applied: Final = counter(registry, "berth_events_applied", "New events applied", ["type"])
        self.events_repeated: Final = counter(registry, "berth_events_repeated", "Events that had been applied before")
        self.events_emitted: Final = counter(registry, "berth_events_emitted", "Events written to the outbox", ["type"])
        self.settle_seconds: Final = histogram(registry, "berth_settle_seconds", "One decision pass")


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One card's latest numbers.

    None is "not known" and is shown as NaN, because a series that vanishes looks like health.
    """

    gpu: int
    uuid: str
    hostname: str
    pci_bus_id: str = ""
    model_name: str = ""
    gpu_util_percent: float | None = None
    mem_copy_util_percent: float | None = None
    fb_used_mib: float | None = None
    fb_free_mib: float | None = None
    fb_reserved_mib: float | None = None
    gpu_temp_celsius: float | None = None
    memory_temp_celsius: float | None = None
    power_watts: float | None = None
    energy_millijoules: float | None = None
    sm_clock_mhz: float | None = None
    mem_clock_mhz: float | None = None
    xid_last: float | None = None
    pcie_replays: float | None = None
    row_remap_failure: float | None = None
    uncorrectable_remapped_rows: float | None = None
    nvlink_bandwidth_total: float | None = None
    graphics_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    pcie_tx_bytes: float | None = None
    pcie_rx_bytes: float | None = None
    job: str = ""


# Attribute, name as dcgm-exporter has it (without prefix), help text. Dashboards made for dcgm-exporter work unchanged.
_DCGM: Final[tuple[tuple[str, str, str], ...]] = (
    ("gpu_util_percent", "DEV_GPU_UTIL", "GPU utilization (in %)."),
    ("mem_copy_util_percent", "DEV_MEM_COPY_UTIL", "Memory utilization (in %)."),
    ("fb_used_mib", "DEV_FB_USED", "Framebuffer memory used (in MiB)."),
    ("fb_free_mib", "DEV_FB_FREE", "Framebuffer memory free (in MiB)."),
    ("fb_reserved_mib", "DEV_FB_RESERVED", "Framebuffer memory reserved (in MiB)."),
    ("gpu_temp_celsius", "DEV_GPU_TEMP", "GPU temperature (in C)."),
    ("memory_temp_celsius", "DEV_MEMORY_TEMP", "Memory temperature (in C)."),
    ("power_watts", "DEV_POWER_USAGE", "Power draw (in W)."),
    ("energy_millijoules", "DEV_TOTAL_ENERGY_CONSUMPTION", "Total energy consumption since boot (in mJ)."),
    ("sm_clock_mhz", "DEV_SM_CLOCK", "SM clock frequency (in MHz)."),
    ("mem_clock_mhz", "DEV_MEM_CLOCK", "Memory clock frequency (in MHz)."),
    ("xid_last", "DEV_XID_ERRORS", "Value of the last XID error encountered."),
    ("pcie_replays", "DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries."),
    ("row_remap_failure", "DEV_ROW_REMAP_FAILURE", "Whether remapping of rows has failed."),
    ("uncorrectable_remapped_rows", "DEV_UNCORRECTABLE_REMAPPED_ROWS", "Remapped rows for uncorrectable errors."),
    ("nvlink_bandwidth_total", "DEV_NVLINK_BANDWIDTH_TOTAL", "NVLink bandwidth counters of all lanes."),
    ("graphics_active_ratio", "PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active."),
    ("tensor_active_ratio", "PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor pipe is active."),
    ("dram_active_ratio", "PROF_DRAM_ACTIVE", "Ratio of cycles the memory interface is active."),
    ("pcie_tx_bytes", "PROF_PCIE_TX_BYTES", "PCIe bytes sent (per second)."),
    ("pcie_rx_bytes", "PROF_PCIE_RX_BYTES", "PCIe bytes received (per second)."),
)
_DCGM_LABELS: Final = ("gpu", "UUID", "pci_bus_id", "device", "modelName", "hostname", "hpc_job")


class GpuMetrics(Collector):
    """Shows the cards of this process's nodes under dcgm-exporter's names.

    Reads at scrape time: a card that is gone leaves no stale series. All families are gauges, also the counters among
    them, because OpenMetrics would append `_total` and dashboards would not find the name.
    """

    def __init__(
        self, registry: CollectorRegistry, read: Callable[[], Iterable[GpuReading]], *, prefix: str = "DCGM_FI_"
    ) -> None:
        self._read = read
        self._prefix = prefix
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        readings = [(_labels(reading), reading) for reading in self._read()]
        for attribute, name, about in _DCGM:
            family = GaugeMetricFamily(self._prefix + name, about, labels=_DCGM_LABELS)
            for labels, reading in readings:
                value = getattr(reading, attribute)
                family.add_metric(labels, math.nan if value is None else value)
            yield family

    def describe(self) -> Iterable[Metric]:
        # Without this, registering would read the cards.
        return [GaugeMetricFamily(self._prefix + name, about, labels=_DCGM_LABELS) for _, name, about in _DCGM]


def _labels(reading: GpuReading) -> tuple[str, ...]:
    return (
        str(reading.gpu),
        reading.uuid,
        reading.pci_bus_id,
        f"nvidia{reading.gpu}",
        reading.model_name,
        reading.hostname,
        reading.job,
    )
