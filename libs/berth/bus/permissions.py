"""Who may say and hear what on the bus, as data; and the server's account configuration made from it.

Four accounts. `BERTH` holds the streams and the services, which are trusted not to be hostile: inside one account a
pull request's reply subject bypasses publish permissions. `NODES` holds the agents, the weakest members; they reach
only what is exported to them, and a reply subject they invent ends in their own account. `PUB` holds external
subscribers, who get copies of the events and can send nothing back. `SYS` is the server's own.

Everything an agent does works across the accounts (tried on 2.15.1): pulling, acknowledging and resetting its command
consumer, publishing reports singly and in atomic batches, telemetry, and requests in both directions. The server
remembers where the answers to a pull request go for two to four minutes, about 3 KiB each, and costs about 10 us more
for each message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from berth.bus.provision import COMMANDS, EVENTS, PUBLIC_PREFIX

SERVICE_PUBLISH: dict[str, list[str]] = {
    "gateway": [
        "berth.evt.*.job.*.submitted",
        "berth.evt.*.job.*.cancel_requested",
        "berth.evt.*.job.*.extend_requested",
        "berth.evt.*.job.*.rerun_requested",
        "berth.evt.*.policy.*.proposed",
        "berth.evt.*.policy.*.approved",
        "berth.evt.*.policy.*.withdrawn",
        "berth.evt.*.service.*.load",
        "berth.evt.*.service.*.rollback_requested",
        "berth.evt.*.service.*.rollout_requested",
        "berth.evt.*.service.*.rollout_settings",
        "berth.evt.*.access.>",
        "berth.evt.*.node.*.cordon_requested",
    ],
    "admission": ["berth.evt.*.job.>", "berth.evt.*.policy.>", "berth.evt.*.service.*.admitted"],
    "placement": ["berth.evt.*.job.>", "berth.evt.*.allocation.>", "berth.evt.*.plan.>", "berth.evt.*.window.>"],
    "lifecycle": ["berth.evt.*.job.>", "berth.evt.*.attempt.>", "berth.cmd.>"],
    "inventory": ["berth.evt.*.node.>", "berth.evt.*.gpu.>"],
    "audit": ["berth.evt.*.audit.>"],
}
"""What each service may publish. Finer than one owner per fact it cannot be: facts of a job have several owners."""

SERVICE_SUBSCRIBE: dict[str, list[str]] = {"inventory": ["berth.tel.>"]}
"""Core subjects a service hears besides its own requests and replies."""

NODE_ADMINS = ("inventory",)
"""Services that may make and remove the consumers of nodes."""

STREAM_READERS = ("gateway", "audit")
"""Services that may read single stored events by sequence."""

AGENT_REPORTS = ["berth.evt.*.worker.>"]
AGENT_TELEMETRY = ["berth.tel.>"]
AGENT_REQUESTS = ["berth.req.*.inventory.>", "berth.req.*.gateway.secrets"]
AGENT_SERVES = ["berth.req.*.node.>"]
"""What agents publish to a stream, send without one, ask, and answer."""

PROVISIONER = "provisioner"
FLEET = "fleet"
"""The agents' user: one for a process that hosts many nodes."""
SYSTEM = "sys"
_PUBLIC_STREAM_MAX_BYTES = 1 << 30
_NODES_API = "$JS.BERTH.API"
_RESPONSES = {"max": 1, "expires": "2m"}


def inbox_prefix(user: str) -> str:
    """Replies to `user` come here, and only `user` may listen."""
    return f"_INBOX_{user}"


def api_prefix(user: str) -> str:
    """Where `user` finds JetStream's request API.

    Agents are outside the streams' account. Under the usual name their own account, which has no JetStream, would
    answer as well, and first; pull requests have no such second listener and keep their name.
    """
    return _NODES_API if user not in (PROVISIONER, *SERVICE_PUBLISH) else "$JS.API"


def service_permissions(service: str) -> dict[str, Any]:
    """Publish and subscribe permissions of a service, in the server's form."""
    publish = [*SERVICE_PUBLISH[service], "berth.req.>", "$JS.API.INFO", f"$JS.API.STREAM.INFO.{EVENTS}"]
    publish += [*_consumer_subjects(EVENTS, service), f"$JS.API.CONSUMER.CREATE.{EVENTS}.{service}"]
    if service in NODE_ADMINS:
        publish += [f"$JS.API.CONSUMER.{verb}.{COMMANDS}.>" for verb in ("CREATE", "DELETE", "INFO")]
        publish.append(f"$JS.API.CONSUMER.NAMES.{COMMANDS}")
    if service in STREAM_READERS:
        publish += [f"$JS.API.DIRECT.GET.{EVENTS}", f"$JS.API.DIRECT.GET.{EVENTS}.>"]
    subscribe = [f"{inbox_prefix(service)}.>", f"berth.req.*.{service}.>", *SERVICE_SUBSCRIBE.get(service, [])]
    return _permissions(publish, subscribe)


def agent_permissions(user: str = FLEET) -> dict[str, Any]:
    """Permissions of the agents' common user."""
    publish = [
        f"$JS.API.CONSUMER.MSG.NEXT.{COMMANDS}.>",
        *(f"{_NODES_API}.CONSUMER.{verb}.{COMMANDS}.>" for verb in ("INFO", "RESET")),
        *_ack_subjects(COMMANDS),
        *AGENT_REPORTS,
        *AGENT_REQUESTS,
        *AGENT_TELEMETRY,
    ]
    return _permissions(publish, [f"{inbox_prefix(user)}.>", *AGENT_SERVES])


def _provisioner_permissions() -> dict[str, Any]:
    return _permissions(["$JS.API.>"], [f"{inbox_prefix(PROVISIONER)}.>"])


def _subscriber_permissions(user: str) -> dict[str, Any]:
    return {"publish": {"deny": [">"]}, "subscribe": {"allow": [f"{PUBLIC_PREFIX}.>", f"{inbox_prefix(user)}.>"]}}


def _permissions(publish: list[str], subscribe: list[str]) -> dict[str, Any]:
    return {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}, "allow_responses": _RESPONSES}


def _consumer_subjects(stream: str, consumer: str) -> list[str]:
    """Reading one consumer: pull, look, reset, acknowledge (both forms of the acknowledgement subject)."""
    return [
        *(f"$JS.API.CONSUMER.{verb}.{stream}.{consumer}" for verb in ("MSG.NEXT", "INFO", "RESET")),
        f"$JS.ACK.{stream}.{consumer}.>",
        f"$JS.ACK.*.*.{stream}.{consumer}.>",
    ]


def all_users(subscribers: Iterable[str] = ("public",)) -> list[str]:
    """Every user the server knows; each needs a key."""
    return [PROVISIONER, *SERVICE_PUBLISH, FLEET, *subscribers, SYSTEM]


def accounts_config(public_keys: Mapping[str, str], subscribers: Iterable[str] = ("public",)) -> dict[str, Any]:
    """The `accounts` section of the server configuration.

    Args:
        public_keys: user -> public nkey, for all of `all_users`.
        subscribers: users of the `PUB` account.
    """

    def user(name: str, permissions: dict[str, Any]) -> dict[str, Any]:
        return {"nkey": public_keys[name], "permissions": permissions}

    offered = [
        *((f"$JS.API.CONSUMER.MSG.NEXT.{COMMANDS}.>", "stream"),),
        *((f"$JS.API.CONSUMER.{verb}.{COMMANDS}.>", "singleton") for verb in ("INFO", "RESET")),
        *((subject, "singleton") for subject in _ack_subjects(COMMANDS)),
        *((subject, "singleton") for subject in (*AGENT_REPORTS, *AGENT_REQUESTS, *AGENT_TELEMETRY)),
    ]
    berth = {
        "jetstream": "enabled",
        "users": [
            user(PROVISIONER, _provisioner_permissions()),
            *(user(service, service_permissions(service)) for service in SERVICE_PUBLISH),
        ],
        "exports": [
            *({"service": subject, "response_type": kind, "accounts": ["NODES"]} for subject, kind in offered),
            {"stream": f"{PUBLIC_PREFIX}.>", "accounts": ["PUB"]},
        ],
        "imports": [
            *({"service": {"account": "NODES", "subject": subject}} for subject in AGENT_SERVES),
        ],
    }
    nodes = {
        "users": [user(FLEET, agent_permissions())],
        "exports": [
            *({"service": subject, "accounts": ["BERTH"]} for subject in AGENT_SERVES),
        ],
        "imports": [
            {"service": {"account": "BERTH", "subject": subject}, **_renamed(subject)} for subject, _ in offered
        ],
    }
    public = {
        "jetstream": {"max_mem": 0, "max_file": _PUBLIC_STREAM_MAX_BYTES, "max_streams": 1},
        "users": [user(name, _subscriber_permissions(name)) for name in subscribers],
        "imports": [{"stream": {"account": "BERTH", "subject": f"{PUBLIC_PREFIX}.>"}}],
    }
    return {"BERTH": berth, "NODES": nodes, "PUB": public, "SYS": {"users": [{"nkey": public_keys[SYSTEM]}]}}


def _renamed(subject: str) -> dict[str, str]:
    """Under which name agents see what they import; see `api_prefix`."""
    api, pull = "$JS.API.", "$JS.API.CONSUMER.MSG.NEXT."
    if subject.startswith(api) and not subject.startswith(pull):
        return {"to": f"{_NODES_API}.{subject.removeprefix(api)}"}
    return {}


def _ack_subjects(stream: str) -> tuple[str, str]:
    return f"$JS.ACK.{stream}.>", f"$JS.ACK.*.*.{stream}.>"
