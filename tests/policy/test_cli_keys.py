"""`limitkeeper keys list`, `show` and `reset`: the keys of a rule in a store."""

from __future__ import annotations

import json
import os
from contextlib import closing

import pytest

from limitkeeper.cli import main
from limitkeeper.policy import Gate, WrittenRequest
from limitkeeper.service.audit_log import AuditLog
from limitkeeper.stores import store_from_url
from servers.valkey import Valkey

LIMITS = """\
identify: {user: {header: X-User}, plan: {header: X-Plan, default: free}}
limits:
  - {name: api, key: user | ip, limit: {by: plan, free: token bucket 1/d burst 4, pro: token bucket 1/d burst 8}}
  - {name: both, match: /both, key: ip, limit: token bucket 1/d burst 4; fixed window 100/d align first}
"""


@pytest.fixture
def keys(tmp_path, monkeypatch, capsys):
    """Runs `limitkeeper keys` for a policy on a shared file; returns the exit code and the output."""
    monkeypatch.chdir(tmp_path)
    write_policy(tmp_path, f"shared://{tmp_path}/cells")

    def run(*words: str) -> tuple[int, str]:
        return main(["keys", *words]), capsys.readouterr().out

    return run


def write_policy(folder, url: str) -> None:
    (folder / "limitkeeper.yaml").write_text(f"store: {url}\n{LIMITS}")


def ask(**counts: int) -> None:
    """So many requests of each user; those whose names begin with p have the plan pro."""
    with Gate("limitkeeper.yaml") as gate:
        for user, count in counts.items():
            for _ in range(count):
                plan = "pro" if user.startswith("p") else "free"
                assert gate.ask(WrittenRequest("GET", "/", headers={"X-User": user, "X-Plan": plan})).allowed


def test_the_keys_of_a_rule_are_listed(keys):
    """The list shows every key that has state, under the limit that it used; those with the least left come first."""
    ask(a=1, b=4, paul=4)
    code, out = keys("list", "api")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["user:b", "user:paul", "user:a"]
    assert "0 of 4 left  as new in " in out.splitlines()[0]
    assert "token bucket 1/d burst 8  4 of 8 left" in out.splitlines()[1]


def test_control_characters_of_keys_are_shown_as_escapes(keys):
    """A client chooses its key; its control characters must not reach an operator's terminal."""
    ask(**{"a\x1b[2J\r\n\u202eb": 1})
    assert keys("list", "api")[1].startswith("user:a\\x1b[2J \\u202eb  ")


def test_the_key_that_verifies_tokens_is_not_needed(keys, tmp_path):
    """An operator's host need not have the key file of the policy."""
    ask(a=1)
    policy = tmp_path / "limitkeeper.yaml"
    token = "identify: {token: {jwt: {claim: sub, key_file: absent.pub, algorithms: [RS256]}}, user"
    policy.write_text(policy.read_text().replace("identify: {user", token))
    assert keys("list", "api")[1].startswith("user:a  ")


def test_a_list_is_bounded_and_filtered(keys):
    """--first bounds the list and prints how many are left out; --match filters by pattern."""
    ask(a=1, b=2, c=3)
    assert keys("list", "api", "--first", "1")[1].splitlines()[1:] == ["and 2 more; see --first and --match"]
    assert [one["key"] for one in json.loads(keys("list", "api", "--match", "user:[ab]", "--json")[1])] == ["user:b", "user:a"]
    assert keys("list", "api", "--match", "ip:*") == (0, "api: no key has state\n")


def test_one_key_is_shown_under_each_limit(keys):
    """`show` prints the state of a key under all limits of the rule, and charges nothing."""
    with Gate("limitkeeper.yaml") as gate:
        gate.ask(WrittenRequest("GET", "/both", peer="203.0.113.9"))
    for _ in range(2):
        found = json.loads(keys("show", "both", "203.0.113.9", "--json")[1])
        assert [(one["limit"], one["remaining"], one["of"]) for one in found] == [
            ("token bucket 1/d burst 4", 3, 4),
            ("fixed window 100/d align first", 99, 100),
        ]
        assert all(0 < one["reset_after"] <= 86_400 and one["retry_after"] == 0 for one in found)


def test_a_reset_key_starts_as_new(keys):
    """`reset` deletes the state of this key under all limits, and leaves others alone."""
    ask(a=4, paul=8, b=4)
    assert keys("reset", "api", "user:paul") == (0, "api: user:paul starts as new\n")
    assert keys("reset", "api", "user:a") == (0, "api: user:a starts as new\n")
    assert [one["key"] for one in json.loads(keys("list", "api", "--json")[1])] == ["user:b"]
    ask(a=4, paul=8)


def test_an_override_at_run_time_is_shown_and_reset(keys):
    """`show` and `reset` include the limits that an operator has set for the key, of another algorithm than the rule's."""
    assert keys("override", "api", "user:a", "fixed window 2/d", "--policy", "limitkeeper.yaml")[0] == 0
    ask(a=2)
    assert ("fixed window 2/d", 0) in [
        (one["limit"], one["remaining"]) for one in json.loads(keys("show", "api", "user:a", "--json")[1])
    ]
    keys("reset", "api", "user:a")
    ask(a=2)


def test_a_user_without_a_name_may_reset_and_override(keys, tmp_path, monkeypatch):
    """The audit log has the number of a user without a name: containers often run with such users."""

    def unknown(number):
        raise KeyError(f"uid not found: {number}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert keys("override", "api", "user:a", "blocked", "--policy", "limitkeeper.yaml")[0] == 0
    assert keys("reset", "api", "user:a") == (0, "api: user:a starts as new\n")
    with closing(store_from_url(f"shared://{tmp_path}/cells")) as store:
        entries = AuditLog(store.open_hash("audit:limitkeeper"), lambda: 0).entries()
    assert {one["by"] for one in entries} == {f"uid {os.getuid()}"}


def test_mistakes(keys, capsys):
    """An unknown rule, a store in the memory of another process and a missing policy are errors with the remedy."""
    for words, message in (
        (("list", "apx"), "the policy 'limitkeeper' has no rule 'apx'; it has: api, both"),
        (("list", "api", "--store", "memory://"), "are in the memory of their process; write --store URL"),
        (("show", "api", "user:a", "--policy", "nowhere.yaml"), "nowhere.yaml: no such file; name the policy with --policy FILE"),
    ):
        assert main(["keys", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.server
def test_keys_in_redis(keys, tmp_path):
    """The same commands work on a Redis server, with its URL on the command line; the audit log has the reset."""
    with Valkey() as server:
        url = f"{server.url}?timeout=60s"
        write_policy(tmp_path, f"{url}\nbudget: 30s")
        ask(a=1, b=4)
        write_policy(tmp_path, "memory://")
        keys("override", "api", "user:b", "fixed window 9/d", "--store", url, "--policy", "limitkeeper.yaml")
        assert "fixed window 9/d" in keys("show", "api", "user:b", "--store", url)[1]
        keys("override", "api", "user:b", "--remove", "--store", url, "--policy", "limitkeeper.yaml")
        assert [one["key"] for one in json.loads(keys("list", "api", "--json", "--store", url)[1])] == ["user:b", "user:a"]
        keys("reset", "api", "user:b", "--store", url)
        assert json.loads(keys("show", "api", "user:b", "--json", "--store", url)[1])[0]["remaining"] == 4
        with closing(store_from_url(url)) as store:
            entry = AuditLog(store.open_hash("audit:limitkeeper"), lambda: 0).entries()[0]
        assert (entry["action"], entry["limit"], entry["key"]) == ("reset", "api", "user:b")
