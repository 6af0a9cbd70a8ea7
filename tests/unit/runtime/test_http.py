import asyncio
import json
import os
from pathlib import Path

import httpx
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from berth.runtime.health import Health
from berth.runtime.http import HealthServer, remove_run_file, write_run_file
from berth.telemetry.metrics import exemplar, histogram, new_registry
from berth.telemetry.traceparent import new_traceparent


async def test_liveness_and_readiness_say_why() -> None:
    health = Health("placement", checks=("nats", "postgres"))
    health.probe("leader", lambda: "standby")
    async with HealthServer(health, new_registry()) as server, client_of(server) as client:
        assert (await client.get("/healthz")).json()["service"] == "placement"

        waiting = await client.get("/readyz")
        health.set("nats", None)
        health.set("postgres", None)
        health.probe("leader", lambda: None)
        ready = await client.get("/readyz")
        health.stopping()
        stopping = await client.get("/readyz")

    assert waiting.status_code == 503
    assert waiting.json()["checks"] == {
        "leader": {"ok": False, "reason": "standby"},
        "nats": {"ok": False, "reason": "starting"},
        "postgres": {"ok": False, "reason": "starting"},
    }
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert stopping.status_code == 503


async def test_a_broken_probe_is_a_failing_check() -> None:
    health = Health("placement")
    health.probe("bus", lambda: str(1 // 0))

    assert not health.is_ready()
    assert "ZeroDivisionError" in str(health.reasons()["bus"])


async def test_metrics_are_openmetrics_with_exemplars_or_plain_text_if_asked() -> None:
    registry = new_registry()
    seconds = histogram(registry, "berth_commit_seconds", "one commit")
    seconds.observe(0.1, exemplar=exemplar(new_traceparent(sampled=True)))
    async with HealthServer(Health("x"), registry) as server, client_of(server) as client:
        modern = await client.get("/metrics")
        plain = await client.get("/metrics", headers={"accept": "text/plain"})

    assert modern.headers["content-type"].startswith("application/openmetrics-text")
    families = list(text_string_to_metric_families(modern.text))  # type: ignore[no-untyped-call]
    assert any(sample.exemplar for family in families for sample in family.samples)
    assert plain.headers["content-type"].startswith("text/plain")
    assert "trace_id" not in plain.text


async def test_other_paths_methods_and_protocols_are_refused() -> None:
    async with HealthServer(Health("x"), new_registry()) as server, client_of(server) as client:
        assert (await client.get("/secrets")).status_code == 404
        assert (await client.post("/healthz")).status_code == 405
        head = await client.head("/healthz")
        assert (head.status_code, head.content) == (200, b"")
        assert (await raw(server, b"rubbish\r\n\r\n")).startswith(b"HTTP/1.1 400")
        assert await raw(server, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n") == b""
        assert (await client.get("/healthz")).status_code == 200


async def test_the_port_is_reported_in_a_file_and_taken_back(tmp_path: Path) -> None:
    run_file = tmp_path / "run" / "placement.json"
    async with HealthServer(Health("x"), new_registry(), run_file=run_file) as server:
        report = json.loads(run_file.read_text())
        assert (report["pid"], report["port"]) == (os.getpid(), server.port)
        assert report["started_at"].endswith("Z")

    assert list(run_file.parent.iterdir()) == []


def test_a_successors_report_is_left_alone(tmp_path: Path) -> None:
    run_file = tmp_path / "placement.json"
    write_run_file(run_file, port=1)
    run_file.write_text(json.dumps({"pid": os.getpid() + 1, "port": 2}))

    remove_run_file(run_file)

    assert run_file.exists()


def client_of(server: HealthServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False)


async def raw(server: HealthServer, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
