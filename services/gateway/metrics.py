"""What the gateway measures. Labels are bounded: routes, status codes, classes, tenants of the policy."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry

from berth.telemetry.metrics import BoundedLabel, counter, gauge, histogram


class GatewayMetrics:
    """One object for each process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests: Final = counter(registry, "berth_api_requests", "Requests answered", ["route", "status"])
        self.seconds: Final = histogram(registry, "berth_api_seconds", "From request to answer", ["route"])
        self.submitted: Final = counter(registry, "berth_jobs_submitted", "Jobs taken in", ["tenant", "job_class"])
        self.refused: Final = counter(registry, "berth_submissions_refused", "Submissions refused", ["code"])
        self.streams: Final = gauge(registry, "berth_api_streams", "Open event and log streams")
        self._tenants = BoundedLabel(64)

    def job(self, tenant: str, job_class: str) -> None:
        """Count one job."""
        self.submitted.labels(self._tenants(tenant), job_class).inc()
