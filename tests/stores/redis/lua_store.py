"""The scripts behind the contract, with a plain redis-py client: the store of the tests that compare with MemoryStore."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import redis

from limitkeeper import Decision
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.stores import Store
from limitkeeper.stores.contract import bounded_wait_us, checked
from limitkeeper.stores.redis import limit_and_state_codec, script_request
from limitkeeper.stores.redis.key_names import KeyNames


class LuaStore(Store):
    """`clock` None: the server's time. Counts the round trips that it makes."""

    def __init__(self, client: redis.Redis, clock: Any = None, prefix: str = "limitkeeper") -> None:
        self.client = client
        self._clock = clock
        self.names = KeyNames(prefix, marked=clock is not None)
        self.round_trips = 0
        self.last_us = self.shift_us = 0

    @property
    def clock(self) -> Any:
        return self._clock

    def moment(self) -> int | None:
        """The time to send, from a clock that never goes back."""
        if self._clock is None:
            return None
        now_us = self._clock.now_us() + self.shift_us
        if now_us < self.last_us:
            self.shift_us += self.last_us - now_us
            now_us = self.last_us
        self.last_us = now_us
        return int(now_us)

    def send(self, *sent: script_request.AnyRequest) -> list[Any]:
        """One call for all of them; stale ones are sent again with the missing states."""
        script, keys, body = script_request.encode_call(sent)
        self.round_trips += 1
        try:
            reply = self.client.evalsha(script.sha.decode(), len(keys), *keys, body)
        except redis.exceptions.NoScriptError:
            reply = self.client.eval(script.source, len(keys), *keys, body)
        script_request.decode_call(sent, reply)
        return [self.send(self.again(request))[0] if request.stale else request.answer for request in sent]

    def again(self, request: script_request.AnyRequest) -> script_request.AnyRequest:
        return request.again({name: self.client.hgetall(name) for name in request.stale_registries()})

    def register(self, limit: NamedLimit) -> None:
        self.send(script_request.RegisterRequest(self.names, limit, self.moment()))

    def decide(self, claims: Sequence[Claim], max_wait_us: int | None = 0, **options: Any) -> Decision:
        how = script_request.DecideOptions(bounded_wait_us(max_wait_us), now_us=self.moment(), **options)
        return self.send(script_request.encode_decide(self.names, checked(claims), how))[0]

    def decide_many(self, many: Sequence[Sequence[Claim]], max_wait_us: int | None = 0) -> list[Decision]:
        how = script_request.DecideOptions(bounded_wait_us(max_wait_us), now_us=self.moment())
        made = [script_request.encode_decide(self.names, checked(claims), how) for claims in many]
        return self.send(*made) if made else []

    def give_back(self, claims: Sequence[Claim], charged_at: int = -1, source: str = "store") -> bool:
        return bool(self.send(script_request.GiveBackRequest(self.names, claims, charged_at, self.moment()))[0])

    def reset(self, claims: Sequence[Claim]) -> None:
        for claim in claims:
            self.send(script_request.ResetRequest(self.names, claim, self.moment()))

    def items(self, limit: NamedLimit) -> Iterable[tuple[str, Any]]:
        fields = self.client.hgetall(self.names.registry(limit))
        now_us = self.moment() or self.server_us()
        found = [
            limit_and_state_codec.decode_item(
                limit_and_state_codec.entry_of(self.names, limit), name, self.client.get(name), fields, now_us
            )
            for name in self.client.scan_iter(match=self.names.pattern(limit))
        ]
        return [item for item in found if item is not None]

    def load(self, limit: NamedLimit, items: Iterable[tuple[str, Any]]) -> None:
        for key, state in items:
            self.send(script_request.LoadRequest(self.names, limit, key, state, self.moment()))

    def server_us(self) -> int:
        seconds, us = self.client.time()
        return seconds * 1_000_000 + us


class MovingStore(LuaStore):
    """One whose waiters move up when one leaves."""

    can_rebook = True

    def rebook(self, turns: Sequence[Any]) -> list[Decision | None]:
        return self.send(script_request.RebookRequest(self.names, turns, self.moment()))[0]
