"""Every mistake has a file that makes it, with its message beside it; the schema for editors sees what has a form."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest

from limitkeeper import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.reading.diagnostics import ERROR, FORM, WIDTH, YAML, Diagnostic, PolicyError
from limitkeeper.policy.reading.load import examined
from limitkeeper.policy.reading.nodes import plain
from limitkeeper.policy.reading.schema import schema
from limitkeeper.policy.reading.yaml import text_of, tree_of

FOLDER = Path(__file__).parent / "diagnostics"
FILES = sorted(FOLDER.glob("*.yaml"))
VALIDATOR = jsonschema.Draft202012Validator(schema())


def named(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", FILES, ids=named)
def test_each_mistake_is_told_as_expected(path, monkeypatch):
    """A file with a mistake gives exactly the messages that stand beside it, each with its place and its line."""
    monkeypatch.chdir(FOLDER)
    policy, page = examined(path.name, imports=True)
    told = "".join(f"{mistake}\n" for mistake in page.mistakes())
    assert told == path.with_suffix(".txt").read_text()
    assert (policy is None) == any(mistake.severity == ERROR for mistake in page.mistakes())


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_place_of_a_mistake_holds_its_text(path, monkeypatch):
    """The line and column of a mistake are where its text stands, and the caret is under it."""
    monkeypatch.chdir(FOLDER)
    _, page = examined(path.name, imports=True)
    lines = path.read_text(errors="replace").splitlines()
    for mistake in page.mistakes():
        if mistake.kind == YAML or not mistake.line or not mistake.text or "…" in mistake.text:
            continue
        there = lines[mistake.line - 1][mistake.column - 1 :]
        assert mistake.text in there, f"{mistake.place}: {mistake.text!r} is not at {there!r}"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_loading_raises_all_errors_at_once(path, monkeypatch, caplog):
    """`Policy.load` raises one PolicyError with every mistake, or, where there are warnings only, logs each and goes on."""
    monkeypatch.chdir(FOLDER)
    _, page = examined(path.name)
    mistakes = page.mistakes()
    if any(mistake.severity == ERROR for mistake in mistakes):
        with pytest.raises(PolicyError) as caught:
            Policy.load(path.name)
        assert caught.value.mistakes == mistakes
        assert isinstance(caught.value, ConfigurationError)
        for mistake in mistakes:
            assert str(mistake) in str(caught.value)
    else:
        Policy.load(path.name)
        assert [record.getMessage() for record in caplog.records] == [f"{one.place}: {one.said}" for one in mistakes]


@pytest.mark.parametrize("path", FILES, ids=named)
def test_the_schema_refuses_exactly_what_has_the_wrong_form(path, monkeypatch):
    """JSON Schema refuses a file exactly when the loader finds a word or a value of another form in it."""
    monkeypatch.chdir(FOLDER)
    _, page = examined(path.name)
    kinds = {mistake.kind for mistake in page.mistakes()}
    if YAML in kinds:
        return  # no tree to look at
    tree, _ = tree_of(text_of(path.read_bytes()))
    assert VALIDATOR.is_valid(plain(tree)) == (FORM not in kinds)


def test_the_schema_is_one():
    """What `limitkeeper policy schema` prints is valid JSON Schema."""
    jsonschema.Draft202012Validator.check_schema(schema())


def test_every_fixture_has_both_halves():
    """No message stands without its file, and no file without its message."""
    assert {path.stem for path in FOLDER.glob("*.txt")} == {path.stem for path in FILES}
    assert len(FILES) > 100


def test_an_error_counts_its_mistakes():
    """The text of a PolicyError begins with the file and how many mistakes it has."""
    with pytest.raises(PolicyError, match="<text> has 2 mistakes\n<text>:1:1: error: no word 'limit'"):
        Policy.read("limit: 5/s\nlimits: 3\n")


def test_a_long_line_is_cut_around_its_mistake():
    """Of a very long line only the part around the mistake is shown, and the caret is still under it."""
    text = f"limits: [{{name: api, description: {'x' * 5000}, limit: tokn 5/s, message: {'y' * 1000}}}]"
    with pytest.raises(PolicyError) as caught:
        Policy.read(text)
    _, shown, caret = str(caught.value.mistakes[0]).splitlines()
    assert len(shown) < WIDTH + 20
    assert shown[caret.index("^") :].startswith("tokn")


def test_reading_ends_after_a_hundred_mistakes():
    """A file of nothing but mistakes gives a hundred of them and says that there may be more."""
    with pytest.raises(PolicyError, match="has 100 or more mistakes") as caught:
        Policy.read("".join(f"word{i}: 1\n" for i in range(5000)))
    assert len(caught.value.mistakes) == 100


def test_secrets_are_never_shown():
    """A password in a URL, a key and a header's secret value are dotted out of every message, also in their line."""
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
    assert "hunter2" not in repr(caught.value.mistakes)


def test_a_terminal_is_safe_from_a_file():
    """Control characters of a file reach no terminal."""
    with pytest.raises(PolicyError) as caught:
        Policy.read("limits: [{name: \x1b[31mred}]\n")
    assert "\x1b" not in str(caught.value)


def test_a_mistake_is_a_value():
    """Mistakes are equal by value, and tell JSON everything."""
    mistake = Diagnostic("error", "a.yaml", 1, 2, "x", "message", "suggestion")
    assert mistake == Diagnostic("error", "a.yaml", 1, 2, "x", "message", "suggestion")
    assert mistake.as_dict()["column"] == 2
    assert str(mistake) == "a.yaml:1:2: error: message; suggestion"
