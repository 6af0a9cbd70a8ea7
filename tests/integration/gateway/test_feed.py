"""The event subscription on the real stream: in order, resumable, and everybody sees their own."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson

from berth.contracts import events as ev
from berth.contracts.reasons import Code, because
from services.gateway.api.feeds import _stream, _Wanted
from tests.integration.gateway.rig import JOB, TOKENS, Gateway, Rig, until


async def _take(gateway: Gateway, token: str, after: int, count: int) -> list[dict[str, Any]]:
    """The first `count` events of a stream."""
    found: list[dict[str, Any]] = []
    gateway.deps.open_streams += 1
    stream = _stream(gateway.deps, _Wanted(TOKENS[token], None, None), after)
    async with asyncio.timeout(10):
        async for chunk in stream:
            for line in chunk.decode().splitlines():
                if line.startswith("data: "):
                    found.append(orjson.loads(line[6:]))
            if len(found) >= count:
                break
    await stream.aclose()
    return found[:count]


async def test_a_stream_goes_on_behind_the_last_event(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        for n in range(5):
            await client.post("/v1/jobs", json=JOB | {"name": f"j{n}"})
        first = await _take(gateway, "member", 0, 3)
        assert [event["sequence"] for event in first] == [1, 2, 3]
        rest = asyncio.create_task(_take(gateway, "member", first[-1]["sequence"], 4))
        await asyncio.sleep(0.2)
        for n in range(5, 7):
            await client.post("/v1/jobs", json=JOB | {"name": f"j{n}"})
        names = [event["data"]["spec"]["name"] for event in await rest]
        assert names == ["j3", "j4", "j5", "j6"]
        assert gateway.deps.feed.followers == 0


async def test_members_get_their_own_events_and_no_names_of_others(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as a, gateway.client("other") as b:
        mine = (await a.post("/v1/jobs", json=JOB | {"name": "mine"})).json()["job_id"]
        theirs = (await b.post("/v1/jobs", json=JOB | {"name": "falcon-x"})).json()["job_id"]
        reason = because(
            Code.NO_FREE_GPUS, blocked_by=(theirs, mine), remedy=f"wait for {theirs}", needed=8, free=0, tenant="team-b"
        )
        await rig.say("placement", ev.JobWaiting(job_id=mine, reasons=(reason,)), mine)

        async def are_all_there() -> bool:
            return len(await rig.events()) == 3

        await until(are_all_there)
        seen = (await a.get("/v1/events", params={"after": 0})).json()
        assert {event["tenant"] for event in seen["events"]} == {"team-a"}
        text = str(seen)
        assert not any(hidden in text for hidden in (theirs, "falcon-x", "team-b", "member-b"))
        [waiting] = [event for event in seen["events"] if event["type"] == "berth.job.waiting.v1"]
        [shown] = waiting["data"]["reasons"]
        assert (shown["facts"], shown["blocked_by"]) == ({"needed": 8, "free": 0}, [mine])
        async with gateway.client("operator") as operator:
            everything = (await operator.get("/v1/events", params={"after": 0})).json()["events"]
            assert len(everything) == 3
            assert theirs in str(everything)


async def test_a_list_is_bounded_and_says_where_to_go_on(rig: Rig) -> None:
    async with rig.gateway() as gateway, gateway.client() as client:
        await client.post("/v1/jobs", json={"jobs": [JOB | {"name": f"j{n}"} for n in range(600)]})

        async def are_all_there() -> bool:
            return len((await client.get("/v1/events", params={"after": 0, "limit": 5000})).json()["events"]) == 600

        await until(are_all_there)
        page = (await client.get("/v1/events", params={"after": 0, "limit": 450})).json()
        assert (len(page["events"]), page["next"]) == (450, 450)
        page = (await client.get("/v1/events", params={"after": page["next"], "limit": 450})).json()
        assert (len(page["events"]), page["next"]) == (150, 600)
