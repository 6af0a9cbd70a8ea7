"""Commands about the pool: nodes, cards, quota, tenants, events."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from berth.client.cli.session import Json, age, connect, console, print_json, print_line, print_table


def nodes(as_json: Json = False) -> None:
    """Nodes with state and cards."""
    with connect() as api:
        found = api.call("GET", "/v1/nodes")
    if as_json:
        print_json(found)
        return
    rows = [
        (
            node["node"],
            node["state"],
            ", ".join(f"{count} × {kind}" for kind, count in node["card_types"].items()),
            f"{node['gpus_held']}/{node['gpus']}",
            node["gpus_usable"],
            node["driver_version"],
            " ".join(f"{level}={place}" for level, place in node["domain"].items()),
            age(node["last_heard"]),
        )
        for node in found["nodes"]
    ]
    columns = ("NODE", "STATE", "CARDS", "HELD", "USABLE", "DRIVER", "DOMAIN", "HEARD")
    print_table(columns, rows, empty="no nodes yet")


def gpus(node: Annotated[str | None, typer.Option(help="Of one node.")] = None, as_json: Json = False) -> None:
    """Cards with readings, health and who holds them."""
    with connect() as api:
        found = api.call("GET", "/v1/gpus", params={"node": node})
    if as_json:
        print_json(found)
        return
    rows = [
        (
            gpu["node"],
            gpu["index"],
            gpu["card_type"],
            gpu["health"],
            _unit(gpu["utilization_percent"], "%"),
            f"{_unit(gpu['memory_used_mib'], '')}/{gpu['memory_mib']} MiB",
            _unit(gpu["temperature_celsius"], "°C"),
            _unit(gpu["power_watts"], " W"),
            ", ".join(gpu["held_by"]),
            gpu["uuid"],
        )
        for gpu in found["gpus"]
    ]
    columns = ("NODE", "GPU", "TYPE", "HEALTH", "BUSY", "MEMORY", "TEMP", "POWER", "HELD BY", "UUID")
    print_table(columns, rows, empty="no cards yet")


def _unit(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.0f}{unit}"


def show_quota(tenant: str | None, *, as_json: bool) -> None:
    """Quota, use and waiting demand by tenant and card type, in GPUs."""
    with connect() as api:
        found = api.call("GET", "/v1/quota", params={"tenant": tenant})
    if as_json:
        print_json(found)
        return
    rows = [
        (
            line["tenant"],
            line["card_type"],
            "no limit" if line["quota"] is None else _number(line["quota"]),
            _number(line["used"]),
            _number(line.get("borrowed") or 0),
            "-" if line.get("can_borrow") is None else _number(line["can_borrow"]),
            _number(line.get("waiting") or 0),
        )
        for line in found["lines"]
    ]
    columns = ("TENANT", "TYPE", "QUOTA", "USED", "BORROWED", "CAN BORROW", "WAITING")
    print_table(columns, rows, empty="no quota yet; an operator applies a policy: berth policy apply FILE")


def _number(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def tenants(as_json: Json = False) -> None:
    """Tenants you may see."""
    with connect() as api:
        found = api.call("GET", "/v1/tenants")
    if as_json:
        print_json(found)
        return

    def amounts(by_type: dict[str, float]) -> str:
        return ", ".join(f"{_number(count)} {kind}" for kind, count in by_type.items()) or "-"

    rows = [
        (t["tenant"], amounts(t["quota"]), amounts(t["used"]), t["jobs_waiting"], t["jobs_running"])
        for t in found["tenants"]
    ]
    print_table(("TENANT", "QUOTA", "USED", "WAITING", "RUNNING"), rows, empty="no tenants yet")


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on for ever, also over a restart.")] = False,
    after: Annotated[int | None, typer.Option(min=0, help="Only those behind this sequence.")] = None,
    job: Annotated[str | None, typer.Option("--subject", help="Of this job or node (id) only.")] = None,
    type_: Annotated[str | None, typer.Option("--type", help="Of this type only, such as job.placed.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=5000, help="So many at most.")] = 500,
    as_json: Json = False,
) -> None:
    """What has happened, in order."""
    params: dict[str, Any] = {"after": after, "subject": job, "type": type_}
    with connect() as api:
        if follow:
            for event in api.events("/v1/events", params={**params, "follow": True}):
                if as_json:
                    print_line(event)
                else:
                    _print_event(event)
            return
        found = api.call("GET", "/v1/events", params={**params, "limit": limit})
    if as_json:
        print_json(found)
        return
    for event in found["events"]:
        _print_event(event)


def _print_event(event: dict[str, Any]) -> None:
    type_ = event["type"].removeprefix("berth.")
    by = f" by {event['actor']}" if event.get("actor") else ""
    tenant = f" [{event['tenant']}]" if event.get("tenant") else ""
    line = f"{event['sequence']:>8}  {event['time'][:23]:<23}  {type_:<28} {event['subject']}{tenant}{by}"
    console().print(line, markup=False, soft_wrap=True)


def cordon(
    node: Annotated[str, typer.Argument(metavar="NODE")],
    reason: Annotated[str, typer.Option("--why", help="For the record.")] = "",
    as_json: Json = False,
) -> None:
    """Give a node no new work; what runs there stays."""
    _cordon(node, True, reason, as_json=as_json)


def uncordon(
    node: Annotated[str, typer.Argument(metavar="NODE")],
    reason: Annotated[str, typer.Option("--why", help="For the record.")] = "",
    as_json: Json = False,
) -> None:
    """Give a node work again."""
    _cordon(node, False, reason, as_json=as_json)


def _cordon(node: str, cordoned: bool, reason: str, *, as_json: bool) -> None:
    from urllib.parse import quote as quoted

    body = {"cordoned": cordoned, "why": reason}
    with connect() as api:
        found = api.call("POST", f"/v1/nodes/{quoted(node, safe='')}/cordon", body=body, repeatable=True)
    if as_json:
        print_json(found)
    else:
        print(f"{node}: {'takes no new work' if cordoned else 'takes work again'}")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("nodes")(nodes)
    app.command("gpus")(gpus)
    app.command("tenants")(tenants)
    app.command("events")(events)
    app.command("cordon")(cordon)
    app.command("uncordon")(uncordon)
