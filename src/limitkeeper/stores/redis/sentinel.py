"""Sentinels know which server is the primary. They are asked one after the other, and the primary is asked whether it is one.

Whatever says that the primary has changed (READONLY, a connection that is refused or lost, a timeout) makes the next call ask
again; a READONLY reply says that nothing was done, so that call itself is brought to the new primary. Replication is
asynchronous: a failover forgets what the old primary had not passed on, which is what was charged in its last moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...errors import StoreUnavailable
from .address import Address, Endpoint
from .resp import ReplyError, word
from .route import AGAIN, FAILED, Route
from .script_call import RoutedCommands
from .trips import Outcome, Plan, Trip


class Sentinels(Route):
    """The way to the primary of a service."""

    tries = 3

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.direct = None
        self._sentinels = list(address.places)

    def find(self, errands: Sequence[RoutedCommands]) -> Plan[None]:
        if self.direct is None:
            self.direct = yield from self._primary()
        for errand in errands:
            errand.place = self.direct

    def everywhere(self) -> Plan[list[Endpoint]]:
        if self.direct is None:
            self.direct = yield from self._primary()
        return [self.direct]

    def _primary(self) -> Plan[Endpoint]:
        said = []
        for sentinel in list(self._sentinels):
            ask = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.address.service]
            (told,) = yield [Trip(sentinel, self.address.sentinels, [ask])]
            place = self._place(told)
            if isinstance(place, Endpoint):
                (role,) = yield [Trip(place, self.login, [["ROLE"]])]
                if role.error is None and not isinstance(role.replies[0], ReplyError) and role.replies[0][0] == b"master":
                    return place
                place = f"{place}, which is no primary: {role.error or role.replies[0]!r}"
            said.append(f"{sentinel} says {place}")
            if sentinel in self._sentinels:  # the next call begins with another
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
        raise StoreUnavailable(f"no primary of {self.address.service!r} is known: {'; '.join(said)}")

    def _place(self, told: Outcome) -> Endpoint | str:
        if told.error is not None:
            return str(told.error)
        reply: Any = told.replies[0]
        if isinstance(reply, ReplyError):
            return repr(str(reply))
        if not reply:
            return f"it knows no service {self.address.service!r}"
        return Endpoint(reply[0].decode(), int(reply[1]))

    def wrong(self, errand: RoutedCommands, error: Any) -> str:
        if word(error) == "READONLY":
            self.gone(errand.place)
            return AGAIN
        if word(error) in ("LOADING", "MASTERDOWN"):
            self.gone(errand.place)
        return FAILED

    def gone(self, place: Endpoint | None) -> None:
        if place == self.direct:
            self.direct = None
