"""`limitkeeper policy export`: real gateways accept the configuration, and forward the limited requests to the service."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gateway_servers import Client, application, check_command, each_gateway, environment, gateway, in_folder, need
from running import Running

from limitkeeper import MemoryStore
from limitkeeper.cli import main
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.service.gateway_config import WRITERS, Gateway, cautions, limited_paths
from servers.valkey import free_port

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "service" / "limitkeeper.yaml"
GATEWAYS = ("nginx", "caddy", "envoy")
pytestmark = pytest.mark.server

POLICY = """
name: shop
identify:
  user: {header: X-User}
  ip: {client_ip: {trusted_proxies: [127.0.0.1]}}
limits:
  - {name: checkout, match: POST /checkout, key: user | ip, limit: fixed window 3/h align first}
  - {name: items, match: ["/orders/{id}/items", "/files/**"], limit: fixed window 1/h align first}
"""
#: Spellings of paths, some of which applications route as others.
SPELLINGS = re.findall(
    r"\S+",
    """
/orders/7/items /orders/7/items/ /ORDERS/7/items /orders//7/items /orders/7/items?x=1 /orders/7/%69tems /orders/7/%2569tems
/orders/7/items;v=1 /orders/7/x/../items /orders/7/./items //orders/7/items /files /files/ /files/a/b /files/../index
/files/..%2findex /x/..%2ffiles/a /x/../files/a /Files/A.txt /filesystem /index /index.html /index/?next=/files/a / /orders/7
/orders/7/items/more /orders/items /a.b/c~d/@e/f-g /.hidden /x/%2e%2e/files/a /x%2ffiles /%66iles/a /files%3Fx /orders/7/items%20
""",
)


def written(name: str, policy: Policy, ports: dict[str, int], fail_open: bool = True) -> str:
    addresses = {one: f"127.0.0.1:{port}" for one, port in ports.items()}
    return WRITERS[name](Gateway.of(policy, **addresses, fail_open=fail_open))


@pytest.fixture(scope="module")
def app() -> Iterator[int]:
    with application() as port:
        yield port


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    file = tmp_path_factory.mktemp("exported") / "limitkeeper.yaml"
    file.write_text(POLICY)
    with Running(policy=file) as running:
        yield running


@pytest.fixture(scope="module", params=[pytest.param(name, marks=need(name)) for name in GATEWAYS])
def exported(
    request: pytest.FixtureRequest, service: Running, app: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Client]]:
    """The name of a gateway, and a client of it, running as exported."""
    name, ports = request.param, {"service": service.http, "application": app, "listen": free_port()}
    text = written(name, Policy.read(POLICY), ports)
    with gateway(name, tmp_path_factory.mktemp(name), text, ports["listen"]) as client:
        yield name, client


def test_200_then_429_with_all_fields(exported):
    """A user's requests are counted, others' and other paths are not; body and headers reach the application."""
    name, client = exported
    answers = [client.send("POST", "/checkout?x=%41", "paid", X_User=name, X_Other="1") for _ in range(4)]
    assert [one.status for one in answers] == [200, 200, 200, 429]
    assert [one.headers["X-RateLimit-Remaining"] for one in answers] == ["2", "1", "0", "0"]
    assert answers[0].headers["RateLimit"].startswith('"checkout";r=2;t=')
    assert answers[0].headers["RateLimit-Policy"] == answers[-1].headers["RateLimit-Policy"]
    assert "Retry-After" not in answers[0].headers
    refused = answers[-1]
    assert 0 < int(refused.headers["Retry-After"]) <= 3600
    assert refused.headers["RateLimit"].startswith('"checkout";r=0;t=')
    assert refused.headers["Cache-Control"] == "no-store"
    assert json.loads(refused.content)["code"] == "RATE_LIMITED"
    seen = json.loads(answers[0].content)
    assert (seen["path"], seen["body"], seen["headers"]["x-other"]) == ("/checkout?x=%41", "paid", "1")
    assert client.send("POST", "/checkout", X_User=f"not {name}").status == 200
    assert client.send("GET", "/checkout", X_User=name).status == 200
    assert "RateLimit" not in client.send("GET", "/index").headers
    assert client.send("GET", "/forbidden").status == 403


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
def test_the_clients_address_is_the_gateways(exported, service):
    """Without a user the address is the key: that of the connection, whatever X-Forwarded-For a client sends."""
    name, client = exported
    other = Client(client.port, f"127.0.0.{10 + GATEWAYS.index(name)}")
    spoofed = [other.send("POST", "/checkout", X_Forwarded_For=f"192.0.2.{one}").status for one in range(4)]
    assert spoofed == [200, 200, 200, 429]
    assert service.hit("checkout", f"ip:{other.source}")[0] == 0


def test_a_second_line_of_a_header_makes_no_other_client(exported, service):
    """The application gets both lines and takes one of them, so whatever the second says, it opens no new bucket."""
    _, client = exported
    service.client.post("/v1/reset", json={"limit": "checkout", "key": "user:several values"})
    found = []
    for number in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        connection.putrequest("POST", "/checkout")
        for value in ("known", str(number)):
            connection.putheader("X-User", value)
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        found.append(connection.getresponse().status)
        connection.close()
    assert found == [200, 200, 200, 429, 429]


@pytest.mark.parametrize("upgrade", [(), ("Upgrade",)])
def test_a_header_that_is_counted_reaches_the_application(exported, service, upgrade):
    """A client can name a header in Connection, so that a proxy does not pass it on: then it is not counted either."""
    name, client = exported
    service.client.post("/v1/reset", json={"limit": "checkout", "key": "ip:127.0.0.1"})
    for number in range(5):
        connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
        headers = {"X-User": f"{name} names it {number}", "Connection": "X-User", **dict.fromkeys(upgrade, "x")}
        connection.request("POST", "/checkout", headers=headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if response.status == 200 and "x-user" not in json.loads(content)["headers"]:
            assert number < 3, "counted by its address"
        else:
            assert response.status in (200, 400, 429)


def test_every_spelling_of_a_limited_path_is_checked(exported, service):
    """The gateway refuses what the policy refuses: no spelling of a path passes without a check."""
    _, client = exported
    service.post("/v1/check", request={"method": "GET", "path": "/files"})
    for path in SPELLINGS:
        allowed = service.post("/v1/check", request={"method": "GET", "path": path}).json()["allowed"]
        assert client.send("GET", path).status in ((200, 400) if allowed else (429, 400)), path


@each_gateway(*GATEWAYS)
def test_a_policy_of_hundreds_of_paths_and_servers_with_names(name, tmp_path, app):
    """nginx reads 4095 bytes as one word, and Envoy compiles only small patterns and looks up names only where it is told to."""
    rule = "{{name: r{0}, match: '/api/v1/customers/{{customer}}/orders{0}', limit: fixed window 1/h align first}}"
    text = "\n  - ".join(["name: many\nlimits:", *(rule.format(i) for i in range(300))])
    file = tmp_path / "many.yaml"
    file.write_text(text)
    with Running(policy=file) as running:
        ports = {"service": f"localhost:{running.http}", "application": f"localhost:{app}"}
        listen = free_port()
        printed = WRITERS[name](Gateway.of(Policy.read(text), **ports, listen=f"127.0.0.1:{listen}"))
        with gateway(name, tmp_path, printed, listen) as client:
            for path, statuses in {"orders0": [200, 429], "orders299": [200, 429], "orders300": [200, 200]}.items():
                assert client.statuses(2, "GET", f"/api/v1/customers/7/{path}") == statuses


COSTS = """
name: shop
identify: {ip: {client_ip: {trusted_proxies: [127.0.0.1]}}}
limits:
  - {name: work, match: /work, limit: fixed window 3/h align first, cost: {header: X-Cost, max: 3}}
"""


@each_gateway(*GATEWAYS)
def test_a_header_that_the_client_has_not_sent_is_absent(name, tmp_path, app):
    """Caddy sends empty fields in the place of missing ones: such a cost is the default, and such a request is from no page."""
    file = tmp_path / "costs.yaml"
    file.write_text(COSTS)
    with Running(policy=file) as running:
        ports = {"service": running.http, "application": app, "listen": free_port()}
        with gateway(name, tmp_path, written(name, Policy.read(COSTS), ports), ports["listen"]) as client:
            answers = [client.send("GET", "/work", **more) for more in ({}, {}, {"X_Cost": "2"}, {"X_Cost": "1"}, {})]
            refused = client.send("GET", "/work?deny=403")
    assert [one.status for one in answers] == [200, 200, 429, 200, 429]
    assert refused.status == 429
    assert "Access-Control-Expose-Headers" not in refused.headers


WAITS = """
name: shop
identify: {ip: {client_ip: {trusted_proxies: [127.0.0.1]}}}
limits:
  - {name: slow, match: /slow, limit: token bucket 2/s burst 1, on_refusal: wait up to 5s}
"""


@each_gateway(*GATEWAYS)
def test_a_request_that_waits_passes_no_earlier_than_its_rule_admits_it(name, tmp_path, app):
    """A gateway that gave up earlier would take the service for late, and let the requests pass."""
    file = tmp_path / "waits.yaml"
    file.write_text(WAITS)
    with Running(policy=file) as running:
        ports = {"service": running.http, "application": app, "listen": free_port()}
        text = written(name, Policy.read(WAITS), ports)
        with gateway(name, tmp_path, text, ports["listen"], patient=False) as client:
            began = time.monotonic()
            with ThreadPoolExecutor(3) as threads:
                statuses = [one.status for one in threads.map(lambda _: client.send("GET", "/slow"), range(3))]
            took = time.monotonic() - began
    assert (statuses, took >= 1) == ([200] * 3, True)


@pytest.mark.parametrize(
    ("fields", "times"),
    [
        ({}, ("250ms", "0.25s")),
        ({"budget": "1.5s"}, ("1650ms", "1.65s")),
        ({"on_refusal": "wait up to 1min"}, ("60250ms", "60.25s")),
        ({"on_refusal": "wait up to 12.3456s", "budget": "345.6us"}, ("12496ms", "12.496s")),
    ],
)
def test_how_long_a_gateway_waits_for_the_service(fields, times):
    """150 ms, the budget and the longest wait together, in milliseconds that are rounded up."""
    top = {name: fields[name] for name in fields if name == "budget"}
    rule = {"name": "a", "limit": "1/s", **{name: fields[name] for name in fields if name != "budget"}}
    policy = Policy.of(limits=[rule], **top)
    ports = {"service": 7070, "application": 8080, "listen": 8000}
    printed = {name: written(name, policy, ports) for name in GATEWAYS}
    assert f"proxy_read_timeout {times[0]};" in printed["nginx"]
    assert f"response_header_timeout {times[0]}\n" in printed["caddy"]
    assert f"timeout: {times[1]}}}" in printed["envoy"]


@pytest.mark.parametrize("fail_open", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["open", "closed"])
@each_gateway(*GATEWAYS)
def test_when_the_service_is_down(name, fail_open, tmp_path, app):
    """open: requests pass; closed: those that would be checked are refused, others pass."""
    ports = {"service": free_port(), "application": app, "listen": free_port()}
    with gateway(name, tmp_path, written(name, Policy.read(POLICY), ports, fail_open), ports["listen"]) as client:
        statuses = client.statuses(2, "POST", "/checkout", X_User="42")
        assert all(one == 200 if fail_open else one >= 500 for one in statuses)
        assert client.send("GET", "/index").status == 200
        if fail_open:
            assert json.loads(client.send("POST", "/checkout", "paid").content)["body"] == "paid"


#: Policies about every path, with a penalty box, with all kinds of identities, without fields, and without rules.
KINDS = [
    "limits: [{name: all, limit: 5/s}]",
    "identify: {ip: {client_ip: {header: X-Real-IP, trusted_proxies: [127.0.0.1]}}}\npenalty_box: {after: 9/min, for: 60s}\n"
    "limits: [{name: a, match: /a.b/*/c$d, key: ip, limit: 5/s}]",
    "identify: {who: {call: os:getenv}}\nlimits: [{name: a, key: who, match: /a, limit: 1/s}]\nheaders: false\n",
    "identify: {s: {cookie: session}, q: {query: api_key}}\nlimits: [{name: a, key: s | q, match: 'GET /a', limit: 1/s, "
    "cost: {header: X-Cost}}]\nexempt: [{header: {X-Internal: secret}}]\nheaders: {wire: draft-6, reset: delta}\n",
    "limits: []",
]


@each_gateway(*GATEWAYS)
def test_gateways_accept_what_the_command_prints(name, tmp_path, capsys):
    """For the example policy and for policies of all kinds."""
    files = [EXAMPLE]
    for number, text in enumerate(KINDS):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text)
    for file in files:
        assert main(["policy", "export", name, str(file), "--listen", f"127.0.0.1:{free_port()}"]) == 0
        made = tmp_path / f"{name}.yaml"
        made.write_text(in_folder(name, capsys.readouterr().out))
        arguments, variables = check_command(name, tmp_path, made), environment(tmp_path)
        done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, (file, done.stderr)


def test_the_headers_that_a_gateway_forwards():
    """Those of identities, costs and exemptions; all of them where a callback may read any."""
    found = [Gateway.of(Policy.read(text), "h:1", "h:2", "h:3") for text in KINDS]
    answer, some = ("Accept", "Origin"), ("Accept", "Origin", "Cookie", "X-Cost", "X-Internal")
    assert [one.headers for one in found] == [answer, answer, None, some, answer]
    assert [one.address_header for one in found][1] == "X-Real-Ip"
    assert [one.limited is None for one in found] == [True, True, False, False, False]


@pytest.mark.parametrize(("flag", "value"), [("--service", "7070"), ("--listen", "127.0.0.1:0"), ("--application", "off")])
def test_a_wrong_address_is_named(flag, value, capsys):
    """The message has the flag and what was expected."""
    assert main(["policy", "export", "nginx", str(EXAMPLE), flag, value]) == 2
    assert f"{flag}: expected HOST:PORT" in capsys.readouterr().err


def test_envoy_listens_on_addresses_only(capsys):
    """A host name is refused, with the flag and an address that would do."""
    assert main(["policy", "export", "envoy", str(EXAMPLE), "--listen", "localhost:8000"]) == 2
    assert "--listen: Envoy listens on an IP address such as 127.0.0.1, got 'localhost'" in capsys.readouterr().err


def test_an_invalid_policy_is_shown_with_its_place(tmp_path, capsys):
    """As by `policy check`, with the exit code for errors."""
    (tmp_path / "bad.yaml").write_text("limits: [{name: a, limit: 5/fortnight}]")
    assert main(["policy", "export", "nginx", str(tmp_path / "bad.yaml")]) == 1
    assert "bad.yaml:1:" in capsys.readouterr().err


def test_one_address_header():
    """A policy that reads Forwarded can't be exported; the message names the alternative."""
    text = (
        "identify: {ip: {client_ip: {header: Forwarded, trusted_proxies: [127.0.0.1]}}}\nlimits: [{name: a, key: ip, limit: 5/s}]"
    )
    with pytest.raises(ConfigurationError, match="use header: X-Forwarded-For"):
        Gateway.of(Policy.read(text), "h:1", "h:2", "h:3")


def test_a_header_that_gateways_drop():
    """A name with an underscore, which nginx ignores, is an error."""
    text = "identify: {user: {header: X_User}}\nlimits: [{name: a, key: user, limit: 5/s}]"
    with pytest.raises(ConfigurationError, match="letters, digits and '-'"):
        Gateway.of(Policy.read(text), "h:1", "h:2", "h:3")


def test_what_reads_otherwise_behind_a_gateway(tmp_path, capsys):
    """An address that trusts no proxy, and a certificate, are reported beside the configuration."""
    text = "identify: {caller: {certificate: san}}\nlimits: [{name: a, key: caller | ip, limit: 5/s}]"
    (tmp_path / "policy.yaml").write_text(text)
    assert main(["policy", "export", "caddy", str(tmp_path / "policy.yaml")]) == 0
    found = capsys.readouterr().err
    assert "'ip' trusts no proxy" in found
    assert "'caller' reads a client certificate" in found
    assert main(["policy", "export", "caddy", str(EXAMPLE)]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("said", "caution"),
    [
        ("exempt: [{network: 127.0.0.0/8}]", "'ip' trusts no proxy"),
        ("exempt: [{when: {class: a}, limits: [a]}]", "'class' trusts no proxy"),
        ("penalty_box: {after: 9/min, for: 1min}", "'ip' trusts no proxy"),
        ("x: {when: {class: a}}", "'class' trusts no proxy"),
        ("x: {limit: {by: class, a: unlimited, default: 5/s}}", "'class' trusts no proxy"),
        ("x: {key: [user, mail]}", "'mail' reads the body"),
        ("x: {concurrent: 3}", "rule 'a': a gateway does not say when a request ends"),
    ],
)
def test_an_address_that_no_key_names_is_reported_too(said, caution):
    """Behind a gateway whose address is exempt, or of a class without a limit, no client would be limited."""
    identify = "{user: {header: X-User}, class: {network: {a: 127.0.0.0/8}, default: b}, mail: {body: mail}}"
    more, rule = ("", said.removeprefix("x: ")) if said.startswith("x: ") else (said, "{}")
    rule = "{name: a, " + ("" if "key" in rule else "key: user, ") + ("" if "limit:" in rule else "limit: 5/s, ") + rule[1:]
    policy = Policy.read(f"identify: {identify}\n{more}\nlimits: [{rule}]")
    assert [one.startswith(caution) for one in cautions(policy)] == [True]


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("/%7Ebob/**", "/~bob/x"),
        ("/people/me%40home", "/people/me@home"),
        ("/file%20", "/file"),
        ("/a%2Fb/{id}", "/a/b/7"),
        ("/Straße", "/STRASSE"),
        ("/x/%2e/y", "/x/y"),
    ],
)
def test_a_path_that_a_rule_encodes_is_checked(template, path):
    """Rules' paths are normalized as requests' are, so a plain path may match one that is written otherwise."""
    policy = Policy.of(limits=[{"name": "a", "match": template, "limit": "1/h"}])
    assert Gate(policy, store=MemoryStore()).ask(WrittenRequest(path=path)).entries
    assert re.fullmatch("|".join(limited_paths(policy)), path, re.I)


def test_a_message_of_a_function_needs_all_headers():
    """It may read any of them."""
    text = "limits: [{name: a, limit: 5/s, message: {call: 'shop.messages:too_many'}}]"
    assert Gateway.of(Policy.read(text), "h:1", "h:2", "h:3").headers is None


@pytest.mark.parametrize("name", GATEWAYS)
def test_the_names_that_a_policy_gives_to_fields(name):
    """A gateway passes on the fields that the service sends, under the policy's own names."""
    names = "{limit: X-Quota, remaining: X-Quota-Left, reset: X-Quota-Reset, retry_after: X-Wait}"
    policy = Policy.read(f"headers: {{reset: delta, names: {names}}}\nlimits: [{{name: a, limit: 5/s}}]")
    text = written(name, policy, {"service": 1, "application": 2, "listen": 3}).lower()
    assert "x-ratelimit" not in text
    assert all(field in text for field in ("x-quota", "x-quota-left", "x-quota-reset"))
    if name == "nginx":
        assert "auth_request_set $limitkeeper_x_wait $upstream_http_x_wait;" in text
        assert "add_header x-wait $limitkeeper_x_wait always;" in text


@each_gateway(*GATEWAYS)
def test_a_refusal_with_503_is_none_of_the_service(name, tmp_path, app):
    """Where the store has failed and a rule fails closed, a gateway that lets pass when the service is down still refuses. Envoy
    takes a 503 for a failure, so it gets a 429."""
    rule = "{name: busy, match: GET /busy, limit: fixed window 1/h align first, status: 503}"
    policy = POLICY.replace("limits:", f"limits:\n  - {rule}")
    (tmp_path / "limitkeeper.yaml").write_text(policy)
    with Running(policy=tmp_path / "limitkeeper.yaml") as service:
        ports = {"service": service.http, "application": app, "listen": free_port()}
        with gateway(name, tmp_path, written(name, Policy.read(policy), ports), ports["listen"]) as client:
            assert client.statuses(2, "GET", "/busy") == [200, 429 if name == "envoy" else 503]
            assert int(client.send("GET", "/busy").headers["Retry-After"]) > 0
            assert client.statuses(4, "POST", "/checkout", X_User="42") == [200, 200, 200, 429]


@pytest.mark.slow
@each_gateway(*GATEWAYS)
def test_the_token_of_the_service(name, tmp_path, app, monkeypatch):
    """In the line that the configuration has for it; without it, the service's 401 reaches the client."""
    token = "0123456789abcdef"
    (tmp_path / "limitkeeper.yaml").write_text(POLICY)
    with Running(policy=tmp_path / "limitkeeper.yaml", environment={"LIMITKEEPER_TOKEN": token}) as service:
        for given, status in (("", 401), (token, 200)):
            ports = {"service": service.http, "application": app, "listen": free_port()}
            text = written(name, Policy.read(POLICY), ports)
            text = text.replace('X-Limitkeeper-Token ""', f'X-Limitkeeper-Token "{given}"')
            text = text.replace('x-limitkeeper-token, value: ""', f'x-limitkeeper-token, value: "{given}"')
            monkeypatch.setenv("LIMITKEEPER_TOKEN", given)
            with gateway(name, tmp_path, text, ports["listen"]) as client:
                assert client.send("POST", "/checkout", X_User="42", X_Limitkeeper_Token=token).status == status


EDGE = (ROOT / "docs" / "edge.md").read_text()
REAL_IP = re.search(r"```nginx\n(.*?)```", EDGE, re.S)
TRUSTED = re.search(r"```caddyfile\n(.*?)```", EDGE, re.S)


def behind_a_cdn(name: str, text: str) -> str:
    """The configuration with what the page about the edge adds; the CDN's address is 127.0.0.1."""
    assert REAL_IP is not None
    assert TRUSTED is not None
    old, new = {
        "nginx": ("http {\n", "http {\n" + REAL_IP[1]),
        "caddy": ("\tadmin off\n", "\tadmin off\n" + TRUSTED[1]),
        "envoy": ("use_remote_address: true", "xff_num_trusted_hops: 1\n                use_remote_address: true"),
    }[name]
    assert text.count(old) == 1
    return text.replace(old, new.replace("192.0.2.0/24", "127.0.0.1/32"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
@each_gateway(*GATEWAYS)
def test_the_clients_address_behind_a_cdn(name, tmp_path, service, app):
    """From the CDN its header counts, whatever the client has written; from any other address only the connection counts."""
    ports = {"service": service.http, "application": app, "listen": free_port()}
    text = behind_a_cdn(name, written(name, Policy.read(POLICY), ports))
    client, stranger = f"203.0.113.{GATEWAYS.index(name)}", f"127.0.0.{20 + GATEWAYS.index(name)}"
    with gateway(name, tmp_path, text, ports["listen"]) as cdn:
        headers = {"CF_Connecting_IP": client, "X_Forwarded_For": f"6.6.6.6, {client}"}
        assert cdn.send("POST", "/checkout", **headers).status == 200
        assert service.redis.execute_command("LK.PEEK", "checkout", f"ip:{client}")[2] == 2
        if name != "envoy":  # it takes the last entry from any client: only the CDN may reach it
            direct = Client(ports["listen"], stranger)
            assert direct.send("POST", "/checkout", **headers).status == 200
            assert service.redis.execute_command("LK.PEEK", "checkout", f"ip:{stranger}")[2] == 2
