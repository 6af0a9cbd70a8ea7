"""Subjects of the bus, built here and nowhere else. Tokens are checked: a dot or wildcard would move a message."""

from __future__ import annotations

from berth.contracts.base import TOKEN
from berth.contracts.envelope import Fact, Order

EVENTS_STREAM = "BERTH_EVENTS"
COMMANDS_STREAM = "BERTH_COMMANDS"


def _token(value: str, what: str) -> str:
    if not TOKEN.match(value):
        raise ValueError(f"{what} {value!r} is no subject token; letters, digits, _ and - only, 1 to 128 of them")
    return value


def event(pool: str, fact: type[Fact], entity: str) -> str:
    """`berth.evt.<pool>.<kind>.<entity>.<fact>`."""
    return f"berth.evt.{_token(pool, 'pool')}.{fact.KIND}.{_token(entity, fact.KIND)}.{fact.FACT}"


def event_filter(pool: str, fact: type[Fact]) -> str:
    """All events of one type in a pool, whatever their entity."""
    return f"berth.evt.{_token(pool, 'pool')}.{fact.KIND}.*.{fact.FACT}"


def all_events(pool: str) -> str:
    """Every event of a pool."""
    return f"berth.evt.{_token(pool, 'pool')}.>"


def command(pool: str, node: str, order: type[Order]) -> str:
    """`berth.cmd.<pool>.<node>.<verb>`."""
    return f"berth.cmd.{_token(pool, 'pool')}.{_token(node, 'node')}.{order.VERB}"


def node_commands(pool: str, node: str) -> str:
    """All commands to one node."""
    return f"berth.cmd.{_token(pool, 'pool')}.{_token(node, 'node')}.*"


def telemetry(pool: str, node: str) -> str:
    """Telemetry of one node; core NATS, no stream."""
    return f"berth.tel.{_token(pool, 'pool')}.{_token(node, 'node')}"


def telemetry_filter(pool: str) -> str:
    """Telemetry of every node of a pool."""
    return f"berth.tel.{_token(pool, 'pool')}.*"


def request(pool: str, service: str, verb: str) -> str:
    """A request to a service: `berth.req.<pool>.<service>.<verb>`; core NATS, answered at once."""
    return f"berth.req.{_token(pool, 'pool')}.{_token(service, 'service')}.{_token(verb, 'verb')}"


def node_request(pool: str, node: str, verb: str) -> str:
    """A request to an agent about one of its nodes: `berth.req.<pool>.node.<node>.<verb>`."""
    return f"berth.req.{_token(pool, 'pool')}.node.{_token(node, 'node')}.{_token(verb, 'verb')}"
