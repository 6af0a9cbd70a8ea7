"""What the agent shows at `/metrics`: its own numbers, and the cards under dcgm-exporter's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry

from berth.telemetry.metrics import GpuMetrics, GpuReading, counter, gauge, histogram
from services.node_agent.deps import Deps
from services.node_agent.node import Node, boottime_ns
from services.node_agent.sampling import Sampler

MAX_CARDS_SHOWN: Final = 512
"""A bench fleet of thousands of cards would make a page of hundreds of thousands of lines."""


class AgentMetrics:
    """Counts and times of one process; labels are bounded, nodes are none of them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.launches: Final = counter(registry, "berth_agent_launches", "Programs started or refused", ["outcome"])
        self.launch_seconds: Final = histogram(
            registry, "berth_agent_launch_seconds", "From the command in hand to the program running"
        )
        self.ends: Final = counter(registry, "berth_agent_worker_ends", "Workers ended", ["how"])
        self.refused: Final = counter(registry, "berth_agent_commands_refused", "Commands refused", ["code"])
        self.reports_backlog: Final = gauge(
            registry, "berth_agent_reports_backlog", "Reports the bus has not confirmed yet"
        )
        self.workers: Final = gauge(registry, "berth_agent_workers", "Workers that may hold cards")
        self.lease_seconds: Final = gauge(
            registry, "berth_agent_lease_seconds_left", "Shortest time any node's lease has left; 0: a node has none"
        )

    def watch(self, deps: Deps) -> None:
        """Read what can be read at any time when somebody asks."""
        nodes = deps.nodes
        self.reports_backlog.set_function(lambda: deps.reporter.backlog)
        self.workers.set_function(lambda: sum(len(node.live()) for node in nodes.values()))
        self.lease_seconds.set_function(lambda: min((_left(node) for node in nodes.values()), default=0.0))


def _left(node: Node) -> float:
    return 0.0 if node.session is None else max((node.session.deadline_ns - boottime_ns()) / 1e9, 0.0)


def show_cards(registry: CollectorRegistry, nodes: Mapping[str, Node], samplers: Mapping[str, Sampler]) -> None:
    """Show the latest readings of all cards; nothing when there are too many."""
    if sum(len(node.gpus) for node in nodes.values()) <= MAX_CARDS_SHOWN:
        GpuMetrics(registry, lambda: list(_readings(nodes, samplers)))


def _readings(nodes: Mapping[str, Node], samplers: Mapping[str, Sampler]) -> Iterable[GpuReading]:
    for name, node in nodes.items():
        latest = samplers[name].window.latest
        holders = {gpu: worker.job_id for worker in node.live() for gpu in worker.gpus}
        for gpu in node.gpus:
            reading = latest.get(gpu.uuid)
            if reading is None:
                continue
            used, total, kept = reading.memory_used_mib, reading.memory_total_mib, reading.memory_reserved_mib
            free = None if used is None or total is None else total - used - (kept or 0)
            yield GpuReading(
                gpu=gpu.index,
                uuid=gpu.uuid,
                hostname=name,
                pci_bus_id=gpu.pci_bus_id,
                model_name=gpu.model,
                gpu_util_percent=reading.utilization_percent,
                mem_copy_util_percent=reading.memory_busy_percent,
                fb_used_mib=used,
                fb_free_mib=free,
                fb_reserved_mib=kept,
                gpu_temp_celsius=reading.temperature_celsius,
                memory_temp_celsius=reading.memory_temperature_celsius,
                power_watts=reading.power_watts,
                energy_millijoules=reading.energy_millijoules,
                sm_clock_mhz=reading.sm_clock_mhz,
                mem_clock_mhz=reading.memory_clock_mhz,
                job=holders.get(gpu.uuid, ""),
            )
