"""Builds lifecycle: the only place here that makes things."""

from __future__ import annotations

from berth.decisions.lifecycle import LifecycleCore
from berth.runtime.core_handler import CoreHandler
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, event_service, wired
from services.lifecycle.settings import Settings

SERVICE = "lifecycle"


def run() -> None:
    """Run lifecycle in this process."""
    run_service(SERVICE, Settings, main, checks=CHECKS)


async def main(context: ServiceContext[Settings]) -> None:
    """Until cancelled."""
    pool = context.settings.pool
    async with wired(context, service=SERVICE) as parts:
        service = event_service(
            context,
            parts,
            service=SERVICE,
            make_handler=lambda: CoreHandler(LifecycleCore(), pool=pool, recorded=True),
            recorded=True,
        )
        context.started()
        await service.run()
