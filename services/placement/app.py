"""Builds placement: the only place here that makes things."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import orjson

from berth.bus.errors import RequestFailed
from berth.contracts.requests import (
    ExplainJob,
    JobExplained,
    LedgerAnswer,
    LedgerQuestion,
    PolicyEffects,
    PolicyEffectsQuestion,
    QuotaAnswer,
    QuotaQuestion,
)
from berth.decisions.placement.core import PlacementCore
from berth.decisions.placement.trial import policy_effects
from berth.decisions.policy.check import read
from berth.runtime.core_handler import CoreHandler
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, answering, event_service, wired
from services.placement.settings import Settings

SERVICE = "placement"


def run() -> None:
    """Run placement in this process."""
    run_service(SERVICE, Settings, main, checks=CHECKS)


async def main(context: ServiceContext[Settings]) -> None:
    """Until cancelled."""
    pool = context.settings.pool
    async with wired(context, service=SERVICE) as parts:
        service = event_service(
            context,
            parts,
            service=SERVICE,
            make_handler=lambda: CoreHandler(PlacementCore(), pool=pool, heavy=True, recorded=True),
            recorded=True,
        )

        async def explain(question: ExplainJob) -> JobExplained:
            return await service.query(lambda h: h.core.explain(question.job_id, now=datetime.now(UTC)))

        async def quota(question: QuotaQuestion) -> QuotaAnswer:
            return await service.query(lambda h: h.core.quota(question.tenant, now=datetime.now(UTC)))

        async def ledger(question: LedgerQuestion) -> LedgerAnswer:
            return await service.query(lambda h: h.core.ledger(question.node))

        async def effects(question: PolicyEffectsQuestion) -> PolicyEffects:
            _, problems = read(question.document)
            if problems:
                raise RequestFailed("bad_request", f"{problems[0].path}: {problems[0].fault}")
            records = [(kind, key, orjson.loads(body)) async for kind, key, body in parts.database.records()]
            return await asyncio.to_thread(policy_effects, records, question.document, datetime.now(UTC))

        service.serve("explain", answering(ExplainJob, explain))
        service.serve("quota", answering(QuotaQuestion, quota))
        service.serve("ledger", answering(LedgerQuestion, ledger))
        service.serve("policy_effects", answering(PolicyEffectsQuestion, effects))
        context.started()
        await service.run()
