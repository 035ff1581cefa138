"""The Redis protocol of a running service, with redis-py as its client."""

from __future__ import annotations

import random
import sys
import tracemalloc
from collections import Counter

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from running import Running, read_all

from effort import scaled
from limitkeeper.policy import Gate, Policy
from limitkeeper.service.app import Application
from limitkeeper.service.connections import Listener
from limitkeeper.service.resp import Commands, RespConnection
from limitkeeper.service.settings import Settings


def test_hits_are_five_integers(service):
    """allowed, limit, remaining, retry after and reset after in milliseconds."""
    answers = [service.hit("checkout", "resp:1") for _ in range(4)]
    assert [one[:3] for one in answers] == [[1, 3, 2], [1, 3, 1], [1, 3, 0], [0, 3, 0]]
    assert answers[0][3] == 0
    assert 3_590_000 < answers[3][3] <= answers[3][4] <= 3_600_000
    assert service.hit("checkout", "resp:2", 4)[3] == -1


def test_http_and_resp_share_one_state(service):
    """Charges over one port count on the other."""
    service.hit("checkout", "resp:3")
    assert service.post("/v1/check", limit="checkout", key="resp:3").json()["remaining"] == 1


def test_a_pipeline_is_answered_in_order(service):
    """Each command by its own reply, errors among them."""
    pipe = service.redis.pipeline(transaction=False)
    for key in ("a", "a", "b", "a", "a"):
        pipe.execute_command("LK.HIT", "checkout", f"resp:4{key}")
    pipe.execute_command("LK.HIT", "nope", "a")
    pipe.execute_command("PING")
    *hits, error, pong = pipe.execute(raise_on_error=False)
    assert [one[0] for one in hits] == [1, 1, 1, 1, 0]
    assert "unknown limit 'nope'" in str(error)
    assert pong is True


def test_a_transaction_is_decided_at_exec(service):
    """redis-py's default pipeline: each queued command has its own reply, errors among them; nothing is charged before."""
    pipe = service.redis.pipeline()
    for limit in ("checkout", "checkout", "nope", "checkout", "checkout"):
        pipe.execute_command("LK.HIT", limit, "resp:11")
    pipe.ping()
    replies = pipe.execute(raise_on_error=False)
    assert "unknown limit 'nope'" in str(replies[2])
    assert [one[0] for one in replies if isinstance(one, list)] == [1, 1, 1, 0]
    assert replies[5] is True
    assert service.redis.pipeline().execute() == []


def test_a_transaction_with_an_unknown_command_charges_nothing(service):
    """EXEC is refused, so a retry charges once; DISCARD drops the queue as well. The connection stays open."""
    pipe = service.redis.pipeline()
    pipe.execute_command("LK.HIT", "checkout", "resp:12")
    pipe.get("resp:12")
    with pytest.raises(redis.ResponseError, match="unknown command 'GET'"):
        pipe.execute()
    with service.raw(service.resp) as sock:
        sock.sendall(
            b"multi\r\nlk.hit checkout resp:12\r\nMULTI\r\nDISCARD\r\nDISCARD\r\nMULTI\r\nGETX\r\nEXEC\r\nEXEC\r\nQUIT\r\n"
        )
        replies = read_all(sock).split(b"\r\n")
    assert [one.split()[0] for one in replies[:-1]] == [
        b"+OK", b"+QUEUED", b"-ERR", b"+OK", b"-ERR", b"+OK", b"-ERR", b"-EXECABORT", b"-ERR", b"+OK",
    ]  # fmt: skip
    assert service.redis.execute_command("LK.PEEK", "checkout", "resp:12")[2] == 3


def test_a_transaction_is_bounded(service):
    """Commands that wait for EXEC take at most `max_body` bytes; a larger transaction charges nothing."""
    pipe = service.redis.pipeline()
    for _ in range(300):
        pipe.execute_command("LK.HIT", "checkout", "resp:13" + "x" * 1000)
    with pytest.raises(redis.ResponseError, match="a transaction is larger than 262144 bytes; use a pipeline without MULTI"):
        pipe.execute()
    assert service.redis.execute_command("LK.PEEK", "checkout", "resp:13" + "x" * 1000)[2] == 3


def test_peek_reserve_settle_refund_reset(service):
    """All operations of the application."""
    call = service.redis.execute_command
    assert call("LK.PEEK", "tokens", "resp:5", 10)[:3] == [1, 1000, 1000]
    *five, wait, token = call("LK.RESERVE", "tokens", "resp:5", 600, "MAXWAIT", 0)
    assert (five[2], wait) == (400, 0)
    assert [call("LK.SETTLE", token, 100), call("LK.SETTLE", token, 100)] == [1, 0]
    assert call("LK.REFUND", "tokens", "resp:5", 50) == 1
    *_, token = call("LK.RESERVE", "tokens", "resp:5", 900)
    assert [call("LK.REFUND", token), call("LK.REFUND", token)] == [1, 0]
    assert call("LK.PEEK", "tokens", "resp:5")[2] == 950
    assert call("LK.RESERVE", "tokens", "resp:5", 1000)[-1] == b""
    assert call("LK.RESET", "tokens", "resp:5") == 1
    assert call("LK.PEEK", "tokens", "resp:5")[2] == 1000


def test_throttle_answers_as_redis_cell(service):
    """limited, limit, remaining, seconds to retry (-1: not limited), seconds until it is full."""
    answers = [service.redis.execute_command("CL.THROTTLE", "resp:6", 15, 30, 60, 1) for _ in range(17)]
    assert answers[0] == [0, 16, 15, -1, 2]
    assert answers[15][:4] == [0, 16, 0, -1]
    assert answers[16][:3] == [1, 16, 0]
    assert 1 <= answers[16][3] <= 2
    assert service.redis.execute_command("CL.THROTTLE", "resp:6", 15, 30, 60, 0)[0] == 0
    for numbers, message in (
        ((15, 0, 60), "count_per_period: expected .* ≥ 1, got 0"),
        ((-1, 1, 60), "max_burst: .* ≥ 0, got -1"),
    ):
        with pytest.raises(redis.ResponseError, match=message):
            service.redis.execute_command("CL.THROTTLE", "resp:6", *numbers)


def test_any_bytes_are_a_key(service):
    """Keys that are not UTF-8, or hold line ends, are distinguished."""
    for key in (b"\xff\xfe", b"\xff", b"a\r\nb", b"", b"x" * 3000, "ключ".encode()):
        assert service.hit("checkout", key)[2] == 2, key
        assert service.hit("checkout", key)[2] == 1, key


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("LK.HIT",), r"wrong number of arguments for 'LK.HIT'; usage: LK.HIT limit key \[cost\] \[TIER tier\]"),
        (("lk.settle", "a"), "wrong number of arguments for 'lk.settle'; usage: LK.SETTLE token used"),
        (("LK.HIT", "checkout"), "wrong number of arguments"),
        (("LK.HIT", "checkout", "a", "x"), "cost: expected a whole number"),
        (("LK.HIT", "checkout", "a", "-1"), "cost: expected a whole number"),
        (("LK.HIT", "checkout", "a", 1, "TIER"), "expected TIER with a value"),
        (("LK.HIT", "checkout", "a", "TIER", "pro"), "limit 'checkout' has no tiers"),
        (("LK.RESERVE", "tokens", "a"), "wrong number of arguments"),
        (("LK.RESERVE", "tokens", "a", 1, "MAXWAIT", "x"), "MAXWAIT: expected a whole number"),
        (("LK.SETTLE", "forged", 1), "not a token, or not issued with this service's secret"),
        (("LK.RESET", "nope", "a"), "unknown limit"),
        (("CL.THROTTLE", "a", 1, 1), "wrong number of arguments"),
        (("SELECT", 1), "out of range"),
        (("FLUSHALL",), "unknown command 'FLUSHALL'; this is the limitkeeper service, not Redis: use LK.HIT limit key"),
        (("GET", "a"), "unknown command 'GET'; this is the limitkeeper service"),
        (("EXEC",), "EXEC without MULTI"),
        (("DISCARD",), "DISCARD without MULTI"),
        (("CLIENT", "KILL"), "unknown subcommand"),
    ],
)
def test_an_error_names_what_is_wrong(service, command, message):
    """And the connection stays open."""
    with pytest.raises(redis.ResponseError, match=message):
        service.redis.execute_command(*command)
    assert service.redis.ping()


def test_ordinary_clients_connect(service):
    """redis-py in both protocol versions, with a name; the first commands of redis-cli and redis-benchmark."""
    for protocol in (2, 3):
        client = redis.Redis(port=service.resp, protocol=protocol, client_name="test", db=0)
        assert client.ping()
        assert client.execute_command("LK.PEEK", "checkout", "resp:7")[0] == 1
        assert client.client_getname() in ("test", b"test")
        client.close()
    assert service.redis.info()["server_name"] == "limitkeeper"
    assert service.redis.execute_command("COMMAND", "DOCS") in ([], {})
    assert service.redis.command_count() > 10
    assert service.redis.execute_command("CONFIG", "GET", "save") in ([], {})
    assert service.redis.echo("hello") == b"hello"


def test_inline_commands(service):
    """Typed by hand."""
    with service.raw(service.resp) as sock:
        sock.sendall(b"LK.PEEK checkout resp:8\r\nQUIT\r\n")
        assert read_all(sock) == b"*5\r\n:1\r\n:3\r\n:3\r\n:0\r\n:0\r\n+OK\r\n"


def test_a_token_is_required_where_one_is_set(policy_file):
    """By AUTH with or without a user, or in HELLO; before that nothing else is answered."""
    token = "0123456789abcdef"
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": token}) as service:
        for options in ({"password": token}, {"password": token, "username": "any"}, {"password": token, "protocol": 3}):
            client = redis.Redis(port=service.resp, **options)
            assert client.execute_command("LK.PEEK", "checkout", "a")[0] == 1
            client.close()
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=service.resp, password="0123456789abcdeX", retry=Retry(NoBackoff(), 0)).ping()
        with service.raw(service.resp) as sock:
            sock.sendall(b"LK.HIT checkout a\r\nINFO\r\nHELLO 3\r\nAUTH wrong\r\nQUIT\r\n")
            assert read_all(sock).count(b"-") == 4 + 1  # one more in WRONGPASS's words


# Hostile clients


@pytest.mark.parametrize("data", [b"*1000000000\r\n", b"*1\r\n:1\r\n", b"*1\r\n$99999999\r\n", b"x" * 20_000], ids=range(4))
def test_malformed_input_closes_that_connection_only(service, data):
    """With an error; others continue."""
    with service.raw(service.resp) as other, service.raw(service.resp) as sock:
        other.sendall(b"PING\r\n")
        assert other.recv(100) == b"+PONG\r\n"
        sock.sendall(b"PING\r\n")
        sock.recv(100)
        sock.sendall(data)
        assert read_all(sock).startswith(b"-ERR Protocol error")
        other.sendall(b"PING\r\n")
        assert other.recv(100) == b"+PONG\r\n"


def test_a_web_page_can_not_send_commands(service):
    """An HTTP request to this port is closed at its first line, so that its body is never read as commands."""
    before = service.redis.execute_command("LK.PEEK", "checkout", "resp:9")[2]
    with service.raw(service.resp) as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: a\r\n\r\nLK.HIT checkout resp:9\r\n")
        assert read_all(sock).count(b"\r\n") == 1
    assert service.redis.execute_command("LK.PEEK", "checkout", "resp:9")[2] == before


def test_random_bytes_crash_nothing(service):
    """Changed commands on hundreds of connections: the service keeps running, and closes what it opened."""
    from test_http import descriptors

    chance = random.Random(12)
    whole = b"*4\r\n$6\r\nLK.HIT\r\n$6\r\nplenty\r\n$4\r\nfuzz\r\n$1\r\n1\r\n" * 3
    before = descriptors(service)
    for _ in range(scaled(300)):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            place = chance.randrange(len(data))
            data[place : place + chance.randrange(3)] = chance.randbytes(chance.randrange(4))
        with service.raw(service.resp) as sock:
            sock.sendall(data)
            sock.shutdown(1)
            read_all(sock)
    assert service.redis.ping()
    assert descriptors(service) <= before + 1


def test_a_client_that_does_not_read_is_not_read_from(service):
    """The replies that wait for it are bounded; others are answered meanwhile."""
    with service.raw(service.resp) as sock:
        sock.setblocking(False)
        sent = 0
        command = b"INFO\r\n" * 1000
        for _ in range(20_000):
            try:
                sent += sock.send(command)
            except BlockingIOError:
                break
        else:
            pytest.fail(f"the service read {sent} bytes of commands whose replies are not read")
        assert service.redis.ping()
    with open(f"/proc/{service.process.pid}/status") as status:
        resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    assert resident < 400_000  # KiB


def test_a_long_pipeline_does_not_stop_the_connection(service):
    """Thousands of commands are answered in several iterations of the loop, and the connection is read again afterwards."""
    for _ in range(2):
        pipe = service.redis.pipeline(transaction=False)
        for _ in range(3000):
            pipe.execute_command("LK.PEEK", "checkout", "resp:10")
        assert Counter(one[0] for one in pipe.execute()) == {1: 3000}


@pytest.mark.parametrize("held", [b"$60000\r\n" + b"\r\n" * 29_000, b"$1\r\nx\r\n" * 900 + b"$900\r\n", b"$1\r\nx\r\n" * 700])
def test_the_work_of_a_byte_does_not_depend_on_what_arrived_before_it(held):
    """An unfinished command is not parsed again with every packet: few calls and few allocated bytes for each."""
    gate = Gate(Policy.of(name="test", limits=[]))
    connection = RespConnection(Commands(Application(gate, secret=b"x" * 32)), Listener(Settings(), None, b""))
    connection.data_received(b"*1024\r\n" + held)
    more = b"$1\r\ny\r\n" * 20
    calls = allocated = 0

    def count(*_):
        nonlocal calls
        calls += 1

    tracemalloc.start()
    sys.setprofile(count)
    try:
        for place in range(len(more)):
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            connection.data_received(more[place : place + 1])
            allocated += tracemalloc.get_traced_memory()[1] - before
    finally:
        sys.setprofile(None)
        tracemalloc.stop()
    assert connection.partial
    assert not connection.waiting
    assert calls < 60 * len(more)
    assert allocated < 2000 * len(more)


def test_commands_before_authentication_are_small(policy_file):
    """At most 16 KiB and 10 arguments, refused at the header; a client that has authenticated may send more."""
    large = [b"*2\r\n$4\r\nAUTH\r\n$16384\r\n", b"*11\r\n", b"AUTH" + b" x" * 10 + b"\r\n", b"x" * 16_385]
    with Running(policy=policy_file, environment={"LIMITKEEPER_TOKEN": "t" * 20}) as running:
        for data in large:
            with running.raw(running.resp) as sock:
                sock.sendall(data)
                assert read_all(sock).startswith(b"-ERR Protocol error: "), data[:30]
        assert running.redis.echo("y" * 20_000) == b"y" * 20_000
        assert running.redis.execute_command("CONFIG", *["x"] * 20) == []


def test_no_name_of_a_command_is_taken_for_an_error(service):
    """A command of one zero byte is unknown, and the connection stays open."""
    for name in (b"\0", b"malformed", b"MALFORMED"):
        with service.raw(service.resp) as sock:
            sock.sendall(b"*1\r\n$%d\r\n%b\r\nPING\r\nQUIT\r\n" % (len(name), name))
            first, *others = read_all(sock).splitlines()
        assert first.startswith(b"-ERR unknown command"), name
        assert others == [b"+PONG", b"+OK"]
