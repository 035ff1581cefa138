"""The client's address: only trusted proxies are believed, client text never becomes an address, long chains cost little."""

from __future__ import annotations

import ipaddress
import socket
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from effort import effort
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy.identity.addresses import CACHE_SIZE, Networks, network_text, read_address
from limitkeeper.policy.identity.client_ip import MAX_HOPS, ClientIp
from limitkeeper.policy.request_context import WrittenRequest

STEADY = effort(200)

PROXY = "10.0.0.2"
BEHIND = ClientIp(trusted_proxies=("10.0.0.0/8", "fd00::/8"))


def seen(chain: str | None, peer: str | None = PROXY, ip: ClientIp = BEHIND) -> str | None:
    headers = {} if chain is None else {ip.header: chain}
    return ip.of(WrittenRequest(peer=peer, headers=headers))


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        (None, PROXY),
        ("", PROXY),
        ("203.0.113.9", "203.0.113.9"),
        ("203.0.113.9, 10.0.0.7", "203.0.113.9"),
        ("6.6.6.6, 203.0.113.9, 10.0.0.7", "203.0.113.9"),
        ("10.9.9.9, 203.0.113.9", "203.0.113.9"),
        ("10.0.0.9, 10.0.0.8", "10.0.0.9"),
        ("10.0.0.12", "10.0.0.12"),
        (" 203.0.113.9 ,  10.0.0.7 ", "203.0.113.9"),
        ("203.0.113.9,,10.0.0.7,", "203.0.113.9"),
        ("203.0.113.9:51234", "203.0.113.9"),
        ("203.0.113.9:_hidden", "203.0.113.9"),
        ("[2001:db8::17]:_h", "2001:db8::/64"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("203.0.113.9, ::ffff:10.0.0.7", "203.0.113.9"),
        ("[2001:db8::17]:4711", "2001:db8::/64"),
        ("2001:db8::17%eth0", "2001:db8::/64"),
        ("2001:db8::17, fd00::1", "2001:db8::/64"),
    ],
)
def test_the_chain_is_read_from_the_right_over_trusted_proxies_only(chain, client):
    """The client is the last address that is not a trusted proxy, whatever the client wrote further left."""
    assert seen(chain) == client


@pytest.mark.parametrize(
    "hop",
    [
        "unknown",
        "_hidden",
        "localhost",
        "999.1.1.1",
        "1.2.3",
        "1.2.3.4.5",
        "0x7f.1",
        "01.02.03.04",
        "1.2.3.4:99999999",
        "1.2.3.4:http",
        "1.2.3.4:123456",
        "1.2.3.4:x1",
        "1.2.3.4:\u0663",
        "1.2.3.4:_",
        "[2001:db8::1]80",
        "[2001:db8::1",
        "[2001:db8::1]x",
        "[1.2.3.4]",
        "2001:db8::1%",
        "1.2.3.4\r\nX-Evil: 1",
        "１.2.3.4",
        "' or 1=1",
        "a" * 5_000,
        "\x00",
        "\ud800",
    ],
)
def test_a_malformed_hop_ends_the_walk_at_the_last_reported_address(hop):
    """The result is never client text: it is the proxy that reported the malformed hop."""
    assert seen(f"203.0.113.9, {hop}") == PROXY
    assert seen(f"203.0.113.9, {hop}, 10.0.0.7") == "10.0.0.7"


def test_without_trusted_proxies_no_header_is_read():
    """The peer is the client, whatever headers it sends."""
    assert seen("1.1.1.1", peer="203.0.113.9", ip=ClientIp()) == "203.0.113.9"
    assert seen("1.1.1.1", peer="203.0.113.9") == "203.0.113.9"


def test_a_client_can_not_change_its_key():
    """Through an honest proxy, which appends the peer's address, every spoofed chain gives the same key."""
    chains = ["", "1.1.1.1, ", "10.0.0.1, ", "10.0.0.1, 10.0.0.2, ", '"quoted, ', "unknown, ", "\x00, ", ", , ,", "::1, " * 5_000]
    assert {seen(spoofed + "203.0.113.9") for spoofed in chains} == {"203.0.113.9"}


@STEADY
@given(st.text(max_size=60))
def test_whatever_stands_further_left_changes_nothing(spoofed):
    """Text before the entry of a trusted proxy is never read."""
    assert seen(f"{spoofed},203.0.113.9") == "203.0.113.9"


@STEADY
@given(
    st.one_of(
        st.text(max_size=80),
        st.lists(st.sampled_from(['"', "\\", ",", ";", "for=", "[::1]", ":", "1.2.3.4", " ", "_x"])).map("".join),
    )
)
def test_no_header_breaks_the_walk(text):
    """Any text in any of the headers gives an address or the peer's, and nothing is raised."""
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
        ip = ClientIp(trusted_proxies=("10.0.0.0/8",), header=header, ipv6_prefix=128)
        found = seen(text, ip=ip)
        address = ipaddress.ip_address(found)
        assert socket.inet_ntop(socket.AF_INET if address.version == 4 else socket.AF_INET6, address.packed) == found


@pytest.mark.parametrize(
    ("chain", "client"),
    [
        ("for=203.0.113.9", "203.0.113.9"),
        ("For=203.0.113.9;proto=http;by=10.0.0.1", "203.0.113.9"),
        ("proto=https; for=203.0.113.9", "203.0.113.9"),
        ('for="203.0.113.9:51234"', "203.0.113.9"),
        ('for="[2001:db8:cafe::17]:4711"', "2001:db8:cafe::/64"),
        ('for="[2001:db8:cafe::17]"', "2001:db8:cafe::/64"),
        ("for=6.6.6.6, for=203.0.113.9, for=10.0.0.7", "203.0.113.9"),
        ('for="6.6.6.6, for=203.0.113.9', "203.0.113.9"),
        ('for="x, for="[2001:db8::1]"', "2001:db8::/64"),
        ("for=203.0.113.9, for=unknown", PROXY),
        ("for=203.0.113.9, for=_gazonk", PROXY),
        ('for=203.0.113.9, for="_gazonk"', PROXY),
        ('for=203.0.113.9;host="x, for=6.6.6.6"', PROXY),
        ('for=203.0.113.9;host="x, for=6.6.6.6;a=\\"b"', PROXY),
        ("for=203.0.113.9;for=6.6.6.6", PROXY),
        ("by=203.0.113.9", PROXY),
        ("203.0.113.9", PROXY),
        ("for=", PROXY),
        ("for=203.0.113.9" + ";a=b" * 2_000, PROXY),
    ],
)
def test_forwarded_is_read_as_in_its_standard(chain, client):
    """RFC 7239: quoted, with brackets and ports; hidden and malformed nodes end the walk."""
    assert seen(chain, ip=ClientIp(trusted_proxies=("10.0.0.0/8",), header="Forwarded")) == client


@pytest.mark.parametrize(
    ("said", "client"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8::1", "2001:db8::/64"),
        (" 203.0.113.9 ", "203.0.113.9"),
        ("203.0.113.9, 6.6.6.6", PROXY),
        ("2001:db8::6%, 203.0.113.9", PROXY),
        ("x", PROXY),
        ("", PROXY),
    ],
)
def test_a_header_with_one_address_holds_one(said, client):
    """X-Real-IP and similar headers: of two values one was added by the client, so neither counts."""
    assert seen(said, ip=ClientIp(trusted_proxies=("10.0.0.0/8",), header="X-Real-IP")) == client


def test_rotation_within_a_64_is_one_key():
    """An IPv6 client owns a /64: ten thousand addresses of it are one key, the next network another."""
    ip = ClientIp()
    keys = {seen(None, peer=f"2001:db8:1:2:{n:x}:{n:x}::{n:x}", ip=ip) for n in range(10_000)}
    assert keys == {"2001:db8:1:2::/64"}
    assert seen(None, peer="2001:db8:1:3::1", ip=ip) == "2001:db8:1:3::/64"


def test_one_client_has_one_spelling():
    """Case, leading zeros, zones and IPv4 inside IPv6 are spellings of the same address."""
    whole = ClientIp(ipv6_prefix=128)
    assert {seen(None, peer=peer, ip=whole) for peer in ("2001:DB8::1", "2001:db8:0:0::0001", "2001:db8::1%eth0")} == {
        "2001:db8::1"
    }
    assert {seen(None, peer=peer, ip=whole) for peer in ("1.2.3.4", "::ffff:1.2.3.4", "::FFFF:102:304")} == {"1.2.3.4"}


def test_prefixes_widen_keys():
    """Networks instead of addresses, where the policy sets it."""
    assert seen(None, peer="198.51.100.77", ip=ClientIp(ipv4_prefix=24)) == "198.51.100.0/24"
    assert seen(None, peer="2001:db8:1:2::3", ip=ClientIp(ipv6_prefix=48)) == "2001:db8:1::/48"


def test_a_unix_socket_has_no_address():
    """A UNIX socket identifies no client, unless it is a trusted proxy."""
    assert seen("203.0.113.9", peer=None, ip=ClientIp()) is None
    assert seen("203.0.113.9", peer=None) is None
    assert seen("6.6.6.6, 203.0.113.9", peer=None, ip=ClientIp(trusted_proxies=("unix",))) == "203.0.113.9"
    assert seen(None, peer=None, ip=ClientIp(trusted_proxies=("unix",))) == "unix"


def test_what_the_server_calls_a_peer_is_taken():
    """A test client has a name instead of an address; a long one is hashed."""
    assert seen(None, peer="testclient") == "testclient"
    assert seen(None, peer="x" * 1_000).startswith("sha256:")


@pytest.mark.parametrize(
    "chain",
    [
        "10.0.0.3, " * 10_000 + "10.0.0.7",
        "203.0.113.9," + " " * 1_000_000,
        "1" * 1_000_000,
        "," * 1_000_000,
        "203.0.113.9, " * 80_000,
        ("for=203.0.113.9" + " " * 1_000 + "x,") * 900,
        ('for="' + "\\\\" * 500 + ",") * 900,
        ("for=1;" * 160 + ",") * 900,
    ],
    ids=range(8),
)
def test_a_long_chain_takes_bounded_time(chain):
    """Work is bounded by MAX_HOPS, not by the header."""
    for header in ("X-Forwarded-For", "Forwarded", "X-Real-IP"):
        ip = ClientIp(trusted_proxies=("10.0.0.0/8",), header=header)
        began = time.process_time()
        for _ in range(10):
            found = seen(chain, ip=ip)
        assert (time.process_time() - began) / 10 < 0.02
        assert found in (PROXY, "203.0.113.9", "10.0.0.3")


def test_hops_are_bounded():
    """A chain of more than MAX_HOPS proxies ends at the last one that was read."""
    assert seen("203.0.113.9" + ", 10.0.0.3" * (MAX_HOPS - 1)) == "203.0.113.9"
    assert seen("203.0.113.9" + ", 10.0.0.3" * MAX_HOPS) == "10.0.0.3"


def test_the_cache_is_bounded():
    """A flood of addresses does not grow the cache."""
    ip = ClientIp()
    for n in range(CACHE_SIZE + 500):
        assert seen(None, peer=f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}", ip=ip) is not None
    assert len(ip._direct) <= CACHE_SIZE


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"trusted_proxies": ("10.0.0.1/8",)}, "write 10.0.0.0/8"),
        ({"trusted_proxies": ("proxy.internal",)}, "write it like 10.0.0.0/8"),
        ({"trusted_proxies": (7.5,)}, "write it like"),
        ({"ipv6_prefix": 129}, "from 1 to 128, got"),
        ({"ipv4_prefix": 0}, "from 1 to 32, got 0"),
        ({"ipv4_prefix": True}, "ipv4_prefix: expected a prefix length from 1 to 32, got True"),
        ({"ipv6_prefix": "64"}, "ipv6_prefix: expected a prefix length from 1 to 128, got '64'"),
        ({"ipv6_prefix": 0}, "from 1 to 128, got"),
    ],
)
def test_a_wrong_argument_is_an_error(wrong, remedy):
    """The constructor raises it, not the first request."""
    with pytest.raises(ConfigurationError, match=remedy):
        ClientIp(**wrong)


def test_identities_are_values():
    """Equal arguments make equal identities, whatever they have cached."""
    one, two = ClientIp(("10.0.0.0/8",)), ClientIp(("10.0.0.0/8",))
    one.of(WrittenRequest(peer="1.2.3.4"))
    assert one == two
    assert hash(one) == hash(two)
    assert one != ClientIp(("10.0.0.0/9",))


addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6))


@STEADY
@given(addresses, addresses, st.integers(0, 128))
def test_networks_agree_with_the_standard_library(address, base, prefix):
    """An address is in a network exactly when `ipaddress` agrees."""
    network = ipaddress.ip_network((base, prefix % (base.max_prefixlen + 1)), strict=False)
    mapped = getattr(address, "ipv4_mapped", None) or address
    start = getattr(network.network_address, "ipv4_mapped", None)
    if start is not None and network.prefixlen >= 96:
        assert Networks((str(network),)).holds(str(address)) == (mapped in ipaddress.ip_network((start, network.prefixlen - 96)))
        return
    assert Networks((str(network),)).holds(str(address)) == (mapped in network)


@STEADY
@given(st.ip_addresses(v=6), st.integers(1, 128))
def test_a_key_is_the_network_that_the_standard_library_names(address, prefix):
    """The text of a key is the network's."""
    read = read_address(str(address))
    if read[0] == 6:
        network = ipaddress.ip_network((address, prefix), strict=False)
        assert ipaddress.ip_network(network_text(read, prefix)) == network


def test_networks_hold_addresses_in_any_spelling():
    """Exemptions ignore ports, brackets and IPv6 mapping; other texts are in none."""
    networks = Networks(("10.1.0.0/16", "2001:db8::/32", "192.0.2.7", "::ffff:172.16.0.0/108"))
    inside = ["10.1.2.3", "::ffff:10.1.2.3", "10.1.2.3:80", "[2001:db8::5]:80", "2001:db8:1::5%x", "192.0.2.7", "172.16.9.9"]
    assert all(networks.holds(address) for address in inside)
    outside = ["10.2.0.1", "2001:db9::1", "192.0.2.8", "x", "", None, "10.1.2.3, 10.1.2.4", "a" * 100_000]
    assert not any(networks.holds(address) for address in outside)
    assert not Networks().holds("10.1.2.3")


def test_a_network_of_one_family_holds_no_address_of_the_other():
    """Where the first bits of an address are those of another family's network, it is not in it; IPv4 inside IPv6 is IPv4."""
    assert not Networks(("0.0.0.0/8",)).holds("::1")
    assert not Networks(("::/104",)).holds("0.0.0.9")
    assert Networks(("::ffff:0:0/96",)).holds("192.0.2.7")
    assert [Networks(("::ffff:0.0.0.0/97",)).holds(f"{n}.1.1.1") for n in (10, 127, 128)] == [True, True, False]
