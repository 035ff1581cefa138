"""Settings that limit nothing, or something unintended: an error when given, or reported by `policy check`."""

from __future__ import annotations

import pytest

from limitkeeper import FixedWindow, LeakyBucket, TokenBucket
from limitkeeper.errors import ConfigurationError
from limitkeeper.policy import Policy
from limitkeeper.policy.application_overrides import CalledOverrides
from limitkeeper.policy.callback_errors import CallbackErrors
from limitkeeper.web import fastapi, flask, starlette
from limitkeeper.web.django import limit as django_limit


def no_parameter():
    return "key"


def three_parameters(one, two, three):
    return 1


async def async_without_parameter():
    return "key"


class Method:
    def __call__(self):
        return "key"


def policy(**rule):
    return Policy.of(limits=[{"name": "api", "key": "ip", "limit": "fixed window 5/min", **rule}])


WRONG = [no_parameter, three_parameters, Method(), lambda: "key"]


@pytest.mark.parametrize("call", WRONG)
@pytest.mark.parametrize(
    "give",
    [
        lambda call: Policy.of(identify={"user": {"call": call}}),
        lambda call: policy(cost=call),
        lambda call: policy(cost={"call": call}),
        lambda call: policy(charge=call),
        lambda call: policy(overrides={"call": call}),
        lambda call: fastapi.RateLimit("5/s", key=call),
        lambda call: fastapi.RateLimit("5/s", cost=call),
        lambda call: starlette.limit("5/s", key=call),
        lambda call: flask.RateLimit().limit("5/s", key=call)(lambda: ""),
        lambda call: django_limit("5/s", key=call)(lambda request: ""),
    ],
)
def test_a_function_with_other_parameters_is_found_when_it_is_given(call, give):
    """An error names the function, its parameters and the arguments that it will get; no request is needed for it."""
    with pytest.raises(ConfigurationError, match=r"can't be called with \(.*\): .*; write a function of \("):
        give(call)


def test_an_async_key_is_checked_as_well():
    """Starlette and FastAPI await keys; the number of parameters is the same."""
    with pytest.raises(ConfigurationError, match=r"async_without_parameter\(\) can't be called with \(request\)"):
        fastapi.RateLimit("5/s", key=async_without_parameter)


@pytest.mark.parametrize("call", [len, str, lambda *_: 1, lambda request, more=None: 1])
def test_functions_that_can_be_called_are_accepted(call):
    """Optional and variable parameters, classes and functions in C are no error."""
    assert policy(cost=call).rules[0].cost.call is call


def test_a_traceback_is_logged_once(caplog):
    """The lines that raised are in the first line of the log that has an exception, and in no other; its text in none."""
    errors = CallbackErrors(every_us=0)
    errors.report("returned a list")
    for number in range(3):
        try:
            raise ValueError(f"of client {number}")
        except ValueError as error:
            errors.report("raised %s", type(error).__name__, raised=error)
    assert errors.count == 4
    assert ["raise ValueError(f" in record.getMessage() for record in caplog.records] == [False, True, False, False]
    assert "of client 1" not in caplog.text


@pytest.mark.parametrize(
    ("limit", "override", "expected"),
    [
        ("fixed window 5/min", "100/min", FixedWindow("100/min")),
        ("leaky bucket 5/min capacity 5", "100/min capacity 20", LeakyBucket("100/min", 20)),
        ("5/min", "100/min", TokenBucket("100/min")),
        ("fixed window 5/min", "token bucket 100/min", TokenBucket("100/min")),
        ("fixed window 5/min; sliding window log 9/min", "100/min", TokenBucket("100/min")),
        ({"by": "ip", "10.0.0.1": "fixed window 9/s", "default": "fixed window 5/s"}, "100/min", FixedWindow("100/min")),
    ],
)
def test_an_override_has_the_algorithm_of_its_rule(limit, override, expected):
    """A rate alone is of the rule's algorithm, where it has one; in both forms, and at run time."""
    written = policy(limit=limit, override={"10.0.0.9": override}).rules[0].override
    listed = policy(limit=limit, override=[{"key": "10.0.0.9", "limit": [override]}]).rules[0].override
    assert written == listed == (("10.0.0.9", (expected,)),)
    overrides = policy(limit=limit, overrides={"call": lambda key: override}).rules[0].overrides
    assert isinstance(overrides, CalledOverrides)
    assert overrides.get("10.0.0.9") == (expected,)


def test_an_override_that_does_not_fit_the_algorithm_is_an_error():
    """It names the key: a leaky bucket needs a capacity, a window has no burst."""
    with pytest.raises(ConfigurationError, match=r"override\.b: error: .*needs a capacity"):
        policy(limit="leaky bucket 5/min capacity 5", override={"b": "100/min"})
    with pytest.raises(ConfigurationError, match="unknown option 'burst'"):
        policy(override={"b": "100/min burst 5"})


@pytest.mark.parametrize(("key", "received"), [("", True), (", key: everyone", False), (", key: ip", False)])
def test_check_names_rules_without_a_key(key, received, tmp_path, capsys):
    """One limit for all requests is noted, unless the rule declares that as intended."""
    from limitkeeper.cli import main

    path = tmp_path / "policy.yaml"
    path.write_text(f"limits: [{{name: api, limit: 5/s{key}}}]")
    assert main(["policy", "check", "--strict", str(path)]) == 0
    assert ("rule 'api' has no key: all requests share its limit" in capsys.readouterr().out) == received


def read(store: str) -> Policy:
    return Policy.read(f"store: {store}\nlimits: [{{name: api, limit: 5/s}}]")


def test_a_store_may_be_named_by_environment_variables(monkeypatch):
    """`${NAME}` is replaced, alone and within a URL."""
    monkeypatch.setenv("REDIS_URL", "redis://db:6379/1\n")
    monkeypatch.setenv("PASSWORD", "hunter22")
    assert read("${REDIS_URL}").store == "redis://db:6379/1"
    assert read("redis://:${PASSWORD}@db:6379").store == "redis://:hunter22@db:6379"


@pytest.mark.parametrize("store", ["redis://:${PASSWORD}@db:port", "${PASSWORD}", "redis://db?lease=${PASSWORD}", "${URL}"])
def test_no_error_shows_the_value_of_a_variable(store, monkeypatch):
    """It may be a secret, whatever is wrong with the URL."""
    monkeypatch.setenv("PASSWORD", "hunter22")
    monkeypatch.setenv("URL", "redis://:hunter22@db:port")
    with pytest.raises(ConfigurationError) as caught:
        read(store)
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_an_error(value, monkeypatch):
    """The remedy names it."""
    monkeypatch.delenv("NO_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_URL", value)
    with pytest.raises(ConfigurationError, match="1:8: error: the environment variable NO_URL is not set; set NO_URL"):
        read("${NO_URL}")
