"""Messages for the tests of the bus layer, with defaults for what does not matter."""

from __future__ import annotations

from collections.abc import Sequence

from berth.bus import Message, Outgoing, Puller


def an_event(
    entity: str, *, kind: str = "job", fact: str = "running", version: int = 1, data: bytes = b"{}"
) -> Outgoing:
    """A fact of one entity; its id follows from entity, version and fact."""
    return Outgoing(
        f"berth.evt.default.{kind}.{entity}.{fact}", data, f"{entity}.{version}.{fact}", {"Berth-Type": f"{fact}.1"}
    )


def events(count: int, *, prefix: str = "j", kind: str = "job", fact: str = "running") -> list[Outgoing]:
    """`count` facts of as many entities."""
    return [an_event(f"{prefix}{number}", kind=kind, fact=fact) for number in range(count)]


def a_command(node: str, number: int = 0) -> Outgoing:
    """A command to `node`."""
    return Outgoing(f"berth.cmd.default.{node}.launch", b"{}", f"{node}.{number}.launch")


async def take(puller: Puller, count: int, *, timeout: float = 5.0) -> list[Message]:
    """Pull until `count` messages have come, acknowledging them; fewer when `timeout` seconds bring nothing."""
    taken: list[Message] = []
    while len(taken) < count:
        messages = await puller.next(timeout)
        if not messages:
            break
        puller.ack(messages)
        taken += messages
    return taken


def entities(messages: Sequence[Message]) -> list[str]:
    return [message.subject.split(".")[4] for message in messages]
