"""Who asks, and what each role may do. Pure; tokens are looked up in `access`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """viewer reads; member acts for jobs of the tenant; tenant_admin also hands out tokens of the tenant; operator does
    everything; internal only delivers spans."""

    VIEWER = "viewer"
    MEMBER = "member"
    TENANT_ADMIN = "tenant_admin"
    OPERATOR = "operator"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Principal:
    """A caller. tenant None: of no tenant; an operator or a viewer without one sees all of them."""

    user: str
    tenant: str | None
    role: Role

    @property
    def actor(self) -> str:
        """As envelopes name it."""
        return f"user:{self.user}"

    @property
    def is_operator(self) -> bool:
        """Whether everything is allowed."""
        return self.role is Role.OPERATOR

    @property
    def sees_all(self) -> bool:
        """Whether jobs of every tenant may be read."""
        return self.is_operator or (self.role is Role.VIEWER and self.tenant is None)

    @property
    def scope(self) -> str:
        """Whose idempotency keys these are: the tenant's, or the user's own."""
        return self.tenant if self.tenant is not None else f"@{self.user}"

    def may_read(self, tenant: str) -> bool:
        """Whether jobs of a tenant may be read."""
        return self.sees_all or (self.role is not Role.INTERNAL and self.tenant == tenant)

    def may_change(self, tenant: str) -> bool:
        """Whether jobs may be submitted and cancelled for a tenant."""
        return self.is_operator or (self.role in {Role.MEMBER, Role.TENANT_ADMIN} and self.tenant == tenant)
