"""Claims of a JSON Web Token: verified, or they do not count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .facts import Facts


@dataclass(frozen=True, slots=True)
class Verifier:
    """How a token is verified: by which key and algorithms, from which issuer, for whom."""

    key: str | bytes = field(repr=False)
    algorithms: tuple[str, ...]
    header: str = "Authorization"
    issuer: str | None = None
    audience: str | None = None
    leeway_us: int = 0

    def claims(self, facts: Facts) -> Mapping[str, Any] | None:
        return None


@dataclass(frozen=True, slots=True)
class Jwt:
    """A claim of a verified token."""

    claim: str
    verifier: Verifier
    default: str | None = None

    def of(self, facts: Facts) -> str | None:
        return self.default
