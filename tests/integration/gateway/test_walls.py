"""Tenants see and touch their own; every denial is on record; secrets are nowhere. (Scenario a36.)"""

from __future__ import annotations

from typing import Any

from berth.contracts.jobs import JobState
from berth.contracts.reasons import Code, because
from berth.contracts.requests import JobExplained
from tests.integration.gateway.rig import JOB, Rig, until


async def test_a_neighbour_sees_why_it_waits_but_not_whose_job_it_is(rig: Rig) -> None:
    secret = "s3cr3t-Zq9%2F"
    placement = await rig.nats.connect("placement")
    async with (
        rig.gateway(projects=True) as gateway,
        gateway.client() as member_a,
        gateway.client("viewer") as viewer_a,
        gateway.client("other") as member_b,
        gateway.client("operator") as operator,
    ):
        falcon = JOB | {"name": "falcon-x", "env": {"API_KEY": secret, "MODE": "fast"}, "secret_env": ["API_KEY"]}
        theirs = (await member_b.post("/v1/jobs", json=falcon)).json()["job_id"]
        mine = (await member_a.post("/v1/jobs", json=JOB | {"name": "mine"})).json()["job_id"]
        reason = because(
            Code.NO_FREE_GPUS,
            blocked_by=(theirs,),
            remedy=f"wait for {theirs} of team-b",
            needed=8,
            free=0,
            tenant="team-b",
        )
        explained = JobExplained(job_id=mine, is_known=True, state="waiting", reasons=(reason,), place=1, waiting=1)

        async def explain(_: Any) -> bytes:
            return explained.model_dump_json().encode()

        await placement.serve("berth.req.default.placement.explain", explain)
        from berth.contracts.events import JobWaiting

        await rig.say("placement", JobWaiting(job_id=mine, reasons=(reason,)), mine)

        async def waits() -> bool:
            return bool((await member_a.get(f"/v1/jobs/{mine}")).json()["state"] == JobState.WAITING)

        await until(waits)
        for path in (f"/v1/jobs/{theirs}", "/v1/jobs/falcon-x", f"/v1/jobs/{theirs}/logs", f"/v1/jobs/{theirs}/why"):
            answer = await member_a.get(path)
            assert answer.status_code == 404
            assert secret not in answer.text
        assert (await member_a.post(f"/v1/jobs/{theirs}/cancel")).status_code == 404
        assert (await member_a.get("/v1/jobs", params={"tenant": "team-b"})).status_code == 403
        assert (await viewer_a.post(f"/v1/jobs/{mine}/cancel")).status_code == 403
        quota = {"document": {"tenants": {"team-a": {"quota": {"A100-80G": 80}}}}}
        assert (await member_a.put("/v1/policy", json=quota)).status_code == 403

        why = await member_a.get(f"/v1/jobs/{mine}/why")
        assert why.json()["reasons"][0]["facts"] == {"needed": 8, "free": 0}
        for seen in (why.text, (await member_a.get(f"/v1/jobs/{mine}")).text, (await member_a.get("/v1/jobs")).text):
            assert not any(hidden in seen for hidden in ("falcon-x", "member-b", "team-b", theirs))
        assert "held by falcon-x" in (await operator.get(f"/v1/jobs/{mine}/why")).text

        for client in (operator, member_b):
            answer = await client.get(f"/v1/jobs/{theirs}")
            assert answer.status_code == 200
            assert secret not in answer.text
        assert (await member_b.get(f"/v1/jobs/{theirs}")).json()["cancel_requested"] is False

        async def are_told() -> bool:
            denied = [e["actor"] for e in await rig.events() if e["type"] == "berth.access.denied.v1"]
            return denied.count("user:member-a") >= 4 and denied.count("user:viewer-a") == 1

        await until(are_told)
        assert secret not in str(await rig.events())


async def test_a_revoked_token_is_refused_and_a_new_one_works(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client("operator") as operator:
        made = await operator.post("/v1/tokens", json={"user": "李雷", "tenant": "team-a", "role": "member"})
        assert made.status_code == 201
        token = made.json()["token"]
        async with gateway.client(token) as client:
            assert (await client.get("/v1/whoami")).json() == {"user": "李雷", "tenant": "team-a", "role": "member"}
            assert (await operator.delete(f"/v1/tokens/{made.json()['token_id']}")).status_code == 204
            assert (await client.get("/v1/whoami")).status_code == 401
        listed = (await operator.get("/v1/tokens")).json()["tokens"]
        assert token not in str(listed)
        assert [t["is_revoked"] for t in listed if t["user"] == "李雷"] == [True]
