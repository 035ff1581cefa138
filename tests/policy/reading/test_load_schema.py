"""JSON Schema and loader agree: a policy that is changed in one place is invalid for both or for neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from source_trees import to_python

from effort import effort
from limitkeeper.policy.reading.diagnostics import SCHEMA, SYNTAX
from limitkeeper.policy.reading.load import examine
from limitkeeper.policy.reading.policy_sections import policy_schema
from limitkeeper.policy.reading.yaml import parse_yaml

HERE = Path(__file__).parents[1]
EVERYTHING = (HERE / "everything.yaml").read_text()
VALIDATOR = jsonschema.Draft202012Validator(policy_schema())
WORDS = sorted({word for word in str(policy_schema()).replace("'", " ").split() if word.isidentifier()})
LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**9), 10**10),
    st.sampled_from([0.5, 1.5, -2.25, 1.0, 429.0, 1e-7, 1e21, 2**53, 10**19, 10**40, -0.0]),
    st.sampled_from(
        ["ip", "user | ip", "5/s", "unlimited", "GET /x", "10.0.0.0/8", "80%", "off", "On", "true", "draft-11", "delta"]
    ),
    st.text(max_size=8),
)
TREE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(node, (dict, list)):
        for step, item in node.items() if isinstance(node, dict) else enumerate(node):
            found += places(item, (*path, step))
    return found


SAID = to_python(parse_yaml(EVERYTHING)[0])
PLACES = places(SAID)[1:]


def kinds_of(said: Any, folder: Path) -> set[str]:
    """The kinds of diagnostics that the loader gives for a file."""
    path = folder / "changed.yaml"
    path.write_text(json.dumps(said, indent=1))
    return {one.kind for one in examine(path)[1].diagnostics()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the key that the policy names."""
    made = tmp_path_factory.mktemp("schema")
    (made / "jwt.pub").write_bytes((HERE / "jwt.pub").read_bytes())
    return made


@effort(60)
@given(path=st.sampled_from(PLACES), value=TREE, action=st.sampled_from(["replace", "replace", "lose", "add"]))
def test_loader_and_schema_agree(folder, path, value, action):
    """A field removed, added or replaced is invalid by the schema exactly when the loader reports a schema error."""
    said = json.loads(json.dumps(SAID))
    parent = said
    for step in path[:-1]:
        parent = parent[step]
    if action == "lose":
        del parent[path[-1]]
    elif action == "add" and isinstance(parent, dict):
        parent["added"] = value
    else:
        parent[path[-1]] = value
    kinds = kinds_of(said, folder)
    if SYNTAX not in kinds:
        assert VALIDATOR.is_valid(said) == (SCHEMA not in kinds)


# Whole documents without references: both accept, or both reject


NUMBER = st.one_of(
    st.integers(-5, 700),
    st.integers(-(10**40), 10**40),
    st.integers(-5, 700).map(float),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(0, 2),
    st.booleans(),
    st.none(),
)
NAME = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        ["api", "a b", " a", "a ", "a\n", "", "é", 'a"', "a\\", "x" * 64, "x" * 65, "by", "everyone", "9a", "_a.b-c", "X-A"]
    ),
    NUMBER,
)
KEY_NAME = NAME.filter(lambda name: isinstance(name, str))
EXEMPTION = st.fixed_dictionaries(
    {},
    optional={
        "path": st.just("/healthz"),
        "match": st.just("GET /healthz"),
        "network": st.just("10.0.0.0/8"),
        "header": st.dictionaries(KEY_NAME, st.just("a secret"), max_size=2),
        "when": st.just({"present": "ip"}) | st.just({}),
        "limits": st.just([]),
    },
)
RULE = st.fixed_dictionaries(
    {"name": NAME | st.just("api"), "limit": st.just("token bucket 1/s burst 1000000000")},
    optional={
        "status": NUMBER,
        "priority": NUMBER,
        "alert": NUMBER,
        "cost": NUMBER | st.fixed_dictionaries({}, optional={"header": NAME, "default": NUMBER, "max": NUMBER}),
        "charge": st.fixed_dictionaries({"status": NUMBER | st.lists(NUMBER, max_size=2)}),
        "once": st.fixed_dictionaries({}, optional={"for": NUMBER, "replays": NUMBER, "header": NAME}),
        "safe_concurrency": NUMBER,
        "description": NAME,
        "problem": NUMBER,
    },
)
DOCUMENT = st.fixed_dictionaries(
    {"limits": st.lists(RULE, max_size=1)},
    optional={
        "name": NAME,
        "budget": NUMBER,
        "safe_concurrency": NUMBER,
        "identify": st.dictionaries(KEY_NAME, st.fixed_dictionaries({"header": NAME}, optional={"default": NAME}), max_size=2),
        "exempt": st.lists(EXEMPTION, max_size=2),
        "penalty_box": st.fixed_dictionaries({"after": st.just("100/min"), "for": NUMBER}),
        "headers": st.fixed_dictionaries({"names": st.dictionaries(st.just("limit"), NAME, max_size=1)}),
    },
)


def errors_of(said: Any, folder: Path) -> list[str]:
    path = folder / "whole.yaml"
    path.write_text(json.dumps(said))
    return [one.full_message for one in examine(path)[1].diagnostics() if one.severity == "error"]


@effort(300)
@given(said=DOCUMENT)
@example(said={"limits": [], "exempt": [{}]})
@example(said={"limits": [], "exempt": [{"when": {}}]})
@example(said={"limits": [{"name": "api", "limit": "5/s", "status": 429.0, "alert": 1}]})
@example(said={"limits": [], "budget": 1e-4, "name": 10**19})
@example(said={"limits": [], "headers": {"names": {"limit": "x" * 61}}})
def test_a_whole_document_is_valid_for_both_or_for_neither(folder, said):
    """Numbers of every notation, names and absent selectors: what an editor accepts by the schema, the loader accepts."""
    errors = errors_of(said, folder)
    known = [one for one in errors if any(words in one for words in ONLY_THE_LOADER)]
    if not known:
        assert VALIDATOR.is_valid(said) == (not errors), errors


#: Errors of these documents that only the loader can detect.
ONLY_THE_LOADER = ("any client can write any address", "the value is empty", "'ip' is the client's address")
