"""Tokens with scopes: their permissions, their limits, over HTTP and the Redis protocol."""

from __future__ import annotations

import ssl
from math import inf
from types import SimpleNamespace

import httpx
import pytest
import redis
from running import Running

from limitkeeper import SlidingWindowLog
from limitkeeper.algorithms.claim import Claim, NamedLimit
from limitkeeper.errors import ConfigurationError
from limitkeeper.service.access import Access, Token
from limitkeeper.service.app import RequestError
from limitkeeper.service.client import Client
from limitkeeper.service.reservation_tokens import ReservationTokens
from limitkeeper.service.scoped import ScopedApplication
from limitkeeper.service.settings import load

GATEWAY, VIEWER, ADMIN, SHOP = (f"{name}-0123456789abcdef" for name in ("gateway", "viewer", "admin", "shop"))
TOKENS = f"""
[[token]]
name = "gateway"
token = "{GATEWAY}"
scopes = ["check"]
[[token]]
name = "viewer"
token = "{VIEWER}"
scopes = ["inspect"]
[[token]]
name = "admin"
token = "{ADMIN}"
scopes = ["check", "inspect", "operate"]
[[token]]
name = "shop"
token = "{SHOP}"
scopes = ["check", "inspect", "operate"]
limits = ["check*", "plenty"]
"""


@pytest.fixture(scope="module")
def scoped(policy_file, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokens.toml"
    path.write_text(TOKENS)
    with Running("--tokens", str(path), policy=policy_file) as running:
        yield running


def send(service, token, method, path, /, admin=False, **fields):
    base = service.admin if admin else f"http://127.0.0.1:{service.http}"
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.request(method, base + path, headers=headers, json=fields or None, timeout=60, verify=TLS)


#: Made once: httpx would read the certificates of all authorities for every client.
TLS = ssl.create_default_context()
HIT = {"limit": "checkout", "key": "a"}


def test_each_scope_opens_its_own_routes(scoped):
    """Without a token 401, without the scope 403."""
    calls = {
        "check": ("POST", "/v1/check", {"limit": "plenty", "key": "a"}),
        "inspect": ("GET", "/v1/limits/plenty/a", {}),
        "operate": ("POST", "/v1/reset", {"limit": "plenty", "key": "a"}),
    }
    allowed = {GATEWAY: {"check"}, VIEWER: {"inspect"}, ADMIN: set(calls), SHOP: set(calls)}
    for scope, (method, path, fields) in calls.items():
        assert send(scoped, None, method, path, **fields).status_code == 401
        assert send(scoped, "x" * 20, method, path, **fields).status_code == 401
        for token, scopes in allowed.items():
            assert send(scoped, token, method, path, **fields).status_code == (200 if scope in scopes else 403), (scope, token)
    assert send(scoped, None, "GET", "/healthz").status_code == 200


def test_a_token_of_some_limits_reaches_no_others(scoped):
    """By name, in a batch, in a list; nor by a request that all rules match."""
    assert send(scoped, SHOP, "POST", "/v1/check", limit="plenty", key="b").status_code == 200
    for path in ("/v1/check", "/v1/reserve", "/v1/refund"):
        found = send(scoped, SHOP, "POST", path, limit="tokens", key="b")
        assert (found.status_code, found.json()["error"]["code"]) == (403, "forbidden"), path
    assert send(scoped, SHOP, "POST", "/v1/reset", limit="tokens", key="b").status_code == 403
    assert send(scoped, SHOP, "POST", "/v1/check", checks=[HIT, {"limit": "tokens", "key": "b"}]).status_code == 403
    assert send(scoped, SHOP, "POST", "/v1/check", request={"method": "GET", "path": "/"}).status_code == 403
    assert [one["name"] for one in send(scoped, SHOP, "GET", "/v1/limits").json()["limits"]] == ["checkout", "plenty"]
    assert [one["name"] for one in send(scoped, SHOP, "GET", "/v1/status", admin=True).json()["rules"]] == ["checkout", "plenty"]
    assert len(send(scoped, SHOP, "GET", "/v1/policy", admin=True).json()["limits"]) == 2
    for method, path in (("POST", "/v1/reload"), ("POST", "/v1/try"), ("POST", "/v1/explain"), ("GET", "/metrics")):
        assert send(scoped, SHOP, method, path, admin=True, line="GET /").status_code == 403, path
    assert send(scoped, SHOP, "PUT", "/v1/overrides/tokens/b", admin=True, limit="blocked").status_code == 403
    assert send(scoped, SHOP, "PUT", "/v1/overrides/plenty/c", admin=True, limit="blocked").status_code == 200
    assert send(scoped, SHOP, "DELETE", "/v1/overrides/plenty/c", admin=True).json() == {"removed": True}


@pytest.mark.parametrize("limit", ["checkouts", "nothing"])
def test_a_mistake_names_no_limits_that_a_token_may_not_use(scoped, limit):
    """Neither where the unknown name is one of the token's pattern, nor elsewhere; on every port."""
    override, key = f"/v1/overrides/{limit}/b", {"limit": limit, "key": "b"}
    found = [send(scoped, SHOP, method, override, admin=True, limit="blocked").text for method in ("GET", "PUT", "DELETE")]
    found += [send(scoped, SHOP, "POST", path, admin=path == "/v1/reset", **key).text for path in ("/v1/check", "/v1/reset")]
    found += [send(scoped, SHOP, "GET", f"/v1/limits/{limit}/b", admin=True).text]
    assert [one for one in found if "dark" in one or "tokens" in one] == []


@pytest.mark.parametrize("kind", ["http", "redis"])
def test_the_client_shows_a_blocked_key_and_a_missing_scope(scoped, kind):
    """Inspecting a blocked key is a refusal for good; a token without the scope is a mistake of the configuration."""
    url = f"http://127.0.0.1:{scoped.http}" if kind == "http" else f"redis://127.0.0.1:{scoped.resp}"
    assert send(scoped, ADMIN, "PUT", "/v1/overrides/plenty/banned", admin=True, limit="blocked").status_code == 200
    client = Client(url, token=ADMIN, timeout=60)
    shown = client.inspect("plenty", "banned")
    assert (shown.allowed, shown.limit, shown.remaining, shown.retry_after) == (False, 0, 0, inf)
    assert client.inspect("plenty", "other").allowed
    client.close()
    assert send(scoped, ADMIN, "DELETE", "/v1/overrides/plenty/banned", admin=True).json() == {"removed": True}
    viewer = Client(url, token=VIEWER, timeout=60)
    with pytest.raises(ConfigurationError, match="lacks the scope 'check'"):
        viewer.check("plenty", "a")
    viewer.close()


@pytest.mark.parametrize("token", [GATEWAY, VIEWER, ADMIN, SHOP])
def test_no_scope_allows_the_commands_of_the_store(scoped, token):
    """LK.STORE reaches every key, so it needs the admin token, also on loopback, in any case of letters and after MULTI."""
    with scoped.raw(scoped.resp) as sock:
        for line, reply in (
            (b"AUTH " + token.encode(), b"+OK"),
            (b"LK.STORE.TIME x", b"-NOPERM"),
            (b"lk.store.hit x", b"-NOPERM"),
            (b"MULTI", b"+OK"),
            (b"LK.STORE.RESET x", b"+QUEUED"),
            (b"EXEC", b"*1\r\n-NOPERM"),
        ):
            sock.sendall(line + b"\r\n")
            assert sock.recv(4096).startswith(reply), line


def test_the_admin_token_and_a_lesser_one_follow_each_other(policy_file, tmp_path):
    """A connection has the permissions of the last token that it presented."""
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    with (
        Running("--tokens", str(path), "--admin-token", "store-0123456789abcdef", policy=policy_file) as running,
        running.raw(running.resp) as sock,
    ):
        for token, reply in ((VIEWER, b"-NOPERM"), ("store-0123456789abcdef", b"-PROTOCOL"), (VIEWER, b"-NOPERM")):
            sock.sendall(b"AUTH " + token.encode() + b"\r\n")
            assert sock.recv(4096) == b"+OK\r\n"
            sock.sendall(b"LK.STORE.TIME x\r\n")
            assert sock.recv(4096).startswith(reply)


def test_gateways_present_theirs_in_a_header_of_its_own(scoped):
    """Authorization belongs to the client's request."""
    url = f"http://127.0.0.1:{scoped.http}/auth"
    fields = {"X-Forwarded-Uri": "/plenty", "Authorization": f"Bearer {GATEWAY}"}
    assert httpx.get(url, timeout=60, headers=fields).status_code == 401
    assert httpx.get(url, timeout=60, headers={**fields, "X-Limitkeeper-Token": GATEWAY}).status_code == 200
    assert httpx.get(url, timeout=60, headers={**fields, "X-Limitkeeper-Token": SHOP}).status_code == 403


def test_the_redis_protocol_has_the_same_scopes(scoped):
    """A connection has those of the last token that it presented."""

    def ask(token, *command):
        client = redis.Redis(port=scoped.resp, password=token, socket_timeout=60)
        try:
            return client.execute_command(*command)
        except redis.ResponseError as error:
            return str(error)
        finally:
            client.close()

    assert ask(GATEWAY, "LK.HIT", "plenty", "r")[0] == 1
    assert "lacks the scope 'operate'" in ask(GATEWAY, "LK.RESET", "plenty", "r")
    assert "lacks the scope 'check'" in ask(VIEWER, "LK.HIT", "plenty", "r")
    assert ask(VIEWER, "LK.PEEK", "plenty", "r")[0] == 1
    assert ask(ADMIN, "LK.RESET", "plenty", "r") == 1
    assert "restricted to the limits check*, plenty" in ask(SHOP, "LK.HIT", "tokens", "r")
    assert "restricted to the limits" in ask(SHOP, "CL.THROTTLE", "a", 1, 1, 60)
    with scoped.raw(scoped.resp) as sock:
        for line, reply in (
            (b"LK.HIT plenty r", b"-NOAUTH"),
            (b"AUTH wrong", b"-WRONGPASS"),
            (b"AUTH " + VIEWER.encode(), b"+OK"),
        ):
            sock.sendall(line + b"\r\n")
            assert sock.recv(4096).startswith(reply)
        sock.sendall(b"LK.HIT plenty r\r\n")
        assert b"lacks the scope" in sock.recv(4096)
        sock.sendall(b"AUTH " + GATEWAY.encode() + b"\r\n")
        assert sock.recv(4096) == b"+OK\r\n"
        sock.sendall(b"LK.HIT plenty r\r\n")
        assert sock.recv(4096).startswith(b"*5\r\n:1\r\n")


def test_a_restricted_token_settles_no_reservation_of_another_limit(scoped):
    """Also with another holder's reservation token, over both protocols; a reservation of its own limits it settles."""
    made = send(scoped, ADMIN, "POST", "/v1/reserve", limit="tokens", key="r", cost=5).json()["token"]
    refused = send(scoped, SHOP, "POST", "/v1/settle", token=made, used=1)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert send(scoped, SHOP, "POST", "/v1/refund", token=made).status_code == 403
    client = redis.Redis(port=scoped.resp, password=SHOP, socket_timeout=60)
    with pytest.raises(redis.ResponseError, match="it may not use 'tokens'"):
        client.execute_command("LK.SETTLE", made, 1)
    client.close()
    assert send(scoped, ADMIN, "POST", "/v1/settle", token=made, used=1).json() == {"settled": True}
    own = send(scoped, SHOP, "POST", "/v1/reserve", limit="plenty", key="r", cost=5).json()["token"]
    assert send(scoped, SHOP, "POST", "/v1/settle", token=own, used=1).json() == {"settled": True}


def test_the_admin_port_has_them_too(scoped):
    """Viewers see hashes of keys and change nothing."""
    assert send(scoped, None, "GET", "/v1/status", admin=True).status_code == 401
    assert send(scoped, None, "GET", "/metrics", admin=True).status_code == 401
    assert send(scoped, GATEWAY, "GET", "/v1/status", admin=True).status_code == 403
    assert send(scoped, VIEWER, "GET", "/v1/status", admin=True).status_code == 200
    assert send(scoped, VIEWER, "GET", "/v1/status?keys=shown", admin=True).status_code == 403
    assert send(scoped, VIEWER, "PUT", "/v1/overrides/plenty/u", admin=True, limit="blocked").status_code == 403
    assert send(scoped, ADMIN, "PUT", "/v1/overrides/plenty/u", admin=True, limit="blocked", reason="abuse").status_code == 200
    (seen,) = send(scoped, VIEWER, "GET", "/v1/overrides", admin=True).json()["overrides"]
    (known,) = send(scoped, ADMIN, "GET", "/v1/overrides", admin=True).json()["overrides"]
    assert (known["key"], known["by"], known["reason"]) == ("u", "admin", "abuse")
    assert len(seen["key"]) == 12
    entries = send(scoped, ADMIN, "GET", "/v1/audit", admin=True).json()["entries"]
    assert (entries[0]["by"], entries[0]["action"], entries[0]["key"]) == ("admin", "override", "u")
    assert send(scoped, VIEWER, "GET", "/v1/audit", admin=True).json()["entries"][0]["key"] == seen["key"]
    assert send(scoped, ADMIN, "DELETE", "/v1/overrides/plenty/u", admin=True).status_code == 200
    line = "GET /orders ip=203.0.113.9"
    assert send(scoped, ADMIN, "POST", "/v1/try", admin=True, line=line).status_code == 200
    entries = [send(scoped, token, "GET", "/v1/audit", admin=True).json()["entries"][0] for token in (ADMIN, VIEWER)]
    assert (entries[0]["request"], len(entries[1]["request"])) == (line, 12)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected tables \[\[token\]\]"),
        ("token = 1", r"expected tables \[\[token\]\]"),
        ("[[token]]\nname = 'a'", "token 1: expected the fields name, token, scopes, limits"),
        ("[[token]]\nname = 'a'\ntoken = 'short'\nscopes = ['check']", "token 1: token: expected at least 16 printable"),
        (f"[[token]]\nname = 'a'\ntoken = '{ADMIN}'\nscopes = ['root']", "scopes: expected a list of check, inspect, operate"),
        (f"[[token]]\nname = 'a'\ntoken = '{ADMIN}'\nscopes = []", "scopes: expected a list"),
        (f"[[token]]\nname = 'a'\ntoken = '{ADMIN}'\nscopes = ['check']\nlimits = []", "limits: expected a list of names"),
        (f"[[token]]\nname = ''\ntoken = '{ADMIN}'\nscopes = ['check']", "name: expected a string"),
        (2 * f"[[token]]\nname = 'a'\ntoken = '{ADMIN}'\nscopes = ['check']\n", "name: 'a' is there twice"),
        ("[[token", "can't read the tokens"),
        ("a = " + "[" * 5000, "can't read the tokens"),
        ("[[token]]\nname = 'a'\ntoken = 12345678901234567890\nscopes = ['check']", "token: expected a string, got int"),
    ],
)
def test_mistakes_in_the_file_are_found_at_the_start(tmp_path, text, message):
    """With the number of the token, never with its text."""
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=message) as caught:
        load({"tokens": str(path)}, {})
    assert ADMIN not in str(caught.value)


def test_a_token_of_the_file_may_have_the_name_of_the_other(policy_file, tmp_path):
    """`--token` keeps every limit, whatever the names of the file's tokens."""
    path = tmp_path / "tokens.toml"
    path.write_text(f'[[token]]\nname = "token"\ntoken = "{SHOP}"\nscopes = ["check"]\nlimits = ["plenty"]\n')
    with Running("--tokens", str(path), policy=policy_file, environment={"LIMITKEEPER_TOKEN": ADMIN}) as service:
        assert send(service, ADMIN, "POST", "/v1/check", limit="checkout", key="a").status_code == 200
        assert service.hit("checkout", "a")[0] == 1
        assert send(service, SHOP, "POST", "/v1/check", limit="checkout", key="a").status_code == 403


def test_a_token_file_is_enough_beyond_loopback(tmp_path):
    """And `--token` counts beside it, with every scope."""
    path = tmp_path / "tokens.toml"
    path.write_text(TOKENS)
    settings = load({"tokens": str(path), "http": "0.0.0.0:0", "token": "0123456789abcdef"}, {})
    access = Access(settings)
    assert [one.name for one in access.tokens] == ["token", "gateway", "viewer", "admin", "shop"]
    assert access.find(b"0123456789abcdef").scopes == {"check", "inspect", "operate"}
    assert access.find(None) is access.find(b"") is None


def test_a_restricted_token_settles_the_places_of_its_own_limit():
    """A rule with `concurrent` alone keeps its state under another name than its own; its token is one of the rule."""
    places = Claim(NamedLimit("served", "busy concurrent", SlidingWindowLog("2/min")), "a", 1)
    app = SimpleNamespace(_tokens=ReservationTokens(b"secret" * 8, 60_000_000))
    made = app._tokens.issue([places], None)
    own, other = (ScopedApplication(app, Token(name, b"", limits=(name,))) for name in ("busy", "other"))
    assert own.charged(made).claims[0].key == "a"
    with pytest.raises(RequestError, match="it may not use 'busy'"):
        other.charged(made)
