import math

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from berth.telemetry.metrics import (
    OTHER,
    BoundedLabel,
    GpuMetrics,
    GpuReading,
    PipelineMetrics,
    exemplar,
    new_registry,
)
from berth.telemetry.traceparent import new_traceparent


def scraped(registry: CollectorRegistry) -> dict[str, Metric]:
    """The families that a strict OpenMetrics parser reads from a scrape."""
    text = generate_latest(registry).decode()  # type: ignore[no-untyped-call]
    return {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]


def test_pipeline_metrics_are_valid_openmetrics_with_exemplars() -> None:
    registry = new_registry()
    metrics = PipelineMetrics(registry)
    traced = new_traceparent(sampled=True)

    metrics.commit_seconds.observe(0.003, exemplar=exemplar(traced))
    metrics.commit_seconds.observe(0.2, exemplar=exemplar(new_traceparent()))
    metrics.duplicate_batches.inc()
    metrics.consumer_pending.labels("placement-events").set(7)

    exemplars = [sample.exemplar for sample in scraped(registry)["berth_commit_seconds"].samples if sample.exemplar]
    assert [found.labels["trace_id"] for found in exemplars] == [traced[3:35]]
    assert registry.get_sample_value("berth_publish_batch_rejected_total", {"code": "10201"}) == 1
    assert registry.get_sample_value("berth_consumer_pending", {"consumer": "placement-events"}) == 7


def test_label_values_from_outside_are_bounded() -> None:
    label = BoundedLabel(2, known=["H100-80G"])

    assert [label("H100-80G"), label("A100-40G"), label("junk-1"), label("junk-2"), label("A100-40G")] == [
        "H100-80G",
        "A100-40G",
        OTHER,
        OTHER,
        "A100-40G",
    ]


def test_cards_appear_under_dcgm_names_and_unknown_values_are_not_dropped() -> None:
    registry = new_registry()
    readings = [GpuReading(0, "GPU-1", "n1", model_name="H100", gpu_util_percent=93.0)]
    GpuMetrics(registry, lambda: readings)
    labels = {
        "gpu": "0",
        "UUID": "GPU-1",
        "pci_bus_id": "",
        "device": "nvidia0",
        "modelName": "H100",
        "hostname": "n1",
        "hpc_job": "",
    }

    assert registry.get_sample_value("DCGM_FI_DEV_GPU_UTIL", labels) == 93
    temperature = registry.get_sample_value("DCGM_FI_DEV_GPU_TEMP", labels)
    assert temperature is not None
    assert math.isnan(temperature)
    assert "DCGM_FI_DEV_GPU_UTIL" in scraped(registry)

    readings.clear()
    assert registry.get_sample_value("DCGM_FI_DEV_GPU_UTIL", labels) is None
