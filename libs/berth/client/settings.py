"""Where the platform is, and with what token: arguments, BERTH_URL and BERTH_TOKEN(_FILE), or a platform that runs here.

A platform started with `berth up` leaves its address and an operator's token below its data directory; from the folder
it was started in (or any folder below), or with BERTH_HOME, nothing has to be set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from berth.client.errors import NotConfigured

OTHER_VARIABLES: Final = ("BERTH_URL", "BERTH_TOKEN", "BERTH_TOKEN_FILE", "BERTH_TENANT")
"""Variables of the client, which services therefore do not take for misspelt ones of their own."""


@dataclass(frozen=True, slots=True)
class Target:
    """Whom to call, and as whom."""

    url: str
    token: str = field(repr=False)


def find_target(
    *,
    url: str | None = None,
    token: str | None = None,
    home: Path | None = None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Target:
    """The platform to call.

    Raises:
        NotConfigured: says what is missing and how to give it.
    """
    variables = os.environ if environment is None else environment
    found = _home(home, variables, folder or Path.cwd())
    chosen_url = url or variables.get("BERTH_URL") or _url_of(found)
    if not chosen_url:
        where = f"no platform has run in {found}" if found is not None else "no .berth folder here or above"
        raise NotConfigured(f"no platform to talk to: {where}; start one with `berth up`, or set BERTH_URL")
    chosen_token = token or variables.get("BERTH_TOKEN") or _token_file(variables) or _token_of(found)
    if not chosen_token:
        raise NotConfigured(f"no token for {chosen_url}; set BERTH_TOKEN or BERTH_TOKEN_FILE")
    return Target(chosen_url.rstrip("/"), chosen_token)


def _home(home: Path | None, variables: Mapping[str, str], folder: Path) -> Path | None:
    if home is not None:
        return home
    if variables.get("BERTH_HOME"):
        return Path(variables["BERTH_HOME"])
    for candidate in (folder, *folder.parents):
        if (candidate / ".berth" / "run").is_dir():
            return candidate / ".berth"
    return None


def _url_of(home: Path | None) -> str:
    if home is None:
        return ""
    for name in ("gateway-api.json", "platform.json"):  # the first is there while the gateway listens
        try:
            url = json.loads((home / "run" / name).read_text()).get("url")
        except (OSError, ValueError):
            continue
        if url:
            return str(url)
    return ""


def _token_file(variables: Mapping[str, str]) -> str:
    name = variables.get("BERTH_TOKEN_FILE")
    if not name:
        return ""
    try:
        return Path(name).read_text().strip()
    except OSError as error:
        raise NotConfigured(f"BERTH_TOKEN_FILE {name}: {error.strerror}") from None


def _token_of(home: Path | None) -> str:
    if home is None:
        return ""
    try:
        return (home / "run" / "token").read_text().strip()
    except OSError:
        return ""
