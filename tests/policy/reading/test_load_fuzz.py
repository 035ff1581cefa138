"""Fuzzing: any input gives a Policy or a PolicyError, in bounded time."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from effort import effort
from limitkeeper import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.one_line_request import parse_request
from limitkeeper.policy.reading.diagnostics import PolicyError
from limitkeeper.policy.reading.load import examine
from limitkeeper.policy.reading.policy_sections import policy_schema
from limitkeeper.policy.reading.yaml import MAX_BYTES

HERE = Path(__file__).parents[1]
SHOP = (HERE / "shop.yaml").read_text().replace("jwt.pub", str(HERE / "jwt.pub"))
EVERYTHING = (HERE / "everything.yaml").read_text().replace("jwt.pub", str(HERE / "jwt.pub"))


def only_clear_errors(make: Any) -> Policy | None:
    """The policy, or None after an error that can be rendered and that names at least one error."""
    try:
        policy = make()
    except PolicyError as caught:
        error = caught
    else:
        assert isinstance(policy, Policy)
        return policy
    assert error.errors
    assert all(str(one) and one.message for one in error.diagnostics)
    assert "has " in str(error)
    return None


@effort(150)
@given(text=st.text())
@example(text="\ud800")
@example(text="\x00")
@example(text="a: !<tag:x> b")
@example(text="%YAML 9.9\n---\na")
@example(text="\ufeff")
@example(text="? a\n: b\n? [c]\n: d")
@example(text="--- >\n folded\n--- |\n literal")
@example(text="limits: [{name: a, limit: 5/s}]\n...\nmore")
@example(text="{}: {}")
@example(text="limits: [{name: a, limit: " + "9" * 5000 + "/s}]")
@example(text="limits: [{name: a, limit: " + "token bucket 5/s; " * 30000 + "}]")
@example(text="\u2028limits:\u2029 3")
def test_any_text_is_a_policy_or_a_clear_error(text):
    """Arbitrary text never raises anything but PolicyError."""
    only_clear_errors(lambda: Policy.read(text))


@effort(150)
@given(data=st.binary())
def test_any_bytes_are_a_policy_or_a_clear_error(data, tmp_path_factory):
    """Arbitrary bytes in a file never raise anything but PolicyError."""
    path = tmp_path_factory.getbasetemp() / "bytes.yaml"
    path.write_bytes(data)
    examine(path)
    only_clear_errors(lambda: Policy.load(path))


WORDS = sorted({word for word in str(policy_schema()).replace("'", " ").split() if word.isidentifier()})
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=3),
    st.datetimes(),
    st.sampled_from(
        ["ip", "user | ip", "5/s", "unlimited", "GET /x", "10.0.0.0/8", "80%", "wait up to 1s", "1kB", "a:b", "redis://x"]
    ),
    st.sampled_from([object(), len, Policy, {1, 2}, frozenset(), 1j]),
)
KEYS = st.one_of(st.sampled_from(WORDS), st.text(max_size=5), st.integers(), st.none(), st.booleans())
TREE = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=30)


@effort(80)
@given(said=st.dictionaries(st.sampled_from(list(policy_schema()["properties"])), TREE, max_size=6))
def test_any_tree_is_a_policy_or_a_clear_error(said):
    """Arbitrary values from Python under the fields of a policy never raise anything but PolicyError."""
    only_clear_errors(lambda: Policy.of(**said))


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(node, dict):
        for word, item in node.items():
            found += places(item, (*path, word))
    elif isinstance(node, list):
        for number, item in enumerate(node):
            found += places(item, (*path, number))
    return found


@effort(80)
@given(data=st.data(), value=TREE)
def test_a_good_policy_with_one_part_changed(data, value):
    """A full policy in which any one part is replaced by anything never raises anything but PolicyError."""
    from source_trees import to_python

    from limitkeeper.policy.reading.yaml import parse_yaml

    said = to_python(parse_yaml(EVERYTHING)[0])
    path = data.draw(st.sampled_from(places(said)[1:]))
    parent = said
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    only_clear_errors(lambda: Policy.of(**said))


@effort(80)
@given(seed=st.integers(0, 2**32), source=st.sampled_from([SHOP, EVERYTHING]))
def test_a_good_file_with_a_few_characters_changed(seed, source):
    """A sample in which characters are lost, doubled, swapped or replaced never raises anything but PolicyError."""
    chance = random.Random(seed)
    text = list(source)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(text))
        change = chance.choice(["lose", "double", "replace", "swap", "line"])
        if change == "lose":
            del text[at : at + chance.randint(1, 8)]
        elif change == "double":
            text[at:at] = text[at : at + chance.randint(1, 20)]
        elif change == "replace":
            text[at : at + 1] = chance.choice(
                ["\t", "é", "&a ", "*a ", "!x ", "{", "}", "[", "]", ":", "\n", "%", "9" * 20, "\u202e", "-"]
            )
        elif change == "swap" and at + 1 < len(text):
            text[at], text[at + 1] = text[at + 1], text[at]
        else:
            text[at:at] = list("\n  - ")
    only_clear_errors(lambda: Policy.read("".join(text)))


def test_the_samples_of_the_fuzz_are_good():
    """The base of the fuzz loads as long as it is not changed."""
    assert only_clear_errors(lambda: Policy.read(SHOP)) is not None
    assert only_clear_errors(lambda: Policy.read(EVERYTHING)) is not None


@effort(150)
@given(
    line=st.one_of(
        st.text(),
        st.lists(st.sampled_from(["GET", "/x?a=1", "user=1", "header:A=b", "peer=", "=", "'", "query:n=1"])).map(" ".join),
    )
)
def test_any_line_is_a_request_or_a_clear_error(line):
    """A request in one line is read, or refused with a ConfigurationError."""
    policy = Policy.of(identify={"user": {"header": "U"}}, limits=[{"name": "a", "limit": "5/s"}])
    with contextlib.suppress(ConfigurationError):
        parse_request(line, policy).header("a")


# Time --------------------------------------------------------------------------------------------------------------

HOSTILE = {
    "many unknown words": "".join(f"w{i}: {i}\n" for i in range(30_000)),
    "one long word": "x" * 200_000 + ": 1",
    "one long text": "name: " + "x" * 200_000,
    "one long limit": "limits: [{name: a, limit: '" + "burst 1 " * 50_000 + "'}]",
    "one long path": "limits: [{name: a, limit: 5/s, match: " + "/a" * 200_000 + "}]",
    "a laughing billion": "a: &a [x, x]\n"
    + "".join(f"b{i}: &b{i} [{', '.join([f'*b{i - 1}' if i else '*a'] * 9)}]\n" for i in range(5000)),
    "many rules": "limits:\n" + "".join(f"- {{name: r{i}, limit: 5/s}}\n" for i in range(12_000)),
    "many rules of one name": "limits:\n" + "- {name: r, limit: 5/s}\n" * 15_000,
    "many exemptions": "exempt:\n" + "- path: /a\n" * 1000 + "limits:\n" + "- {name: r, limit: 5/s, match: /b}\n" * 5000,
    "many identities": "identify:\n" + "".join(f"  i{i}: {{header: X-{i}}}\n" for i in range(10_000)),
    "a key of many": "limits: [{name: a, limit: 5/s, key: [" + "ip, " * 90_000 + "ip]}]",
    "many documents": "---\na: 1\n" * 50_000,
    "many anchors": "".join(f"k{i}: &a{i} x\n" for i in range(25_000)),
    "many quotes": "a: '" + "''" * 200_000,
    "an open flow": "limits: [" + "{a: 1}, " * 25_000,
    "a flood of colons": ": " * 200_000,
    "a flood of question marks": "?\n" * 200_000,
    "a flood of tabs": "a:\n" + "\t" * 450_000,
    "many capacities": "identify: {a: {header: A}}\nlimits:\n"
    + "".join(f"- {{name: r{i}, key: a, capacity: 5/s}}\n- {{name: s{i}, key: a, limit: 5/s}}\n" for i in range(2500)),
    "many matches": "limits:\n"
    + "".join(
        f"- {{name: r{i}, key: ip, limit: 5/s burst {i + 1}, match: [{', '.join(f'/m{j}' for j in range(900))}]}}\n"
        for i in range(30)
    ),
    "many exempt matches": "exempt:\n"
    + "".join(f"- {{path: [{', '.join(f'/m{j}' for j in range(899))}, /e{i}]}}\n" for i in range(30))
    + "limits:\n"
    + "".join(f"- {{name: r{i}, key: ip, limit: 5/s, match: [{', '.join(f'/m{j}' for j in range(900))}]}}\n" for i in range(30)),
    "many overrides": "limits: [{name: a, key: ip, limit: 5/s, override: {"
    + ", ".join(f"k{i}: 5/s" for i in range(25_000))
    + "}}]",
}


@pytest.mark.slow
@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_takes_bounded_time(text):
    """Half a megabyte made to be slow is read, or refused, within the time of a large good file."""
    assert len(text) <= MAX_BYTES
    only_clear_errors(lambda: Policy.read(text))
