"""LK.STORE commands: which clients may send them, and the effect of invalid messages."""

from __future__ import annotations

import random

import pytest
import redis
from running import Running

from effort import scaled
from limitkeeper.algorithms import FixedWindow
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.policy import Gate, Policy
from limitkeeper.service.app import Application, RequestError
from limitkeeper.service.connections import Listener
from limitkeeper.service.resp import Commands, RespConnection
from limitkeeper.service.settings import Address, Settings
from limitkeeper.service.store_commands import NO_PERMISSION, StoreCommands
from limitkeeper.stores import MemoryStore
from limitkeeper.stores.remote.messages import Head, claims_json, encode_hit, encode_json, limit_json
from limitkeeper.testing import ManualClock

HEAD = Head((0, 0), None).encode()
NAMED = NamedLimit("shared", "limit", FixedWindow("5/h"))
LIMIT = encode_json(limit_json(NAMED))
ADMIN = "admin-admin-admin"


class Node:
    """The commands on a store in memory, without a transport."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.clock = ManualClock(1_000_000)
        gate = Gate(Policy(), store=MemoryStore(clock=self.clock), clock=self.clock)
        self.commands = Commands(Application(gate, secret=b"0123456789abcdef"))
        self.settings = settings or Settings()
        StoreCommands(self.commands.app, self.settings).add_to(self.commands)
        self.connection = RespConnection(self.commands, Listener(self.settings, self.commands.connection, b""))

    def send(self, *arguments: bytes) -> bytes:
        try:
            return self.connection.answer(list(arguments))  # type: ignore[return-value]
        except RequestError as error:
            return self.connection.failure([], error)


def test_only_loopback_is_open_without_an_admin_token() -> None:
    """Beyond loopback the commands need `admin_token`, whatever ordinary clients may do there."""
    hit = (b"LK.STORE.HIT", encode_hit(HEAD, LIMIT, "k", 1))
    assert Node().send(*hit).startswith(b"$")
    assert Node(Settings(resp=Address("0.0.0.0", 7071))).send(*hit) == NO_PERMISSION
    for address in (Address("0.0.0.0", 7071), Address("127.0.0.1", 7071)):
        node = Node(Settings(resp=address, admin_token=ADMIN))
        for name in (name for name in node.commands.table if name.startswith(b"LK.STORE.")):
            assert node.send(name, hit[1]) == NO_PERMISSION
        assert node.send(b"AUTH", ADMIN.encode()) == b"+OK\r\n"
        assert node.send(*hit).startswith(b"$")


def test_hello_takes_the_admin_token() -> None:
    """Clients that authenticate with HELLO, as redis-py does with protocol 3, can be administrators too."""
    node = Node(Settings(admin_token=ADMIN))
    assert b"limitkeeper" in node.send(b"HELLO", b"3", b"AUTH", b"default", ADMIN.encode())
    assert node.send(b"LK.STORE.TIME", HEAD + b"null") == b"$13\r\n1000000000000\r\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", b"-PROTOCOL version 0"),
        (b"\x02" + HEAD[1:] + b"[]", b"-PROTOCOL version 2"),
        (HEAD[:5], b"expected a message of the store protocol"),
        (HEAD + b"{", b"expected a message"),
        (HEAD + b"17", b"expected a message"),
        (HEAD + encode_json([[[[["a", "b", "warp 5/h"], "k", 1]]], 0, 0, True]), b"unknown algorithm"),
        (HEAD + encode_json([[claims_json([Claim(NAMED, "k", -1)])], 0, 0, True]), b"cost must be"),
        (Head((0, 0), 5).encode() + b"[[],0,0,true]", b"decides on its own"),
    ],
)
def test_an_invalid_message_is_an_error_with_the_reason(body: bytes, words: bytes) -> None:
    """Another version, a cut message, wrong values, an unknown limit, and a time of its own are refused, each by its name."""
    node = Node()
    reply = node.send(b"LK.STORE.DECIDE", body)
    assert reply.startswith(b"-")
    assert words in reply
    assert node.send(b"PING") == b"+PONG\r\n"


def test_random_messages_are_refused_and_change_nothing() -> None:
    """Bytes that resemble messages get an error or an answer; later commands work."""
    node, rng = Node(), random.Random(12)
    names = [name for name in node.commands.table if name.startswith(b"LK.STORE.")]
    good = [
        HEAD + encode_json(one) for one in ([[claims_json([Claim(NAMED, "k", 1)])], 0, 0, True], [claims_json([]), -1, "store"])
    ]
    good.append(encode_hit(HEAD, LIMIT, "k", 1))
    for _ in range(scaled(1500)):
        body = bytearray(rng.choice(good))
        for _ in range(rng.randrange(4)):
            body[rng.randrange(10, len(body))] = rng.randrange(256)
        assert node.send(rng.choice(names), bytes(body[: rng.choice((len(body), rng.randrange(len(body) + 1)))]))[:1] in b"$-"
    assert node.send(b"LK.STORE.HIT", encode_hit(HEAD, LIMIT, "fresh", 1)).startswith(b"$")


def test_several_workers_can_not_hold_a_map() -> None:
    """Each worker would have a map of its own: the error of a node with several names the setting."""
    reply = Node(Settings(workers=2)).send(b"LK.STORE.MAP", HEAD + encode_json({"map": [1, [["a", "a:1", 1]], []], "name": "a"}))
    assert b"workers = 1" in reply


@pytest.mark.slow
@pytest.mark.server
def test_redis_clients_without_the_token_get_an_error(policy_file: object) -> None:
    """A running service with both tokens refuses an ordinary client's LK.STORE commands, and answers its others."""
    tokens = {"LIMITKEEPER_TOKEN": "ordinary-ordinary", "LIMITKEEPER_ADMIN_TOKEN": ADMIN}
    with Running(policy=str(policy_file), environment=tokens) as service:
        assert service.hit("checkout", "k")[0] == 1
        with pytest.raises(redis.ResponseError, match="admin_token"):
            service.redis.execute_command("LK.STORE.TIME", HEAD + b"null")
        with redis.Redis(port=service.resp, password=ADMIN, protocol=3) as admin:
            assert admin.execute_command("LK.STORE.TIME", HEAD + b"null").isdigit()
