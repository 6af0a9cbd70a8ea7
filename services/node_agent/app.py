"""Puts the node agent together: the only place that builds things."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

from berth.bus.connection import BusSettings, Connection, CoreMessage
from berth.bus.errors import TransientError
from berth.bus.multi_puller import MultiPuller
from berth.bus.permissions import api_prefix, inbox_prefix
from berth.bus.provision import node_consumer
from berth.bus.publisher import Publisher
from berth.contracts import subjects
from berth.contracts.commands import LaunchWorkers
from berth.contracts.requests import SecretsAnswer, SecretsQuestion
from berth.runtime.process import ServiceContext, ServiceExit, run_service
from berth.telemetry.logs import get_logger
from services.node_agent.commands import CommandLoop, exit_loop
from services.node_agent.deps import Deps, PlatformClock
from services.node_agent.driver.base import GpuDriver, GpuDriverError
from services.node_agent.driver.sim import SimDriver
from services.node_agent.handlers.adopt import adopt_workers
from services.node_agent.handlers.requests import answer_logs, answer_simulate
from services.node_agent.handlers.stop import stop_worker
from services.node_agent.journal import Journal
from services.node_agent.metrics import AgentMetrics, show_cards
from services.node_agent.node import Node
from services.node_agent.peers import Peers, fleet_key
from services.node_agent.process.runtime import WorkerRuntime
from services.node_agent.process.simulated import SimulatedWorkers
from services.node_agent.process.supervisors import Supervisors
from services.node_agent.reports import Reporter
from services.node_agent.sampling import DriverGone, Sampler
from services.node_agent.sessions import Sessions
from services.node_agent.settings import NodeSpec, Settings
from services.node_agent.workers import AGENT_ENDS

SERVICE: Final = "node_agent"
BUS_USER: Final = "fleet"
EXIT_DRIVER_GONE: Final = 75
"""The supervisor of the agent starts it again; jobs go on meanwhile."""
LOCK_WAIT_SECONDS: Final = 15.0
SECRETS_TRIES: Final = 5
HOUSEKEEPING_SECONDS: Final = 60.0
END_WORK_SECONDS: Final = 9.0

AnswerTo = Callable[[CoreMessage, Node, Deps], Awaitable[bytes]]
Work = Coroutine[object, object, None]

log = get_logger(SERVICE)


def run() -> NoReturn:
    """Run the agent as this process."""
    run_service(SERVICE, Settings, main, checks=("nodes",))


async def main(context: ServiceContext[Settings]) -> None:
    """Host the nodes until told to stop. SIGTERM leaves their programs running; SIGINT ends them first."""
    settings = context.settings
    root = (settings.home / "nodes").absolute()
    root.mkdir(parents=True, exist_ok=True)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(_only_agent(root))
        journal = Journal(root / "journal")
        stack.push_async_callback(journal.close)
        runtime = _runtime(settings, root)
        stack.push_async_callback(runtime.close)
        nodes = {spec.name: _node(spec, settings, journal) for spec in settings.node_specs()}
        for node in nodes.values():
            await _open(node)
            stack.callback(node.driver.close)
        bus = await stack.enter_async_context(Connection(_bus_settings(settings)))
        context.health.probe("bus", lambda: None if bus.is_connected else "not connected to the bus")
        reporter = Reporter(Publisher(bus), journal, pool=settings.pool)
        fetch_secrets = partial(_fetch_secrets, bus, settings.pool)
        checkpoints = str(settings.checkpoints_directory)
        deps = Deps(
            settings, journal, runtime, reporter, PlatformClock(), fetch_secrets, nodes, checkpoints=checkpoints
        )
        await _host(context, deps, bus, stack)


async def _host(
    context: ServiceContext[Settings], deps: Deps, bus: Connection, stack: contextlib.AsyncExitStack
) -> None:
    """Take over what runs, then listen, register and work."""
    pool = context.settings.pool
    for node in deps.nodes.values():
        await adopt_workers(node, deps)
    deps.reporter.tell_kept()
    deps.journal.flush()
    deps.metrics = AgentMetrics(context.registry)
    deps.metrics.watch(deps)
    samplers = {name: Sampler(node, deps) for name, node in deps.nodes.items()}
    show_cards(context.registry, deps.nodes, samplers)
    sessions = Sessions(bus, deps, samplers, pool=pool)
    await sessions.open()
    await _meet_peers(context.settings, sessions, deps, stack)
    for name, node in deps.nodes.items():
        await bus.serve(subjects.node_request(pool, name, "logs"), partial(_ask, answer_logs, node, deps))
        if isinstance(node.driver, SimDriver):
            await bus.serve(subjects.node_request(pool, name, "simulate"), partial(_ask, answer_simulate, node, deps))
    consumers = [node_consumer(pool, name) for name in deps.nodes]
    puller = await stack.enter_async_context(MultiPuller(bus, subjects.COMMANDS_STREAM, consumers))
    context.health.probe("nodes", lambda: _registered(sessions, len(deps.nodes)))
    context.critical("reports", deps.reporter.run())
    context.critical("exits", exit_loop(deps))
    context.critical("sessions", sessions.run())
    context.critical("commands", CommandLoop(puller, deps).run())
    context.critical("housekeeping", _keep_house(deps))
    for name, sampler in samplers.items():
        if not isinstance(deps.nodes[name].driver, SimDriver):
            context.critical(f"sampling {name}", _or_leave(sampler.run()))
            context.critical(f"events {name}", _or_leave(sampler.watch_events()))
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ending.set)
    context.started()
    await ending.wait()
    await end_work(deps)


async def _meet_peers(settings: Settings, sessions: Sessions, deps: Deps, stack: contextlib.AsyncExitStack) -> None:
    """Answer other agents, and ask them, where they are named."""
    peers = Peers(
        pool=settings.pool,
        nodes=deps.nodes,
        hears=sessions.hears,
        addresses=settings.node_peers,
        key=fleet_key(settings.nats_credentials_file),
    )
    sessions.consult(peers)
    if settings.node_peer_address:
        host, _, port = settings.node_peer_address.rpartition(":")
        server = await peers.serve(host, int(port))
        stack.callback(server.close)


def _registered(sessions: Sessions, total: int) -> str | None:
    return f"{sessions.missing} of {total} nodes not registered" if sessions.missing else None


async def _ask(answer: AnswerTo, node: Node, deps: Deps, request: CoreMessage) -> bytes:
    return await answer(request, node, deps)


async def end_work(deps: Deps) -> None:
    """Stop all workers of all nodes and see the reports off; for a platform that is shut down as a whole."""
    grace = deps.settings.shutdown_grace_seconds
    live = [(node, worker) for node in deps.nodes.values() for worker in node.live() if worker.is_live]
    log.info("ending all work", workers=len(live), grace_seconds=grace)
    for node, worker in live:
        stop_worker(node, worker, deps, grace_seconds=grace, reason=AGENT_ENDS)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_WORK_SECONDS):
            while any(worker.is_live for node in deps.nodes.values() for worker in node.live()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await deps.reporter.emptied()


# -- parts


@contextlib.asynccontextmanager
async def _only_agent(root: Path) -> AsyncIterator[None]:
    """Hold the state directory; an agent that is on its way out is waited for."""
    handle = os.open(root / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        async with asyncio.timeout(LOCK_WAIT_SECONDS):
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(0.1)
        yield
    except TimeoutError:
        raise ServiceExit(1, f"another agent works in {root}") from None
    finally:
        os.close(handle)


def _bus_settings(settings: Settings) -> BusSettings:
    """Not by `berth.runtime.wiring`: that needs a database client, which no node has."""
    return BusSettings(
        servers=tuple(url.strip() for url in settings.nats_url.split(",")),
        name="berth-node-agent",
        nkey_seed_file=settings.nats_credentials_file,
        inbox_prefix=inbox_prefix(BUS_USER),
        api_prefix=api_prefix(BUS_USER),
    )


def _runtime(settings: Settings, root: Path) -> WorkerRuntime:
    if settings.node_runtime == "simulated":
        return SimulatedWorkers()
    return Supervisors(
        root, log_piece_bytes=settings.log_piece_mib << 20, lease_grace_seconds=settings.lease_grace_seconds
    )


def _node(spec: NodeSpec, settings: Settings, journal: Journal) -> Node:
    return Node(
        spec.name,
        _driver(spec),
        journal,
        domain=settings.node_domains.get(spec.name, {}),
        is_shareable=settings.node_shareable,
        runtime=settings.node_runtime,
    )


def _driver(spec: NodeSpec) -> GpuDriver:
    if spec.cards is not None:
        return SimDriver(spec.name, spec.cards)
    from services.node_agent.driver.nvml import NvmlDriver

    return NvmlDriver()


async def _open(node: Node) -> None:
    try:
        await asyncio.to_thread(node.driver.open)
        await asyncio.to_thread(node.open)
    except GpuDriverError as error:
        raise ServiceExit(EXIT_DRIVER_GONE, f"cards of node {node.name}: {error}") from error


async def _fetch_secrets(bus: Connection, pool: str, order: LaunchWorkers) -> Mapping[str, str]:
    """Values of a job's secret variables. Raises KeyError when one is missing, BusError when nobody answers."""
    question = SecretsQuestion(job_id=order.job_id, node=order.node, names=order.secret_env)
    subject = subjects.request(pool, "gateway", "secrets")
    for attempt in range(SECRETS_TRIES):
        try:
            reply = await bus.request(subject, question.model_dump_json().encode(), timeout=2)
            break
        except TransientError:
            if attempt + 1 == SECRETS_TRIES:
                raise
            await asyncio.sleep(0.2 * 2**attempt)
    answer = SecretsAnswer.model_validate_json(reply.data)
    missing = [name for name in order.secret_env if name not in answer.values]
    if missing or not answer.is_known:
        raise KeyError(", ".join(missing) or order.job_id)
    return answer.values


async def _keep_house(deps: Deps) -> None:
    """Forget what nobody can ask for any more: old commands, old files."""
    settings = deps.settings
    while True:
        await asyncio.sleep(HOUSEKEEPING_SECONDS)
        now = deps.clock.now().timestamp()
        for node in deps.nodes.values():
            node.forget_old(now)
            if isinstance(deps.runtime, Supervisors):
                await deps.runtime.sweep(
                    node.name, keep_seconds=settings.log_keep_hours * 3600, keep_count=settings.log_keep_count
                )
        deps.journal.flush()


async def _or_leave(work: Work) -> None:
    try:
        await work
    except DriverGone as gone:
        raise ServiceExit(EXIT_DRIVER_GONE, f"driver was exchanged: {gone}") from gone
