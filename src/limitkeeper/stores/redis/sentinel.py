"""The topology of a primary behind Sentinels: asks them for the primary, and asks the primary for its role.

Every sign that the primary has changed (READONLY, NOREPLICAS, a refused or lost connection, a timeout) makes the next call ask
again. READONLY and NOREPLICAS say that nothing was done, so that call itself is sent to the new primary, within its budget.

A planned failover gives no sign: the old primary learns of it about 10 s later, and until then it takes itself for a primary, in
ROLE as well. So a Sentinel is asked every CONFIRM_US while the store is used: by one caller, within a quarter of its budget; the
others go on meanwhile. Sentinels that don't answer change nothing. Replication is asynchronous: a failover loses what the old
primary had not replicated. Rejected: subscribing to +switch-master, which needs a reader in every process and a second way to
notice that the subscription is dead; INFO in the script, which doubles the server's work and says the same as ROLE.
"""

from __future__ import annotations

from random import Random

from ...clock import SYSTEM, Clock
from ...errors import StoreUnavailable
from ..sans_io import Plan
from .address import Address, Endpoint
from .command_routing import LATER, Route, RoutedCommand
from .resp import NotYet, ask, decode_endpoint, decode_reply, error_kind

#: A Sentinel confirms the primary every so many microseconds.
CONFIRM_US = 250_000


class Sentinels(Route):
    """The primary of a service."""

    def __init__(self, address: Address, clock: Clock = SYSTEM, rng: Random | None = None) -> None:
        super().__init__(address, clock, rng)
        self.direct = None
        self._sentinels = list(address.endpoints)

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        primary, now_us = self.direct, self._now_us()
        if primary is None:
            self.direct = primary = yield from self._find_primary()
            self.confirm_at_us = now_us + CONFIRM_US
        elif now_us >= self.confirm_at_us:
            self.confirm_at_us = now_us + CONFIRM_US  # the others go on meanwhile
            named = yield from self._confirm(primary)
            if named != primary:
                self.direct = primary = named
        return [primary]

    def _confirm(self, known: Endpoint) -> Plan[Endpoint]:
        """The primary that a Sentinel names; the known one when it does not answer, or names a server that is none."""
        sentinel = self._sentinels[0]
        named = yield from self._ask_sentinel(sentinel, share=4)
        if not isinstance(named, Endpoint):
            self._ask_last(sentinel)
        elif named != known and (yield from self._is_primary(named, share=4)) is True:
            return named
        return known

    def _find_primary(self) -> Plan[Endpoint]:
        failures, later = [], False
        sentinels = list(self._sentinels)
        for at, sentinel in enumerate(sentinels):
            failure = named = yield from self._ask_sentinel(sentinel, share=len(sentinels) - at)
            if isinstance(named, Endpoint):
                role = yield from self._is_primary(named)
                if role is True:
                    return named
                failure = f"{named}, which is no primary: {role!r}"
                later = self.takes_a_moment(named, role) or later
            later = self.takes_a_moment(sentinel, failure) or later
            no_sentinel = "unknown command" in str(failure)
            failures.append(
                f"{sentinel} is no Sentinel: give the Sentinels' port (26379)" if no_sentinel else f"{sentinel} says {failure}"
            )
            self._ask_last(sentinel)
        kind = NotYet if later else StoreUnavailable
        raise kind(f"no primary of {self.address.service!r} is known: {'; '.join(failures)}")

    def _ask_sentinel(self, sentinel: Endpoint, share: int) -> Plan[Endpoint | Exception | str]:
        """The primary that a Sentinel names, or why it names none."""
        service = self.address.service
        reply = yield from ask(sentinel, self.address.sentinels, ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service], share)
        if isinstance(reply, Exception):
            return reply
        if reply is None:
            return f"it knows no service {service!r}"
        try:
            return decode_reply(reply, lambda named: decode_endpoint(*named), sentinel)
        except StoreUnavailable as error:
            return str(error)

    def _is_primary(self, server: Endpoint, share: int = 1) -> Plan[object]:
        """Whether a server takes itself for a primary: True, or what it says instead."""
        role = yield from ask(server, self.login, ["ROLE"], share)
        return True if isinstance(role, list) and role[:1] == [b"master"] else role

    def _ask_last(self, sentinel: Endpoint) -> None:
        self._sentinels = [*(one for one in self._sentinels if one != sentinel), sentinel]  # never incomplete: threads read it

    def on_error(self, command: RoutedCommand, error: Exception) -> str:
        kind = error_kind(error)
        if kind in ("READONLY", "LOADING", "MASTERDOWN", "NOREPLICAS"):
            self.on_unreachable(command.endpoint)
            return LATER
        return super().on_error(command, error)

    def on_unreachable(self, endpoint: Endpoint | None) -> None:
        if endpoint == self.direct:
            self.direct = None
