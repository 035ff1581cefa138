"""The tuning loop: proposals from logs and metrics, the text of the changed policy, and that nothing changes by itself."""

from __future__ import annotations

import pytest

from limitkeeper import ConfigurationError, MemoryStore
from limitkeeper.plan import LogReader, replay, suggest_from_log, suggest_from_metrics
from limitkeeper.plan.policy_editor import add_next, remove_rule, replace_scalar, set_field
from limitkeeper.plan.prometheus_text import RuleMetrics, read_metrics
from limitkeeper.plan.request_log import LogEntry
from limitkeeper.plan.suggest import ENFORCE, KEEP, LOWER, RAISE
from limitkeeper.policy import Gate, Policy, WrittenRequest
from limitkeeper.testing import ManualClock

POLICY = """\
name: shop
identify:
  user: {header: X-User}
limits:
  # for all clients
  - name: capacity
    limit: token bucket 100/s burst 50   # measured
  - name: user
    key: user
    limit: "token bucket 5/s burst 10"

  # nobody is near this one
  - {name: api, key: user, limit: token bucket 100/s burst 200}
store: memory://
"""


def log_of(rates, seconds=60):
    """Requests of users u0, u1, … at these rates."""
    return [
        LogEntry(1000.5 + number / rate, 0.1, 200, "GET", "/", "192.0.2.1", {"user": f"u{user}"})
        for user, rate in enumerate(rates)
        for number in range(int(rate * seconds))
    ]


@pytest.fixture
def file(tmp_path):
    found = tmp_path / "shop.yaml"
    found.write_text(POLICY)
    return found


def by_rule(found):
    return {one.rule: one for one in found.suggestions}


def test_a_replay_decides_as_a_gate_does(file):
    """A user at 8/s with a limit of 5/s and a burst of 10 is refused as often as by a gate on the same clock."""
    entries = log_of([8.0])
    counted = replay(entries, Policy.load(file))["user"]
    clock = ManualClock(1000.5)
    gate = Gate(Policy.load(file), store=MemoryStore(clock=clock))
    refused = 0
    for entry in entries:
        clock.advance(entry.time - clock.now_us() / 1e6)
        refused += not gate.ask(WrittenRequest("GET", "/", headers={"X-User": "u0"})).allowed
    assert counted.refused["u0"] == refused > 100
    assert counted.asked["u0"] == 480
    assert 7.5 < max(counted.demands().values()) <= 8.5


def test_times_in_whole_seconds_are_spread(file):
    """Ten requests of one second are no burst of ten: those of 5/s with a burst of 10 all pass for two seconds and more."""
    entries = [LogEntry(1000.0 + second, 0.1, fields={"user": "u"}) for second in range(60) for _ in range(5)]
    assert replay(entries, Policy.load(file))["user"].refused["u"] == 0


def test_a_limit_that_refuses_usual_keys_is_raised(file):
    """Users who need 8/s are refused by 5/s: 10/s with headroom is proposed, in place."""
    file.write_text(POLICY.replace("100/s burst 50", "1000/s burst 50"))
    found = suggest_from_log(file, log_of([8.0] * 30, 20))
    one = by_rule(found)["user"]
    assert (one.action, one.new) == (RAISE, "token bucket 10/s burst 20")
    assert "30 of 30 keys are refused" in one.reason
    assert "    limit: token bucket 10/s burst 20\n" in found.after


def test_one_client_in_a_loop_raises_nothing(file):
    """Of 30 users one loops at 40/s: the limit stays, and the report names the refused user."""
    found = suggest_from_log(file, log_of([*[2.0] * 29, 40.0], 20))
    one = by_rule(found)["user"]
    assert one.action == KEEP
    assert one.refused[0][0] == "u29"
    assert one.refused[0][1] > 500


def test_a_limit_far_above_the_need_goes_to_shadow_first(file):
    """100/s for users who need 2/s: a rule beside it counts 5/s in shadow; forced, the limit itself changes."""
    entries = log_of([2.0] * 30, 20)
    found = suggest_from_log(file, entries)
    assert by_rule(found)["api"].action == LOWER
    rules = {rule.name: rule for rule in Policy.read(found.after).rules}
    assert str(rules["api"].limit[0]) == "token bucket 100/s burst 200"
    assert str(rules["api-next"].limit[0]) == by_rule(found)["api"].new == "token bucket 5/s burst 10"
    assert rules["api-next"].on_refusal.action == "shadow"
    forced = {rule.name: rule for rule in Policy.read(suggest_from_log(file, entries, stage="force").after).rules}
    assert str(forced["api"].limit[0]) == "token bucket 5/s burst 10"
    assert "api-next" not in forced


def test_the_loop_ends_with_the_shadow_rule_in_force(file):
    """A shadow that refuses nothing is enforced in the next round: its limit becomes the rule's, and the copy goes."""
    entries = log_of([2.0] * 30, 20)
    file.write_text(suggest_from_log(file, entries).after)
    second = suggest_from_log(file, entries, stage="force")
    assert by_rule(second)["api"].reason == "its next limit runs in shadow, as 'api-next'"
    assert by_rule(second)["api-next"].action == ENFORCE
    rules = {rule.name: str(rule.limit[0]) for rule in Policy.read(second.after).rules}
    assert rules == {
        "capacity": "token bucket 100/s burst 50",
        "user": "token bucket 5/s burst 10",
        "api": "token bucket 5/s burst 10",
    }
    assert suggest_from_log(file, entries).after == file.read_text()  # in the stage of shadows nothing is enforced


def test_a_shared_limit_follows_a_measured_ceiling_only(file):
    """Without a ceiling a limit for all is left alone; with a lower one it is lowered to it."""
    entries = log_of([2.0] * 30, 20)
    assert by_rule(suggest_from_log(file, entries))["capacity"].action == KEEP
    found = suggest_from_log(file, entries, ceiling=80)
    assert (by_rule(found)["capacity"].action, by_rule(found)["capacity"].new) == (LOWER, "token bucket 80/s burst 40")
    assert by_rule(suggest_from_log(file, entries, ceiling=80.9))["capacity"].new == "token bucket 80/s burst 40"
    busy = log_of([4.0] * 40, 20)
    raised = by_rule(suggest_from_log(file, busy, ceiling=150))["capacity"]
    assert (raised.action, raised.new) == (RAISE, "token bucket 150/s burst 75")


def test_comments_and_other_rules_stay(file):
    """The diff touches the changed rules only."""
    file.write_text(POLICY.replace("100/s burst 50", "1000/s burst 50"))
    found = suggest_from_log(file, log_of([8.0] * 30, 20))
    changed = [line for line in found.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed[:2] == ['-    limit: "token bucket 5/s burst 10"', "+    limit: token bucket 10/s burst 20"]
    assert "  # for all clients\n" in found.after
    assert "burst 50   # measured\n" in found.after


def test_too_few_keys_and_logs_without_times_are_reported(file):
    """Three keys are too few to judge, and a log without times has no rates."""
    assert "only 3 keys were seen" in by_rule(suggest_from_log(file, log_of([8.0] * 3, 20)))["user"].reason
    with pytest.raises(ConfigurationError, match="no request of the log has a time"):
        suggest_from_log(file, [LogEntry(None, 0.1)])


def test_the_examples_log_and_policy_give_a_suggestion(examples):
    """The tutorial's log has one looping user, who is named."""
    found = suggest_from_log(examples / "limitkeeper.yaml", LogReader(examples / "access.log"))
    assert by_rule(found)["api"].action == LOWER
    assert by_rule(found)["api"].refused[0][0] == "user:u99"


# Metrics


def counters(passed=900.0, refused=0.0, near=0.0, shadow=0.0, p95=0.2):
    buckets = {0.2: 0.0, 0.8: 0.0, 2.0: 0.0, 10.0: 1000.0}
    return RuleMetrics(passed, refused, near, shadow, {bound: 1000.0 if bound >= p95 else 0.0 for bound in buckets})


def test_refusals_with_room_below_the_slo_raise_a_keyed_limit(file):
    """10 % refused at a p95 of 200 ms: a fifth more is proposed."""
    one = by_rule(suggest_from_metrics(file, {"user": counters(refused=100.0)}))["user"]
    assert (one.action, one.new) == (RAISE, "token bucket 6/s burst 12")
    assert "10.0% refused" in one.reason


def test_a_broken_slo_lowers_shared_limits_only(file):
    """p95 above 800 ms: the limit for all goes down by a fifth, in shadow first; the limit per user stays."""
    slow = counters(p95=2.0)
    found = suggest_from_metrics(file, {"capacity": slow, "user": slow})
    assert (by_rule(found)["capacity"].action, by_rule(found)["capacity"].new) == (LOWER, "token bucket 80/s burst 40")
    assert by_rule(found)["user"].action == KEEP
    assert "name: capacity-next" in found.after


def test_a_rule_in_shadow_is_enforced_once_it_refuses_nothing(file):
    """At most 0.1 % would be refused: `on_refusal: reject` in stage force. Above, it stays in shadow."""
    file.write_text(POLICY.replace("name: user\n", "name: user\n    on_refusal: shadow\n"))
    found = suggest_from_metrics(file, {"user": counters(shadow=0.5)}, stage="force")
    assert by_rule(found)["user"].action == ENFORCE
    assert "    on_refusal: reject\n" in found.after
    kept = suggest_from_metrics(file, {"user": counters(shadow=50.0)}, stage="force")
    assert by_rule(kept)["user"].action == KEEP
    assert kept.diff == ""


def test_metrics_of_a_running_gate_are_read(tmp_path):
    """The export of LimitkeeperCollector is read: passed, refused, near, and the buckets of response times."""
    from prometheus_client import CollectorRegistry, generate_latest

    from limitkeeper.observe.prometheus import LimitkeeperCollector

    gate = Gate(Policy.read("limits: [{name: api, key: ip, limit: fixed window 3/min}]"), store=MemoryStore(clock=ManualClock()))
    registry = CollectorRegistry()
    LimitkeeperCollector(gate, registry=registry)
    for _ in range(5):
        gate.ask(WrittenRequest("GET", "/")).settle(200)
    page = tmp_path / "metrics.txt"
    page.write_bytes(generate_latest(registry))
    found = read_metrics(str(page))["api"]
    assert (found.passed, found.refused) == (3, 2)
    assert len(found.buckets) > 10


def test_what_is_no_metrics_page_is_refused(tmp_path):
    """A file without limitkeeper's metrics, no such file, and a URL without a server."""
    page = tmp_path / "metrics.txt"
    page.write_text("up 1\n")
    with pytest.raises(ConfigurationError, match="no rule of limitkeeper"):
        read_metrics(str(page))
    for text in ("up {{{\n", 'limitkeeper_response_seconds_bucket{rule="api"} 5\n'):
        page.write_text(text)
        with pytest.raises(ConfigurationError, match="not Prometheus text"):
            read_metrics(str(page))
    with pytest.raises(ConfigurationError, match="can't read the metrics"):
        read_metrics(str(tmp_path / "none"))
    with pytest.raises(ConfigurationError, match="can't read the metrics"):
        read_metrics("http://127.0.0.1:9/metrics")


def test_the_percentile_of_buckets_is_an_upper_bound():
    """Of cumulative buckets the percentile is the bound that covers it; without responses there is none."""
    found = RuleMetrics(buckets={0.2: 90.0, 0.8: 96.0, 2.0: 100.0})
    assert [found.percentile(p) for p in (50, 90, 95, 99)] == [0.2, 0.2, 0.8, 2.0]
    assert RuleMetrics().percentile(95) is None


# The text of a policy


def test_a_copy_in_shadow_follows_its_rule_in_both_styles():
    """A block rule gets a line, a rule in braces a field; an older copy is replaced; the rest of the file stays."""
    for name in ("user", "api"):
        text = add_next(add_next(POLICY, name, "1/s"), name, "token bucket 3/s burst 6")
        rules = {rule.name: rule for rule in Policy.read(text).rules}
        assert list(rules).index(f"{name}-next") == list(rules).index(name) + 1
        assert str(rules[f"{name}-next"].limit[0]) == "token bucket 3/s burst 6"
        assert rules[f"{name}-next"].on_refusal.action == "shadow"
        assert remove_rule(text, f"{name}-next") == POLICY


def test_an_existing_action_is_replaced_in_a_copy():
    """A rule that waits has a copy in shadow."""
    text = POLICY.replace("name: user\n", "name: user\n    on_refusal: wait up to 200ms\n")
    assert "wait" not in add_next(text, "user", "1/s").split("name: user-next")[1].split("name: api")[0]


def test_what_is_no_single_text_is_changed_by_hand():
    """Limits by tier are a mapping, and rules on one line can't be distinguished."""
    tiers = POLICY.replace('"token bucket 5/s burst 10"', "{by: user, a: 1/s, default: 2/s}")
    with pytest.raises(ConfigurationError, match="is a mapping; change it by hand"):
        replace_scalar(tiers, "user", "limit", "1/s")
    with pytest.raises(ConfigurationError, match="share a line"):
        set_field("limits: [{name: a, limit: 1/s}, {name: b, limit: 1/s}]", "a", "limit", "2/s")
