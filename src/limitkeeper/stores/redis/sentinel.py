"""The topology of a primary behind Sentinels: asks them for the primary, and asks the primary for its role.

Every sign that the primary has changed (READONLY, a refused or lost connection, a timeout) makes the next call ask again. A
READONLY reply says that nothing was done, so that call itself is sent to the new primary. Replication is asynchronous: a failover
loses what the old primary had not replicated, which is what was charged in its last moments.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import StoreUnavailable
from ..sans_io import Plan
from .address import Address, Endpoint
from .command_routing import AGAIN, FAILED, Route, RoutedCommands
from .resp import Command, Outcome, error_kind, exchange, first_reply


class Sentinels(Route):
    """The primary of a service."""

    attempts = 3

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.direct = None
        self._sentinels = list(address.endpoints)

    def locate(self, some: Sequence[RoutedCommands]) -> Plan[None]:
        (primary,) = yield from self.all_endpoints()
        for commands in some:
            commands.endpoint = primary

    def all_endpoints(self) -> Plan[list[Endpoint]]:
        if self.direct is None:
            self.direct = yield from self._find_primary()
        return [self.direct]

    def _find_primary(self) -> Plan[Endpoint]:
        failures = []
        for sentinel in list(self._sentinels):
            query: Command = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.address.service]
            outcomes: list[Outcome] = yield [exchange(sentinel, self.address.sentinels, [query])]
            reply = first_reply(outcomes[0])
            if isinstance(reply, Exception):
                failure = str(reply)
            elif not reply:
                failure = f"it knows no service {self.address.service!r}"
            else:
                primary = Endpoint(reply[0].decode(), int(reply[1]))
                outcomes = yield [exchange(primary, self.login, [["ROLE"]])]
                role = first_reply(outcomes[0])
                if not isinstance(role, Exception) and role[0] == b"master":
                    return primary
                failure = f"{primary}, which is no primary: {role!r}"
            failures.append(f"{sentinel} says {failure}")
            if sentinel in self._sentinels:  # the next call starts with another
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
        raise StoreUnavailable(f"no primary of {self.address.service!r} is known: {'; '.join(failures)}")

    def on_error(self, commands: RoutedCommands, error: Exception) -> str:
        if error_kind(error) in ("READONLY", "LOADING", "MASTERDOWN"):
            self.on_unreachable(commands.endpoint)
        return AGAIN if error_kind(error) == "READONLY" else FAILED

    def on_unreachable(self, endpoint: Endpoint | None) -> None:
        if endpoint == self.direct:
            self.direct = None
