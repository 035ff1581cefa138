"""The caller of a request: addresses, certificates, and the error where gRPC is not installed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_shop import Client, Shop, gate, refusal, rule, serving

from limitkeeper import ConfigurationError, FixedWindow
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.identity.body import BodyField
from limitkeeper.policy.identity.identify import Certificate
from limitkeeper.policy.model import Policy
from limitkeeper.web.grpc import AsyncRateLimitInterceptor, GrpcRequestContext, RateLimitInterceptor, current
from limitkeeper.web.grpc.call import AsyncHandlerContext, HandlerContext, parse_peer


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:55", "192.0.2.1"),
        ("ipv6:[::1]:5", "::1"),
        ("ipv6:%5B2001:db8::7%5D:50051", "2001:db8::7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::1"),
        ("unix:", None),
        ("unix:/tmp/shop.sock", None),
        ("unix-abstract:shop", None),
        ("ipv4:", None),
        ("", None),
        (None, None),
    ],
)
def test_addresses_of_peers(peer, address):
    """The address is the part between kind and port, brackets and encoding undone; a UNIX socket has none."""
    assert parse_peer(peer) == address


def facts(metadata=(), auth=None):
    said = {"invocation_metadata": metadata, "auth_context": auth or {}, "peer": "ipv4:192.0.2.1:55"}
    context = SimpleNamespace(**{name: (lambda value=value: value) for name, value in said.items()})
    return GrpcRequestContext("POST", "/shop.Shop/Pay", context)


def test_an_identity_of_a_body_is_absent():
    """Messages are not read for identities, also where a client's metadata announce a body."""
    assert BodyField("email").of(facts((("content-type", "application/grpc"), ("content-length", "5")))) is None


def test_metadata_of_the_same_name_are_joined():
    """Several values are one header with commas; binary and missing ones are None."""
    known = facts((("x-a", "1"), ("x-b", "2"), ("x-a", "3"), ("x-c-bin", b"\x00")))
    assert [known.header(name) for name in ("x-a", "x-b", "x-c-bin", "x-d")] == ["1, 3", "2", None, None]
    assert facts(None).header("x-a") is None
    assert (known.host(), known.query("x"), known.peer()) == ("", None, "192.0.2.1")


def test_metadata_that_are_repeated_are_one_value():
    """A client that repeats its key is no other client."""
    assert facts((("x-a", "1"),) * 3).header("x-a") == "1"


def test_certificates_are_read_from_the_auth_context():
    """A verified certificate has its subject and alternative names; without one there is None."""
    assert facts().certificate() is None
    assert facts(auth={"transport_security_type": [b"ssl"]}).certificate() is None
    shown = {"x509_common_name": [b"billing"], "x509_subject_alternative_name": [b"spiffe://shop/billing", b"billing.shop"]}
    assert facts(auth=shown).certificate() == {"subject": "CN=billing", "san": ["spiffe://shop/billing", "billing.shop"]}


def test_a_message_has_the_identities_of_its_call():
    """The identity of a caller is determined once, not again for every message."""
    known = facts()
    known.identities["user"] = "ann"
    assert (known.message().identities, known.message().method, known.message().path) == ({"user": "ann"}, "MESSAGE", known.path)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for localhost, and a client's that names a service."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(words: str) -> None:
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)

    openssl("req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=shop-authority")
    for name, san in (("server", "DNS:localhost"), ("billing", "URI:spiffe://shop/billing")):
        openssl(f"req -newkey rsa:2048 -nodes -keyout {name}.key -out {name}.csr -subj /CN={name}")
        (folder / "san").write_text(f"subjectAltName={san}")
        openssl(f"x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile san -out {name}.pem")
    return folder


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_services_are_known_by_their_certificates(kind, certificates, clock):
    """Over mutual TLS the verified certificate names the caller, by its alternative name or by its subject."""
    read = {path.name: path.read_bytes() for path in certificates.iterdir()}
    identify = {"service": Certificate("san"), "subject": Certificate("subject")}
    rules = [rule(FixedWindow("1/h"), key=(("service",),)), rule(FixedWindow("9/h"), "subject", key=(("subject",),))]
    server = grpc.ssl_server_credentials([(read["server.key"], read["server.pem"])], read["ca.pem"], require_client_auth=True)
    client = grpc.ssl_channel_credentials(read["ca.pem"], read["billing.key"], read["billing.pem"])
    shop = Shop()
    with (
        serving(kind, shop, gate(*rules, clock=clock, identify=identify), "localhost:0", server) as place,
        grpc.secure_channel(place, client) as channel,
    ):
        assert Client(channel).pay() == "paid 1"
        assert shop.evaluations[0].keys == ["spiffe://shop/billing", "CN=billing"]
        assert refusal(Client(channel).pay).code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_unix_socket_has_no_address(kind, tmp_path, clock):
    """A caller over a UNIX socket has no address: a rule by address shares one key among them, or does not apply."""
    shop = Shop()
    rules = [rule(FixedWindow("1/h"), key=(("ip",),)), rule(FixedWindow("5/h"), "all")]
    with serving(kind, shop, gate(*rules, clock=clock), f"unix:{tmp_path}/s") as place, grpc.insecure_channel(place) as channel:
        assert Client(channel).pay() == "paid 1"
        assert [entry.label for entry in shop.evaluations[0].entries][-1] == "all"


def test_interceptors_take_a_policy_or_a_gate(tmp_path):
    """A policy is enough: the gate is made of it, with the given store; a gate is taken as it is."""
    policy = Policy(rules=(rule(FixedWindow("1/h")),))
    for kind in (RateLimitInterceptor, AsyncRateLimitInterceptor):
        guarded = kind(policy)
        assert isinstance(guarded.gate, Gate)
        assert kind(guarded.gate).gate is guarded.gate
        guarded.gate.close()
        with pytest.raises(ConfigurationError, match="expected a Policy, a Gate or the path"):
            kind(7)


def test_outside_of_a_call_there_is_no_passage():
    """`current()` is None where no call is being handled."""
    assert current() is None


@pytest.mark.parametrize("absent", ["grpc", "grpc_status", "google.rpc"])
def test_without_grpc_the_extra_is_named(python, absent):
    """Where a part of gRPC is not installed, importing the interceptors names what to install."""
    done = python(
        f"""
        import sys
        sys.modules[{absent!r}] = None
        try:
            import limitkeeper.web.grpc
        except Exception as error:
            print(type(error).__name__, error)
        """
    )
    assert "ConfigurationError" in done.stdout, done.stderr
    assert "pip install 'limitkeeper[grpc]'" in done.stdout


def test_a_handler_gets_a_context():
    """Libraries that check for a servicer context accept it, sync and async."""
    assert issubclass(HandlerContext, grpc.ServicerContext)
    assert issubclass(AsyncHandlerContext, grpc.aio.ServicerContext)
