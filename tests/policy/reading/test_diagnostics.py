"""Each diagnostic has a fixture that causes it and its expected text; JSON Schema rejects exactly the schema errors."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
from source_trees import to_python

from limitkeeper import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.reading.diagnostics import ERROR, SCHEMA, SYNTAX, WIDTH, Diagnostic, PolicyError
from limitkeeper.policy.reading.load import examine
from limitkeeper.policy.reading.policy_sections import policy_schema
from limitkeeper.policy.reading.yaml import decode_text, parse_yaml

FOLDER = Path(__file__).parent / "diagnostics"
FILES = sorted(FOLDER.glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(policy_schema())


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_each_fixture_gives_its_expected_diagnostics(path, monkeypatch):
    """A fixture gives exactly the diagnostics in its .txt file, each with position, source line and suggestion."""
    monkeypatch.chdir(FOLDER)
    policy, context = examine(path.name, imports=True)
    text = "".join(f"{one}\n" for one in context.diagnostics())
    assert text == path.with_suffix(".txt").read_text()
    assert (policy is None) == any(one.severity == ERROR for one in context.diagnostics())


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_position_of_a_diagnostic_holds_its_text(path, monkeypatch):
    """Line and column of a diagnostic are those of its text in the file."""
    monkeypatch.chdir(FOLDER)
    _, context = examine(path.name, imports=True)
    lines = path.read_text(errors="replace").splitlines()
    for diagnostic in context.diagnostics():
        if diagnostic.kind == SYNTAX or not diagnostic.line or not diagnostic.text or "…" in diagnostic.text:
            continue
        there = lines[diagnostic.line - 1][diagnostic.column - 1 :]
        assert diagnostic.text in there, f"{diagnostic.location}: {diagnostic.text!r} is not at {there!r}"


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_loading_raises_all_errors_at_once(path, monkeypatch, caplog):
    """`Policy.load` raises one PolicyError with all diagnostics; where there are only warnings it logs each and returns."""
    monkeypatch.chdir(FOLDER)
    _, context = examine(path.name)
    found = context.diagnostics()
    if any(one.severity == ERROR for one in found):
        with pytest.raises(PolicyError) as caught:
            Policy.load(path.name)
        assert caught.value.diagnostics == found
        assert isinstance(caught.value, ConfigurationError)
        for one in found:
            assert str(one) in str(caught.value)
    else:
        Policy.load(path.name)
        assert [record.getMessage() for record in caplog.records] == [f"{one.location}: {one.full_message}" for one in found]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_the_schema_rejects_exactly_the_schema_errors(path, monkeypatch):
    """JSON Schema rejects a file exactly when the loader reports a diagnostic of kind SCHEMA."""
    monkeypatch.chdir(FOLDER)
    _, context = examine(path.name)
    kinds = {one.kind for one in context.diagnostics()}
    if SYNTAX in kinds:
        return  # there is no tree to validate
    tree, _ = parse_yaml(decode_text(path.read_bytes()))
    assert VALIDATOR.is_valid(to_python(tree)) == (SCHEMA not in kinds)


def test_the_schema_is_valid():
    """The output of `limitkeeper policy schema` is valid JSON Schema."""
    jsonschema.Draft202012Validator.check_schema(policy_schema())


def test_every_fixture_has_both_halves():
    """Every .yaml file has a .txt file, and the other way round."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == {path.stem for path in FILES}
    assert len(FILES) > 100


def test_an_error_counts_its_errors():
    """The text of a PolicyError begins with the file and its number of errors."""
    with pytest.raises(PolicyError, match="<text> has 2 errors\n<text>:1:1: error: unknown field 'limit'"):
        Policy.read("limit: 5/s\nlimits: 3\n")


def test_a_long_line_is_cut_around_its_error():
    """Of a very long line only the part around the error is shown, with the caret under it."""
    text = f"limits: [{{name: api, description: {'x' * 5000}, limit: tokn 5/s, message: {'y' * 1000}}}]"
    with pytest.raises(PolicyError) as caught:
        Policy.read(text)
    _, shown, caret = str(caught.value.diagnostics[0]).splitlines()
    assert len(shown) < WIDTH + 20
    assert shown[caret.index("^") :].startswith("tokn")


def test_reading_ends_after_a_hundred_errors():
    """A file of many errors gives a hundred of them and a note that there may be more."""
    with pytest.raises(PolicyError, match="has 100 or more errors") as caught:
        Policy.read("".join(f"word{i}: 1\n" for i in range(5000)))
    assert len(caught.value.diagnostics) == 100


def test_secrets_are_never_shown():
    """A password in a URL, a key and a header's secret value are redacted from every message and source line."""
    text = """
store: redis://user:hunter2@host/0?shares=1
identify:
  a: {jwt: {claim: sub, key: hunter2hunter2, algorithms: [HS256], what: 1}}
exempt:
  - {header: {X-Probe: hunter2}, wat: 1}
limits: [{name: a, limit: 5/s, overrides: {redis_hash: h, url: "redis://:hunter2@x/0", wat: 2}}]
"""
    with pytest.raises(PolicyError) as caught:
        Policy.read(text)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(caught.value.diagnostics)


def test_a_terminal_is_safe_from_a_file():
    """Control characters of a file are not printed."""
    with pytest.raises(PolicyError) as caught:
        Policy.read("limits: [{name: \x1b[31mred}]\n")
    assert "\x1b" not in str(caught.value)


def test_a_diagnostic_is_a_value():
    """Diagnostics are equal by value, and `as_dict` holds all fields."""
    diagnostic = Diagnostic("error", "a.yaml", 1, 2, "x", "message", "suggestion")
    assert diagnostic == Diagnostic("error", "a.yaml", 1, 2, "x", "message", "suggestion")
    assert diagnostic.as_dict()["column"] == 2
    assert str(diagnostic) == "a.yaml:1:2: error: message; suggestion"
