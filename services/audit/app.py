"""Builds audit: the only place here that makes things."""

from __future__ import annotations

from berth.contracts.requests import ChainQuestion, RecordPageQuestion, RecordQuestion, UsageQuestion
from berth.runtime.process import ServiceContext, run_service
from berth.runtime.wiring import CHECKS, answering, event_service, wired
from services.audit.handlers import AuditHandler
from services.audit.settings import Settings
from services.audit.store.queries import events_of, record_page, usage, verify_chain

SERVICE = "audit"


def run() -> None:
    """Run audit in this process."""
    run_service(SERVICE, Settings, main, checks=CHECKS)


async def main(context: ServiceContext[Settings]) -> None:
    """Until cancelled."""
    async with wired(context, service=SERVICE) as parts:
        database = parts.database
        service = event_service(context, parts, service=SERVICE, make_handler=AuditHandler)

        async def events(asked: RecordQuestion) -> object:
            return await events_of(database, entity=asked.entity, after=asked.after, limit=asked.limit)

        async def used(asked: UsageQuestion) -> object:
            return await usage(database, since=asked.since, until=asked.until)

        async def verify(_: ChainQuestion) -> object:
            return await verify_chain(database)

        async def page(asked: RecordPageQuestion) -> object:
            return await record_page(database, after=asked.after)

        service.serve("page", answering(RecordPageQuestion, page))
        service.serve("events", answering(RecordQuestion, events))
        service.serve("usage", answering(UsageQuestion, used))
        service.serve("verify", answering(ChainQuestion, verify))
        context.started()
        await service.run()
