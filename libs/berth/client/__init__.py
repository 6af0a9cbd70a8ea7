"""For those who use Berth from outside: `BerthClient` (typed), the command line, and words for reason codes.

`from berth.client import BerthClient` loads on first use: the command line starts without models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from berth.client.errors import BerthError, Refused, ServerFault, Unreachable
    from berth.client.sdk import BerthClient

__all__ = ["BerthClient", "BerthError", "Refused", "ServerFault", "Unreachable"]


def __getattr__(name: str) -> Any:
    if name == "BerthClient":
        from berth.client import sdk

        return sdk.BerthClient
    if name in __all__:
        from berth.client import errors

        return getattr(errors, name)
    raise AttributeError(name)
