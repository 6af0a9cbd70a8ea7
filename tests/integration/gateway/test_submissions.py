"""Submissions on real servers: durable before they are answered, once in effect, told to the others."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.integration.gateway.rig import JOB, Rig, until


async def _told(rig: Rig, type_: str) -> list[dict[str, Any]]:
    return [event for event in await rig.events() if event["type"] == f"berth.{type_}.v1"]


async def test_an_answered_submission_is_stored_and_told(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        answer = await client.post("/v1/jobs", json=JOB)
        assert answer.status_code == 201
        job_id = answer.json()["job_id"]
        shown = (await client.get(f"/v1/jobs/{job_id}")).json()
        assert (shown["name"], shown["tenant"], shown["state"]) == ("train", "team-a", "submitted")

        async def is_told() -> bool:
            return len(await _told(rig, "job.submitted")) == 1

        await until(is_told)
        [event] = await _told(rig, "job.submitted")
        assert event["id"] == f"{job_id}.1.JobSubmitted"
        assert (event["tenant"], event["actor"], event["data"]["spec"]["class"]) == (
            "team-a",
            "user:member-a",
            "training",
        )


async def test_copies_at_once_at_two_gateways_are_one_job(rig: Rig) -> None:
    async with rig.gateway() as one, rig.gateway() as two, one.client() as a, two.client() as b:
        headers = {"Idempotency-Key": "k1"}
        posts = [client.post("/v1/jobs", json=JOB, headers=headers) for client in (a, b) * 10]
        answers = await asyncio.gather(*posts)
        assert sorted({answer.status_code for answer in answers}) == [200, 201]
        assert len({answer.json()["job_id"] for answer in answers}) == 1
        assert sum(answer.status_code == 201 for answer in answers) == 1
        assert len((await a.get("/v1/jobs")).json()["jobs"]) == 1
        changed = await a.post("/v1/jobs", json=JOB | {"gpus": 4}, headers=headers)
        assert (changed.status_code, changed.json()["code"]) == (409, "idempotency_conflict")


async def test_a_batch_is_taken_whole_and_once(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        batch = {"jobs": [JOB | {"name": f"j{n}"} for n in range(300)]}
        headers = {"Idempotency-Key": "batch"}
        first = (await client.post("/v1/jobs", json=batch, headers=headers)).json()["jobs"]
        again = (await client.post("/v1/jobs", json=batch, headers=headers)).json()["jobs"]
        assert [job["name"] for job in first] == [f"j{n}" for n in range(300)]
        assert [job["job_id"] for job in first] == sorted(job["job_id"] for job in first)
        assert [job["job_id"] for job in again] == [job["job_id"] for job in first]
        assert {job["is_repeat"] for job in again} == {True}

        async def all_told() -> bool:
            return len(await _told(rig, "job.submitted")) == 300

        await until(all_told)


async def test_a_batch_with_one_fault_leaves_no_trace(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        answer = await client.post("/v1/jobs", json={"jobs": [JOB, JOB | {"gpus": -1}]})
        assert (answer.status_code, answer.json()["field"]) == (422, "jobs[1].gpus")
        assert (await client.get("/v1/jobs")).json()["jobs"] == []
        assert await rig.events() == []


async def test_what_a_dead_gateway_committed_is_published_by_another(rig: Rig) -> None:
    async with rig.gateway(publishes=False) as gateway, gateway.client() as client:
        job_id = (await client.post("/v1/jobs", json=JOB)).json()["job_id"]
    assert await rig.events() == []
    async with rig.gateway():

        async def is_told() -> bool:
            return [event["subject"] for event in await _told(rig, "job.submitted")] == [job_id]

        await until(is_told)


async def test_an_expired_key_is_free_again(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        headers = {"Idempotency-Key": "k1"}
        first = (await client.post("/v1/jobs", json=JOB, headers=headers)).json()["job_id"]
        async with gateway.database.reader() as connection:
            await connection.execute("UPDATE gateway.idempotency SET expires_at = now() - interval '1 second'")
        second = await client.post("/v1/jobs", json=JOB | {"gpus": 4}, headers=headers)
        assert second.status_code == 201
        assert second.json()["job_id"] != first


async def test_many_requests_share_transactions(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/jobs", json=JOB) for _ in range(100)))
        assert {answer.status_code for answer in answers} == {201}
        assert gateway.intake.groups < 50


async def test_secret_values_are_kept_apart_and_go_with_the_job(rig: Rig) -> None:
    secret = "s3cr3t-Zq9%2F"
    job = JOB | {"env": {"API_KEY": secret, "MODE": "fast"}, "secret_env": ["API_KEY"]}
    async with rig.gateway(projects=True) as gateway, gateway.client() as client:
        job_id = (await client.post("/v1/jobs", json=job)).json()["job_id"]
        shown = (await client.get(f"/v1/jobs/{job_id}")).json()
        assert shown["spec"]["env"] == {"MODE": "fast"}
        assert secret not in str(shown)
        assert await gateway.deps.reads.secrets(job_id, ["API_KEY"]) == {"API_KEY": secret}

        async def is_told() -> bool:
            return bool(await _told(rig, "job.submitted"))

        await until(is_told)
        assert secret not in str(await rig.events())
        from datetime import UTC, datetime

        from berth.contracts.events import JobSucceeded

        await rig.say("lifecycle", JobSucceeded(job_id=job_id, attempt=1, ended_at=datetime.now(UTC)), job_id)

        async def is_gone() -> bool:
            return await gateway.deps.reads.secrets(job_id, ["API_KEY"]) == {}

        await until(is_gone)


async def test_a_cancel_request_is_told_once(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        job_id = (await client.post("/v1/jobs", json=JOB)).json()["job_id"]
        answers = await asyncio.gather(*(client.post(f"/v1/jobs/{job_id}/cancel") for _ in range(5)))
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 200, 202]
        assert all(answer.json()["cancel_requested"] for answer in answers)

        async def is_told() -> bool:
            return bool(await _told(rig, "job.cancel_requested"))

        await until(is_told)
        [event] = await _told(rig, "job.cancel_requested")
        assert event["data"]["requested_by"] == "member-a"
        assert [e["type"] for e in await rig.events()] == ["berth.job.submitted.v1", "berth.job.cancel_requested.v1"]
