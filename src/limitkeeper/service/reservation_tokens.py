"""Reservation tokens: what was charged, authenticated, so that any worker can settle it.

    token = base64url(payload + HMAC-SHA-256(key, payload)[:16])     key = HMAC-SHA-512(secret, "reservation")
    payload = JSON [id, expiry, start, source, [[limiter, limit name, limit, key, cost, reset number, place], …]]   times in µs

A token is authenticated, not encrypted: its holder can read the key that it sent. It names the limit as it was when it was
charged, so a reload of the policy in between does not matter. Rejected: a table of open reservations, which every worker would
have to read and a killed one would leave behind. The store keeps only the ids of settled tokens, for
twice `ttl_us`: no token lives longer.
"""

from __future__ import annotations

import hmac
import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Sequence
from functools import lru_cache
from secrets import token_hex
from typing import NamedTuple

from ..algorithms.claim import Claim, NamedLimit
from ..algorithms.limit import Limit
from ..algorithms.limit_parser import parse_limit
from ..clock import utc_us
from ..decision import Decision

MAC = 16
#: The longest token that is read: each limit has a key of at most 256 characters, of at most 12 bytes in JSON.
MAX_TOKEN = 65_536


class InvalidToken(ValueError):
    """A token that was not issued with this secret, is damaged, or has expired."""


class Charged(NamedTuple):
    """An authenticated charge: its id, start and source, and its claims; none when nothing was charged. `places`: for each claim,
    whether it is a place among requests at a time, which ends with the reservation."""

    id: str
    start_us: int
    source: str
    claims: list[Claim]
    places: list[bool]


class ReservationTokens:
    """Issues and reads tokens. All workers and replicas that settle each other's reservations need the same secret."""

    def __init__(self, secret: bytes, ttl_us: int, now_us: Callable[[], int] = utc_us) -> None:
        self._key = hmac.digest(secret, b"reservation", "sha512")  # other uses of the secret (SHA-256) show no part of it
        self.ttl_us, self._now_us = ttl_us, now_us

    def issue(self, claims: Sequence[Claim], decision: Decision | None, concurrent: Limit | None = None) -> str:
        """The token of a charge; claims of the limit `concurrent` are places. It expires `ttl_us` after its start, which is at
        most `ttl_us` from now."""
        wait_us, start_us, source = (decision.wait_us, decision.start_us, decision.source) if decision else (0, -1, "store")
        charges = [
            [*one.limit.identity[:2], str(one.limit.limit), one.key, one.cost, one.reset_id, one.limit.limit is concurrent]
            for one in claims
        ]
        expiry = self._now_us() + wait_us + self.ttl_us
        payload = json.dumps([token_hex(12), expiry, start_us, source, charges], separators=(",", ":")).encode()
        return urlsafe_b64encode(payload + self._mac(payload)).decode().rstrip("=")

    def read(self, token: str) -> Charged:
        """The charge of a token; raises InvalidToken."""
        if not token or len(token) > MAX_TOKEN or not token.isascii():
            raise InvalidToken("this is not a reservation token; pass the token that the reservation returned")
        try:
            data = urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except (Base64Error, ValueError):
            data = b""
        payload, mac = data[:-MAC], data[-MAC:]
        if not hmac.compare_digest(mac, self._mac(payload)):
            raise InvalidToken("not a token, or not issued with this service's secret; set the same secret on every replica")
        identifier, expiry, start_us, source, charges = json.loads(payload)
        if expiry <= self._now_us():
            raise InvalidToken("this token has expired; its charge stays")
        claims = [Claim(named_limit(*charge[:3]), charge[3], charge[4], -1, charge[5]) for charge in charges]
        return Charged(identifier, start_us, source, claims, [any(charge[6:]) for charge in charges])

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")[:MAC]


@lru_cache(4096)  # a NamedLimit remembers its handle in the store
def named_limit(limiter: str, name: str, text: str) -> NamedLimit:
    return NamedLimit(limiter, name, parse_limit(text))
