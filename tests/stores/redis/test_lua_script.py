"""The script of a call: its parts."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import limitkeeper.stores.redis
from limitkeeper import ConfigurationError, Limit, TokenBucket
from limitkeeper.algorithms import ALGORITHMS
from limitkeeper.stores.redis.limit_and_state_codec import RULES, fingerprint, rule_of
from limitkeeper.stores.redis.script_builder import FILES, OPERATIONS, script_of, sections
from limitkeeper.testing.strategies import LIMITS
from servers.valkey import Valkey

LUA = Path(limitkeeper.stores.redis.__path__[0]) / "lua"
FRAME = {"frame", "rates", "hit", "batched_hits", "loop", *OPERATIONS}


def test_every_rule_has_a_mirror() -> None:
    """Every rule with a text form can be decided in Redis; a Lua file belongs to a rule or to the frame."""
    assert {algorithm.kind for algorithm in ALGORITHMS.values()} == set(RULES)
    assert {path.stem for path in LUA.glob("*.lua")} == {rule.file for rule in RULES.values()} | FRAME


def test_a_script_is_made_without_reading_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any script can be made when the process has no descriptor left, or its files are gone."""
    monkeypatch.setattr("io.open", None)
    sections.cache_clear()
    for operation in OPERATIONS:
        assert script_of.__wrapped__(frozenset((operation, *FILES, "rates"))).source


def test_a_rule_without_a_mirror_is_refused_by_name() -> None:
    """A limit of an unknown kind can't be decided in Redis, and the error lists the kinds that can."""

    class Own(TokenBucket):
        kind = "my own"

    with pytest.raises(ConfigurationError, match=r"no Lua mirror.*token bucket"):
        rule_of(Own("5/s"))


@pytest.mark.parametrize("verb", ["hit", *OPERATIONS])
@pytest.mark.parametrize("file", FILES)
def test_a_script_holds_only_the_rules_in_use(file: str, verb: str) -> None:
    """No other rule's function is sent, and a call of hits only has no part of the slow path."""
    source = script_of(frozenset((verb, file))).source.decode()
    found = {other for other in FILES if re.search(rf"\bfunction {other}\b", source)}
    assert found == {file}
    assert ("function next_claim" in source) == (verb not in ("hit", "hit_all"))
    assert (f"function {file}_give_back" in source) == (verb in ("give_back", "rebook"))
    assert ("HSETNX" in source) == (verb == "register")
    assert "charge_rates = function" not in source
    several = script_of(frozenset((verb, file, "rates"))).source.decode()
    assert ("charge_rates = function" in several) == (verb not in ("hit", "hit_all"))


@pytest.mark.parametrize("clock", [(), ("clock",)], ids=["server's time", "own clock"])
def test_every_script_compiles_under_its_name(valkey: Valkey, clock: tuple[str, ...]) -> None:
    """Any rules with any verbs make a script that the server takes, and its name is the one that we call it by."""
    verbs = ["hit", *OPERATIONS]
    sets = [frozenset(some) for n in (1, 2, 3, len(verbs)) for some in itertools.combinations(verbs, n)]
    sets += [frozenset((verb, "rates")) for verb in verbs]
    with valkey.client() as client:
        for some in sets:
            for files in (*[(file,) for file in FILES if file != "sliding_log"], tuple(FILES)):
                script = script_of(some | frozenset(files) | frozenset(clock))
                assert client.script_load(script.source).encode() == script.sha


def test_time_is_the_servers_or_the_requests_never_both() -> None:
    """With times in the request, the server's clock is not read."""
    parts = frozenset(("hit", "decide", "token_bucket"))
    assert b"TIME" in script_of(parts).source
    assert b"TIME" not in script_of(parts | {"clock"}).source


def test_no_number_is_made_text_by_lua() -> None:
    """`tostring` and `..` of a number keep 14 digits; none of the files does that."""
    for path in LUA.glob("*.lua"):
        code = "\n".join(line.partition("--")[0] for line in path.read_text().splitlines())
        assert "tostring" not in code
        assert not re.search(r"\.\.\s*(now|now_us|reset|retry|ttl|[abc])\b", code), path.name


def test_a_rule_has_all_its_sections() -> None:
    """The facts about a rule, in both halves, and how its dates move."""
    for file in FILES:
        assert {"traits", "decide", "give_back", "redate"} <= set(sections(file)), file
        assert ("used" in sections(file)) == (file != "sliding_log"), "a log serves all rates"


def test_fingerprints_differ_and_fit_a_double() -> None:
    """Every limit that is tried anywhere has a fingerprint of its own, which a double holds."""
    texts: set[str] = {str(limit) for some in LIMITS.values() for limit in some if isinstance(limit, Limit)}
    prints = {fingerprint(text) for text in texts}
    assert len(prints) == len(texts)
    assert all(0 <= one < 2**52 for one in prints)
