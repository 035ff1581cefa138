"""`manage.py check` on a site's limits: every mistake is reported before the first request."""

from __future__ import annotations

import pytest
from django.test.utils import override_settings
from django_asgi import configure
from django_site import OURS

from limitkeeper import MemoryStore
from limitkeeper.policy import Policy
from limitkeeper.web.django import gate
from limitkeeper.web.django.checks import CACHE, CORS, SESSION, USER, check_deployment, check_settings

configure()

ONE = "limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]"


def by_user(facts):
    return facts.raw.user.pk if facts.raw.user.is_authenticated else None


def by_session(facts):
    return getattr(facts.raw, "session").session_key  # noqa: B009 — read by name, as some do


def found(*middleware, **limitkeeper):
    """The ids of the messages for a site with this MIDDLEWARE and this LIMITKEEPER."""
    with override_settings(MIDDLEWARE=list(middleware or (OURS,)), LIMITKEEPER=limitkeeper):
        return check_settings()


def ids(*middleware, **limitkeeper):
    return [message.id for message in found(*middleware, **limitkeeper)]


@pytest.fixture(autouse=True)
def one_worker(monkeypatch):
    """Sets no number of workers."""
    monkeypatch.delenv("WEB_CONCURRENCY", raising=False)


@pytest.fixture
def policy(tmp_path):
    """Writes a policy's file."""

    def write(text):
        path = tmp_path / "limitkeeper.yaml"
        path.write_text(text)
        return path

    return write


def test_a_correct_site_has_no_messages(policy):
    """A policy that loads, with the middleware: no message."""
    assert ids(POLICY=policy(ONE)) == []


def test_a_site_without_a_policy_has_no_messages():
    """Without LIMITKEEPER nothing is wrong: only decorated views are limited."""
    assert ids("django.middleware.common.CommonMiddleware") == []


def test_an_unknown_setting_is_reported():
    """A misspelt name in LIMITKEEPER is an error with the known names."""
    messages = found(POLICI="limitkeeper.yaml")
    assert [message.id for message in messages] == ["limitkeeper.E001"]
    assert "POLICY" in messages[0].msg


def test_a_missing_file_is_reported(tmp_path):
    """A policy that is not there is named with its whole path."""
    messages = found(POLICY=tmp_path / "nowhere.yaml")
    assert [message.id for message in messages] == ["limitkeeper.E002"]
    assert str(tmp_path / "nowhere.yaml") in messages[0].msg


def test_every_mistake_is_a_message_with_its_line(policy):
    """A policy with three mistakes makes three errors, each with file, line and column, and a remedy where there is one."""
    path = policy("limits:\n  - name: api\n    kye: ip\n    limit: token bukket 5/s\n  - name: api\n    limit: 5/s burst 1\n")
    messages = found(POLICY=path)
    assert {message.id for message in messages} == {"limitkeeper.E003"}
    assert [message.msg.split(": ")[0] for message in messages][:2] == [f"{path}:3:5", f"{path}:4:12"]
    assert "key" in (messages[0].hint or "")
    assert all(message.is_serious() for message in messages)


def test_warnings_of_a_policy_are_warnings(policy):
    """Unwise but legal settings are warnings, and the rest is checked."""
    path = policy("safe_concurrency: 4\nlimits: [{name: api, key: ip, limit: token bucket 5/s burst 100}]")
    messages = found(POLICY=path)
    assert [message.id for message in messages] == ["limitkeeper.W001"]
    assert not messages[0].is_serious()


def test_a_policy_without_the_middleware_is_reported(policy):
    """A policy in the settings and no middleware: nothing would be limited."""
    assert ids("django.middleware.common.CommonMiddleware", POLICY=policy(ONE)) == ["limitkeeper.W002"]


def test_a_default_limit_is_checked():
    """A default limit that no middleware applies is a warning, and an invalid one an error."""
    assert ids("django.middleware.common.CommonMiddleware", DEFAULT="5/s") == ["limitkeeper.W002"]
    assert ids("limitkeeper.web.django.RateLimitMiddleware", DEFAULT="5/s") == []
    assert ids("limitkeeper.web.django.RateLimitMiddleware", DEFAULT="5 a second") == ["limitkeeper.E001"]
    assert ids("limitkeeper.web.django.RateLimitMiddleware", DEFAULT=5) == ["limitkeeper.E001"]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize(("call", "brings"), [(by_user, USER), (by_session, SESSION)], ids=["user", "session"])
def test_identities_need_what_brings_them(call, brings, in_file, policy):
    """A callable that reads the user (or the session) needs the middleware below the one that sets it, also one that a file
    names."""
    limits = [{"name": "api", "key": "user | ip", "limit": "5/s"}]
    made = Policy.of(identify={"user": {"call": call}}, limits=limits)
    if in_file:
        named = f"{call.__module__}:{call.__name__}"
        made = policy(f"identify: {{user: {{call: '{named}'}}}}\nlimits: [{{name: api, key: user | ip, limit: 5/s}}]")
    above = found(OURS, brings, POLICY=made)
    assert [message.id for message in above] == ["limitkeeper.W003"]
    assert brings in above[0].msg
    assert ids(POLICY=made) == ["limitkeeper.W003"]
    assert ids(brings, OURS, POLICY=made) == []


def test_a_cache_above_is_reported(policy):
    """A cache above would keep one client's fields for all."""
    assert ids(CACHE, OURS, POLICY=policy(ONE)) == ["limitkeeper.W004"]
    assert ids(OURS, CACHE, POLICY=policy(ONE)) == []


def test_cors_below_is_reported(policy):
    """Scripts can't read a refusal without CORS headers."""
    assert ids(OURS, CORS, POLICY=policy(ONE)) == ["limitkeeper.W005"]
    assert ids(CORS, OURS, POLICY=policy(ONE)) == []


@pytest.mark.parametrize("said", [{}, {"STORE": "memory://"}, {"STORE": MemoryStore()}], ids=["policy", "url", "store"])
def test_memory_and_several_workers_do_not_go_together(policy, monkeypatch, said):
    """Limits in memory and more than one worker: each worker admits the whole limit."""
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    assert ids(POLICY=policy(ONE), **said) == ["limitkeeper.W006"]
    assert ids(POLICY=policy(ONE), STORE="shared:///dev/shm/limits") == []
    monkeypatch.setenv("WEB_CONCURRENCY", "1")
    assert ids(POLICY=policy(ONE), **said) == []


def test_a_deployment_is_checked_for_its_store(policy, monkeypatch):
    """`check --deploy` assumes several workers, unless WEB_CONCURRENCY is one."""

    def deployed():
        with override_settings(LIMITKEEPER={"POLICY": policy(ONE)}):
            return [message.id for message in check_deployment()]

    assert deployed() == ["limitkeeper.W006"]
    monkeypatch.setenv("WEB_CONCURRENCY", "1")
    assert deployed() == []


def test_installed_the_checks_are_run(python, policy):
    """`"limitkeeper.web.django"` in INSTALLED_APPS is enough for `check` to find a mistake."""
    path = policy("limits: [{name: api, kye: ip, limit: 5/s}]")
    done = python(f"""
        import django
        from django.conf import settings
        from django.core.management import call_command

        settings.configure(INSTALLED_APPS=["limitkeeper.web.django"], LIMITKEEPER={{"POLICY": {str(path)!r}}}, MIDDLEWARE=[])
        django.setup()
        call_command("check")
    """)
    assert done.returncode != 0
    assert "limitkeeper.E003" in done.stderr
    assert "limitkeeper.yaml:1:22" in done.stderr


def view(request):
    return None


DEGRADES = "limits: [{name: api, key: ip, limit: 1/min, on_refusal: degrade cached}]"


@pytest.mark.parametrize(
    ("word", "value", "received"),
    [
        ("POLICY", 5, "a path, a Policy or a Gate"),
        ("STORE", 5, "a store or its URL"),
        ("STORE", "memry://", "did you mean memory://?"),
        ("HANDLERS", [view], "a dict of views"),
    ],
)
def test_an_invalid_value_is_reported(policy, word, value, received):
    """An unusable value in LIMITKEEPER is an error of the check, not of the first request."""
    (message,) = found(**{"POLICY": policy(ONE), word: value})
    assert message.id == "limitkeeper.E001"
    assert received in message.msg


@pytest.mark.parametrize("handlers", [{}, {"other": view}, {"cached": "nowhere.view"}, {"cached": 5}])
def test_a_missing_degrade_view_is_reported(policy, handlers):
    """A policy that degrades to a missing view is an error before the first refusal needs it."""
    (message,) = found(POLICY=policy(DEGRADES), HANDLERS=handlers)
    assert message.id == "limitkeeper.E004"
    assert "cached" in message.msg


@pytest.mark.parametrize("cached", [view, f"{__name__}.view"])
def test_a_degrade_view_that_is_there(policy, cached):
    """A view may be given itself, or as an import path: settings are loaded before views."""
    assert ids(POLICY=policy(DEGRADES), HANDLERS={"cached": cached}) == []
    with override_settings(LIMITKEEPER={"POLICY": policy(DEGRADES), "HANDLERS": {"cached": cached}}):
        made = gate()
        assert made.compiled.handlers[made.policy.rules[0].name] is view
