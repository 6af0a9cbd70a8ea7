"""Commands for operators: tokens, parked messages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from berth.client.cli.session import (
    Json,
    age,
    connect,
    console,
    print_json,
    print_table,
    say,
)

parked_app = typer.Typer(help="Messages that a service could not take in.", no_args_is_help=True)
token_app = typer.Typer(help="Who may call.", no_args_is_help=True)

Service = Annotated[str, typer.Argument(metavar="SERVICE")]
Number = Annotated[int, typer.Argument(metavar="ID", min=1)]


# ------------------------------------------------------------------------------------------------------------- parked
@parked_app.command("list")
def parked_list(
    service: Annotated[str | None, typer.Option(help="Of one service.")] = None,
    closed: Annotated[bool, typer.Option("--closed", help="Also those replayed or dropped.")] = False,
    as_json: Json = False,
) -> None:
    """Parked messages; later ones of an entity stand behind its first."""
    with connect() as api:
        found = api.call("GET", "/v1/parked", params={"service": service, "closed": closed})
    if as_json:
        print_json(found)
        return
    rows = [
        (p["service"], p["id"], p["entity"], p["event_id"], p["status"], age(p["parked_at"]), p["reason"])
        for p in found["parked"]
    ]
    print_table(("SERVICE", "ID", "ENTITY", "EVENT", "STATUS", "AGE", "REASON"), rows, empty="nothing is parked")
    for name in found["unreachable"]:
        say(f"[yellow]{name} did not answer[/]")


@parked_app.command("show")
def parked_show(service: Service, number: Number, as_json: Json = False) -> None:
    """One parked message with what was sent."""
    with connect() as api:
        found = api.call("GET", f"/v1/parked/{service}/{number}")
    if as_json:
        print_json(found)
        return
    for name, value in found.items():
        if value not in (None, ""):
            console().print(f"{name:<12} {value}", markup=False, soft_wrap=True)


@parked_app.command("replay")
def parked_replay(
    service: Service,
    number: Number,
    payload: Annotated[Path | None, typer.Option(exists=True, help="File with the mended message.")] = None,
    note: Annotated[str, typer.Option(help="For the record.")] = "",
    as_json: Json = False,
) -> None:
    """Try a parked message again."""
    body = {"note": note, **({"payload": payload.read_text()} if payload else {})}
    with connect() as api:
        found = api.call("POST", f"/v1/parked/{service}/{number}/replay", body=body)
    if as_json:
        print_json(found)
    else:
        print(f"{service} tries {number} again")


@parked_app.command("drop")
def parked_drop(
    service: Service,
    number: Number,
    note: Annotated[str, typer.Option(help="For the record.")] = "",
    as_json: Json = False,
) -> None:
    """Give a parked message up."""
    with connect() as api:
        found = api.call("DELETE", f"/v1/parked/{service}/{number}", params={"note": note})
    if as_json:
        print_json(found)
    else:
        print(f"{service} dropped {number}")


# ------------------------------------------------------------------------------------------------------------- tokens
@token_app.command("create")
def token_create(
    user: Annotated[str, typer.Argument(metavar="USER")],
    tenant: Annotated[str | None, typer.Option(help="The tenant it is for.")] = None,
    role: Annotated[str, typer.Option(help="member, tenant_admin, viewer or operator.")] = "member",
    as_json: Json = False,
) -> None:
    """A token for a user; printed this once."""
    with connect() as api:
        found = api.call("POST", "/v1/tokens", body={"user": user, "tenant": tenant, "role": role})
    if as_json:
        print_json(found)
    else:
        print(found["token"])


@token_app.command("list")
def token_list(as_json: Json = False) -> None:
    """Tokens, without themselves."""
    with connect() as api:
        found = api.call("GET", "/v1/tokens")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            t["token_id"],
            t["user"],
            t["tenant"],
            t["role"],
            age(t["created_at"]),
            t["created_by"],
            "revoked" if t["is_revoked"] else "",
        )
        for t in found["tokens"]
    ]
    print_table(("TOKEN", "USER", "TENANT", "ROLE", "AGE", "BY", ""), rows, empty="no tokens")


@token_app.command("revoke")
def token_revoke(token_id: Annotated[str, typer.Argument(metavar="TOKEN")], as_json: Json = False) -> None:
    """Revoke a token by its id; it may work for a few seconds more."""
    from urllib.parse import quote

    with connect() as api:
        api.call("DELETE", f"/v1/tokens/{quote(token_id, safe='')}")
    if as_json:
        print_json({"token_id": token_id, "is_revoked": True})
    else:
        print(f"{token_id} is revoked")


def whoami(as_json: Json = False) -> None:
    """Whose token is in use."""
    with connect() as api:
        found = api.call("GET", "/v1/whoami")
    if as_json:
        print_json(found)
    else:
        print(f"{found['user']}, {found['role']}{' of ' + found['tenant'] if found['tenant'] else ''}")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(parked_app, name="parked")
    app.add_typer(token_app, name="token")
    app.command("whoami")(whoami)
