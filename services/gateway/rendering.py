"""From rows to what users see: `JobView`, `WhyView` and the like, as plain JSON values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

from berth.client import texts
from berth.contracts.nodes import GpuHealthState
from berth.contracts.requests import Holding, NodeStatus
from services.gateway.store.queries import StoredJob
from services.gateway.visibility import data_for


def job_view(job: StoredJob, *, whole: bool = False, now: datetime | None = None) -> dict[str, Any]:
    """`JobView`; `whole`: with specification and attempts."""
    progress = job.progress
    waited = progress.waited_seconds
    if progress.waits_since is not None:
        since = datetime.fromisoformat(progress.waits_since)
        waited += max(0.0, ((now or datetime.now(UTC)) - since).total_seconds())
    elif progress.attempt == 0 and not job.is_final:
        waited = max(0.0, ((now or datetime.now(UTC)) - job.submitted_at).total_seconds())
    attempts = progress.attempts
    nodes = progress.nodes or (_nodes_of(attempts[-1]) if attempts and progress.attempt else [])
    view: dict[str, Any] = {
        "job_id": job.job_id,
        "name": job.name,
        "tenant": job.tenant,
        "job_class": job.job_class,
        "priority": job.priority,
        "state": job.state,
        "reasons": progress.reasons,
        "summary": "",
        "submitted_at": job.submitted_at.isoformat(),
        "submitted_by": job.submitted_by,
        "started_at": progress.started_at,
        "ended_at": progress.ended_at,
        "waited_seconds": round(waited, 3),
        "gpus": job.gpus,
        "workers": job.workers,
        "attempt": progress.attempt,
        "restarts_charged": progress.charged,
        "nodes": nodes,
        "cancel_requested": job.cancel_requested,
        "message": progress.message,
        "trace_id": job.trace_id,
    }
    if whole:
        view["spec"] = None if job.spec is None else _spec(job.spec)
        view["attempts"] = attempts
    view["summary"] = texts.summary(view)
    return view


def seen_by(view: dict[str, Any], *, tenant: str, own_jobs: Collection[str]) -> dict[str, Any]:
    """A job's view without the names of others; the summary is made anew."""
    shown: dict[str, Any] = data_for(view, own_jobs=own_jobs, tenant=tenant)
    shown["summary"] = texts.summary(shown)
    return shown


def _spec(body: bytes) -> Any:
    return orjson.loads(body)


def _nodes_of(attempt: Mapping[str, Any]) -> list[str]:
    return sorted({assignment["node"] for assignment in attempt.get("assignments", ())})


def node_view(status: NodeStatus, holdings: Collection[Holding]) -> dict[str, Any]:
    """`NodeView`."""
    gpus = status.description.gpus
    card_types: dict[str, int] = {}
    for gpu in gpus:
        card_types[gpu.card_type] = card_types.get(gpu.card_type, 0) + 1
    is_open = status.state.value == "ready" and not status.cordoned
    healthy = sum(gpu.health is GpuHealthState.HEALTHY for gpu in gpus)
    return {
        "node": status.node,
        "state": status.state.value,
        "cordoned": status.cordoned,
        "hostname": status.description.hostname,
        "address": status.description.address,
        "card_types": card_types,
        "gpus": len(gpus),
        "gpus_usable": healthy if is_open else 0,
        "gpus_held": len({holding.gpu for holding in holdings if holding.node == status.node}),
        "driver_version": status.description.driver_version,
        "epoch": status.epoch,
        "last_heard": None if status.last_heard is None else status.last_heard.isoformat(),
        "link_groups": status.description.link_groups,
        "link_matrix": status.description.link_matrix,
        "domain": status.description.domain,
    }


def gpu_views(status: NodeStatus, held_by: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """`GpuView` of each card of a node. held_by: UUID -> job ids that the reader may see, or `someone else`."""
    readings = {reading.uuid: reading for reading in status.readings}
    views = []
    for gpu in status.description.gpus:
        reading = readings.get(gpu.uuid)
        views.append(
            {
                "uuid": gpu.uuid,
                "node": status.node,
                "index": gpu.index,
                "card_type": gpu.card_type,
                "memory_mib": gpu.memory_mib,
                "health": gpu.health.value,
                "utilization_percent": None if reading is None else reading.utilization_percent,
                "memory_used_mib": None if reading is None else reading.memory_used_mib,
                "power_watts": None if reading is None else reading.power_watts,
                "temperature_celsius": None if reading is None else reading.temperature_celsius,
                "readings_at": None if status.readings_at is None else status.readings_at.isoformat(),
                "held_by": held_by.get(gpu.uuid, []),
            }
        )
    return views
