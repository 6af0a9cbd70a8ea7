"""Events of the other services become what users see."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import httpx

from berth.contracts import events as ev
from berth.contracts.jobs import JobSpec
from berth.contracts.reasons import Code, because
from tests.integration.gateway.rig import JOB, Gateway, Rig, until

NOW = datetime.now(UTC)


async def _until_state(client: httpx.AsyncClient, job_id: str, state: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_there() -> bool:
        found.update((await client.get(f"/v1/jobs/{job_id}")).json())
        return found.get("state") == state

    await until(is_there)
    return found


async def _submit(client: httpx.AsyncClient, **changes: Any) -> str:
    answer = await client.post("/v1/jobs", json=JOB | changes)
    assert answer.status_code == 201, answer.text
    job_id: str = answer.json()["job_id"]
    return job_id


async def test_a_job_is_followed_from_waiting_over_a_retry_to_its_end(rig: Rig) -> None:
    async with rig.gateway(projects=True) as gateway, gateway.client() as client:
        job = await _submit(client)
        reason = because(Code.NO_FREE_GPUS, needed=2, free=1)
        await rig.say("placement", ev.JobWaiting(job_id=job, reasons=(reason,)), job)
        shown = await _until_state(client, job, "waiting")
        assert shown["reasons"] == [{"code": "no_free_gpus", "facts": {"needed": 2, "free": 1}}]
        assert shown["summary"] == "waits because not enough GPUs are free (needs 2, free 1)"

        await rig.run_job(job)
        shown = await _until_state(client, job, "running")
        assert (shown["nodes"], shown["attempt"], shown["reasons"]) == (["n1"], 1, [])

        failed = because(Code.PROGRAM_FAILED, exit_code=3)
        ended = ev.AttemptEnded(
            job_id=job, attempt=1, fence=1, outcome=ev.AttemptOutcome.FAILED, cause=failed, exit_code=3, ended_at=NOW
        )
        await rig.say("lifecycle", ended, job)
        requeued = ev.JobRequeued(job_id=job, after_attempt=1, not_before=NOW, cause=failed, charged=1)
        await rig.say("lifecycle", requeued, job)
        shown = await _until_state(client, job, "waiting")
        assert (shown["restarts_charged"], shown["attempts"][0]["exit_code"]) == (1, 3)

        await rig.run_job(job, attempt=2, node="n2")
        await _until_state(client, job, "running")
        await rig.say("lifecycle", ev.JobSucceeded(job_id=job, attempt=2, ended_at=NOW), job)
        shown = await _until_state(client, job, "succeeded")
        assert ([a["attempt"] for a in shown["attempts"]], shown["nodes"]) == ([1, 2], ["n2"])
        late = ev.JobRunning(job_id=job, attempt=2, started_at=NOW)
        await rig.say("lifecycle", late, job)
        other = await _submit(client, name="marker")
        await rig.run_job(other)
        await _until_state(client, other, "running")
        assert (await client.get(f"/v1/jobs/{job}")).json()["state"] == "succeeded"


async def test_the_view_goes_on_where_a_dead_projection_stopped(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        async with rig.gateway(projects=True):
            first = await _submit(client, name="first")
            await rig.run_job(first)
            await _until_state(client, first, "running")
        second = await _submit(client, name="second")
        await rig.run_job(second)
        await rig.say("lifecycle", ev.JobSucceeded(job_id=first, attempt=1, ended_at=NOW), first)
        async with rig.gateway(projects=True):
            await _until_state(client, second, "running")
            await _until_state(client, first, "succeeded")


async def test_two_processes_project_one_at_a_time(rig: Rig) -> None:
    async with rig.gateway(projects=True) as gateway, rig.gateway(projects=True), gateway.client() as client:
        jobs = [await _submit(client, name=f"j{n}") for n in range(5)]
        for job in jobs:
            await rig.run_job(job)
        for job in jobs:
            await _until_state(client, job, "running")


async def test_a_job_whose_row_was_lost_is_made_again_from_its_event(rig: Rig) -> None:
    async with rig.gateway(projects=True) as gateway, gateway.client("operator") as client:
        spec = JobSpec.model_validate(JOB | {"tenant": "team-a"})
        submitted = ev.JobSubmitted(job_id="lost-1", spec=spec, submitted_at=NOW, submitted_by="u1")
        await rig.say("gateway", submitted, "lost-1")
        await rig.run_job("lost-1")

        async def is_there() -> bool:
            return bool((await client.get("/v1/jobs/lost-1")).json().get("state") == "running")

        await until(is_there)


async def _policy(rig: Rig, gateway: Gateway, document: dict[str, Any], *, version: int) -> None:
    activated = ev.PolicyActivated(policy_version=version, document=document, author="operator-1")
    await rig.say("admission", activated, "pool", tenant="")

    async def is_known() -> bool:
        await gateway.deps.catalogue.refresh()
        return gateway.deps.catalogue.view.version == version

    await until(is_known)


async def test_a_policy_is_known_before_anything_is_refused_by_it(rig: Rig) -> None:
    async with rig.gateway(projects=True) as gateway, gateway.client("operator") as client:
        await _policy(rig, gateway, {"tenants": {"team-a": {}}, "card_types": {"H100-80G": {}}}, version=1)
        for change, field in ({"tenant": "nobody"}, "tenant"), ({"tenant": "team-a", "types": ["X1"]}, "types[0]"):
            answer = await client.post("/v1/jobs", json=JOB | change)
            assert (answer.status_code, answer.json()["field"]) == (422, field)
        document: dict[str, Any] = {"tenants": {"team-a": {}, "nobody": {}}, "card_types": {"H100-80G": {}}}
        activated = ev.PolicyActivated(policy_version=2, document=document, author="operator-1")
        await rig.say("admission", activated, "pool", tenant="")

        async def is_stored() -> bool:
            return await gateway.deps.catalogue._store.policy_version() == 2

        await until(is_stored)
        answer = await client.post("/v1/jobs", json=JOB | {"tenant": "nobody"})
        assert answer.status_code == 201


async def test_a_proposal_waits_for_its_answer(rig: Rig) -> None:
    async with rig.gateway(projects=True) as gateway, gateway.client("operator") as client:

        async def answer_as_admission(problems: tuple[dict[str, str], ...]) -> None:
            proposals: list[dict[str, Any]] = []

            async def is_proposed() -> bool:
                proposals[:] = [e for e in await rig.events() if e["type"] == "berth.policy.proposed.v1"]
                return len(proposals) == (2 if problems else 1)

            await until(is_proposed)
            proposal = proposals[-1]["data"]
            if problems:
                rejected = ev.PolicyRejected(
                    proposal_id=proposal["proposal_id"], problems=problems, author=proposal["author"]
                )
                await rig.say("admission", rejected, proposal["proposal_id"], tenant="")
                return
            activated = ev.PolicyActivated(
                policy_version=1,
                document=proposal["document"],
                author=proposal["author"],
                proposal_id=proposal["proposal_id"],
            )
            await rig.say("admission", activated, "pool", tenant="")

        body = {"document": {"tenants": {"team-a": {}}}, "why": "first"}
        answer, _ = await asyncio.gather(client.put("/v1/policy", json=body), answer_as_admission(()))
        assert (answer.status_code, answer.json()["version"]) == (200, 1)
        shown = (await client.get("/v1/policy")).json()
        assert (shown["document"], shown["author"]) == ({"tenants": {"team-a": {}}}, "operator-1")
        problems = ({"path": "tenants.x", "fault": "is wrong", "remedy": "mend it"},)
        answer, _ = await asyncio.gather(client.put("/v1/policy", json=body), answer_as_admission(problems))
        assert (answer.status_code, answer.json()["code"]) == (422, "policy_rejected")
        assert (answer.json()["field"], answer.json()["remedy"]) == ("tenants.x", "mend it")
