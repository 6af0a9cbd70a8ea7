"""Builds admission: the only place here that makes things."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import yaml

from berth.contracts.envelope import Envelope
from berth.contracts.events import PolicyProposed
from berth.contracts.requests import PolicyCheckAnswer, PolicyCheckQuestion
from berth.decisions.admission import AdmissionCore
from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, answering, event_service, wired
from berth.telemetry.logs import get_logger
from services.admission.settings import Settings

log = get_logger("admission")
SERVICE = "admission"
FIRST_POLICY = "first-policy"


def run() -> None:
    """Run admission in this process."""
    run_service(SERVICE, Settings, main, checks=CHECKS)


async def main(context: ServiceContext[Settings]) -> None:
    """Until cancelled."""
    pool = context.settings.pool
    shortest = context.settings.shortest_lost_after_seconds
    async with wired(context, service=SERVICE) as parts:
        service = event_service(
            context,
            parts,
            service=SERVICE,
            make_handler=lambda: CoreHandler(AdmissionCore(shortest_lost_after=shortest), pool=pool, recorded=True),
            recorded=True,
        )

        async def check(question: PolicyCheckQuestion) -> PolicyCheckAnswer:
            return await service.query(lambda h: h.core.check_policy(question.document, now=datetime.now(UTC)))

        service.serve("check_policy", answering(PolicyCheckQuestion, check))
        if context.settings.policy_file is not None:
            context.background("first policy", _propose_first(service, context.settings.policy_file, pool))
        context.started()
        await service.run()


async def _propose_first(service: EventService[CoreHandler[AdmissionCore]], path: Path, pool: str) -> None:
    """Hand in the platform's first policy; later ones come through the gateway and this file is not looked at again."""
    document = yaml.safe_load(await asyncio.to_thread(path.read_text))

    def propose(handler: CoreHandler[AdmissionCore], now: datetime) -> None:
        if handler.core.policy_version == 0:
            for problem in handler.core.check_policy(document, now=now).problems:
                log.error(
                    "first policy is refused, jobs are held",
                    file=path.name,
                    where=problem["path"],
                    fault=problem["fault"],
                    remedy=problem["remedy"],
                )
            proposed = PolicyProposed(
                proposal_id=FIRST_POLICY, document=document, author="platform", why=f"first policy, from {path.name}"
            )
            handler.take_in(_envelope(proposed, pool, now), now=now)

    await service.change(propose)


def _envelope(proposed: PolicyProposed, pool: str, now: datetime) -> Envelope[PolicyProposed]:
    return Envelope[PolicyProposed](
        id=f"{proposed.proposal_id}.0.PolicyProposed",
        type=PolicyProposed.TYPE,
        source=f"/berth/{pool}/{SERVICE}",
        subject=proposed.proposal_id,
        time=now,
        actor="platform",
        data=proposed,
    )
