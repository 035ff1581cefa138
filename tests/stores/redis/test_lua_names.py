"""The names of keys in Redis: unique, reversible, and with one slot for what is decided together."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from limitkeeper import ConfigurationError, FixedWindow, TokenBucket
from limitkeeper.algorithms.claim import NamedLimit
from limitkeeper.stores.redis.key_names import MAX_KEY, KeyNames, digest, key_bytes, tag
from servers.valkey import Valkey

#: Any str: lone surrogates, NUL, braces, the marks that escaping uses, and what is too long to be kept as it is.
texts = st.text(st.characters() | st.sampled_from("{}#=:|\0\ud800"), max_size=12) | st.integers(120, 140).map(lambda n: "k" * n)
BUCKET = TokenBucket("5/s")


def named(limiter: str, name: str) -> NamedLimit:
    return NamedLimit(limiter, name, BUCKET)


@given(st.lists(st.tuples(texts, texts, texts), unique=True, min_size=2, max_size=12))
@example([("a|b", "c", "k"), ("a", "b|c", "k")])
@example([("a", "b", "="), ("a", "b", "")])
@example([("a", "b", "==}"), ("a", "b", "=}")])
def test_no_two_share_a_name(some: list[tuple[str, str, str]]) -> None:
    """(limiter, limit, key) that differ anywhere have different names, whatever characters they contain."""
    names = KeyNames()
    assert len({names.key(named(limiter, name), key) for limiter, name, key in some}) == len(some)


@given(texts)
@example("")
@example("\ud800\0}{")
@example("#" + "x" * 127)
def test_a_name_is_read_back(key: str) -> None:
    """The caller's key can be read back from the name; a hashed one can't."""
    names = KeyNames("app")
    found = names.parse(names.key(named("a", "b"), key))
    assert found == (None if len(key_bytes(key)) > MAX_KEY else key)


@pytest.mark.parametrize("key", ["x" * 10_000, "ä" * 5_000, "\0" * 200])
def test_a_long_key_has_a_short_name(key: str) -> None:
    """A key of 10 kB takes no more room in its name than one of 128 bytes, and no other has that name."""
    name = KeyNames().key(named("a", "b"), key)
    assert len(name) <= MAX_KEY
    assert name != KeyNames().key(named("a", "b"), key + "x")
    assert name != KeyNames().key(named("a", "b"), tag(key_bytes(key)).decode())


def slot_text(name: bytes) -> bytes:
    """The part of a name that Redis Cluster hashes."""
    found = re.search(rb"\{([^}]+)\}", name[: name.index(b"}", name.index(b"{") + 1) + 1])
    return found[1] if found else name


@given(texts)
def test_limits_on_one_key_lie_in_one_slot(key: str) -> None:
    """The hash tag of a name depends on the key alone, so that several limits on one key are decided in one step."""
    first, second = (KeyNames().key(one, key) for one in (named("a", "b"), NamedLimit("c", "d", FixedWindow("1/s"))))
    assert first != second
    assert slot_text(first) == slot_text(second) != first


def test_a_tag_in_the_prefix_keeps_everything_in_one_slot() -> None:
    """`prefix="{app}"` puts every key in the slot of that tag."""
    names = KeyNames("{app}")
    assert {slot_text(names.key(named("a", "b"), key)) for key in ("x", "y", "}z")} == {b"app"}


@pytest.mark.parametrize("prefix", ["", "a{b", "a}b", "{}", "{a}{b}", None])
def test_a_prefix_that_breaks_tags_is_refused(prefix: str) -> None:
    """Half a hash tag in the prefix would scatter keys that belong together: the error names the right form."""
    with pytest.raises(ConfigurationError, match="prefix"):
        KeyNames(prefix)


@pytest.mark.parametrize("prefix", ["limitkeeper", "a*b[c]?", "{app}", "back\\slash^-"])
def test_the_pattern_of_a_limit_finds_its_keys_only(valkey: Valkey, prefix: str) -> None:
    """SCAN with a limit's pattern finds its keys and no others, whatever the prefix."""
    names, keys = KeyNames(prefix), ["", "x", "}", "*", "\0", "\ud800", "y" * 500]
    ours, theirs = ([names.key(named("a", name), key) for key in keys] for name in ("b", "c"))
    with valkey.client() as client:
        client.flushall()
        client.mset(dict.fromkeys([*ours, *theirs, names.registry(named("a", "b")), b"axb", b"limitkeeper"], b""))
        assert sorted(client.scan_iter(match=names.pattern(named("a", "b")))) == sorted(ours)


def test_times_that_are_made_up_have_names_of_their_own() -> None:
    """A store on its own clock never uses the keys of one that runs on the server's."""
    real, marked = KeyNames("app"), KeyNames("app", marked=True)
    assert real.key(named("a", "b"), "k") != marked.key(named("a", "b"), "k")
    assert real.registry(named("a", "b")) != marked.registry(named("a", "b"))


@pytest.mark.parametrize("name", [b"other", b"limitkeeper:short", b"limitkeeper:Zm9vYmFyYmF6:{", b"elsewhere:Zm9vYmFyYmF6:{k}"])
def test_a_foreign_name_is_an_error(name: bytes) -> None:
    """A foreign name is not taken for a key of ours."""
    with pytest.raises(ConfigurationError, match="no key of limitkeeper"):
        KeyNames().parse(name)


def test_the_digest_counts_where_texts_end() -> None:
    """`a|b` + `c` is not `a` + `b|c`, and twelve characters are all that a long name costs."""
    assert digest("a|b", "c") != digest("a", "b|c")
    assert digest("ab", "") != digest("a", "b") != digest("", "ab")
    assert len(digest("x" * 1000, "y" * 1000)) == 12
