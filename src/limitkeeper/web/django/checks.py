"""What `manage.py check` says about a site's limits, before its first request does.

limitkeeper.E001   the setting is not what it should be
limitkeeper.E002   the policy's file is not there
limitkeeper.E003   a mistake in the policy, with its line (one message each)
limitkeeper.E004   the policy names a function that is not there: a degrade handler, an identity's callable
limitkeeper.W001   a mistake that lets the policy pass (one message each)
limitkeeper.W002   there is a policy, but the middleware is not in MIDDLEWARE
limitkeeper.W003   an identity reads the user or the session, but the middleware stands above what brings them
limitkeeper.W004   a cache stands above the middleware and would keep one client's fields for others
limitkeeper.W005   CORS headers are added below the middleware: scripts could not read a refusal
limitkeeper.W006   limits in the memory of each of several workers
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Notice

from ...errors import ConfigurationError
from ...policy.compiled_policy import CompiledPolicy
from ...policy.gate import Gate
from ...policy.identity.identify import Called
from ...policy.model import Policy
from ...policy.reading.diagnostics import ERROR, Diagnostic
from ...policy.reading.load import examine
from ...stores.memory import MemoryStore
from .settings import handlers_said, policy_said, said

OURS = ("limitkeeper.web.django.RateLimitMiddleware", "limitkeeper.web.django.middleware.RateLimitMiddleware")
SESSION = "django.contrib.sessions.middleware.SessionMiddleware"
USER = "django.contrib.auth.middleware.AuthenticationMiddleware"
CACHE = "django.middleware.cache.UpdateCacheMiddleware"
CORS = "corsheaders.middleware.CorsMiddleware"
#: What a callable reads of a request, and who brings it.
BROUGHT = {"user": USER, "auser": USER, "session": SESSION}


def check_settings(app_configs: Any = None, **_: Any) -> list[CheckMessage]:
    """Everything that can be said without knowing where the site will run."""
    try:
        said()
        policy, found = read()
    except ConfigurationError as error:
        return [Error(str(error), id="limitkeeper.E001")]
    if any(message.id in ("limitkeeper.E002", "limitkeeper.E003") for message in found):
        return found
    return [*found, *functions(policy), *order(policy), *memory(policy, several_workers())]


def check_deployment(app_configs: Any = None, **_: Any) -> list[CheckMessage]:
    """`check --deploy`: a site in production has several workers, unless WEB_CONCURRENCY says 1."""
    try:
        policy, _found = read()
    except ConfigurationError:
        return []  # said already
    return list(memory(policy, os.environ.get("WEB_CONCURRENCY") is None))


def read() -> tuple[Policy | None, list[CheckMessage]]:
    """The policy (None: there is none, or none that could be used) and what is wrong with it."""
    policy = policy_said()
    if isinstance(policy, Gate):
        return policy.policy, []
    if not isinstance(policy, (str, Path)):
        return policy, []
    if not Path(policy).is_file():
        hint = "A relative path starts at BASE_DIR, or where the process was started when there is none."
        return None, [Error(f"The policy {policy} is not there.", hint=hint, id="limitkeeper.E002")]
    made, context = examine(policy)
    return made, [complaint(mistake) for mistake in context.diagnostics()]


def complaint(mistake: Diagnostic) -> CheckMessage:
    """One mistake of a policy's file, as Django shows it: its place in front, what to write instead as the hint."""
    kind, name = (Error, "limitkeeper.E003") if mistake.severity == ERROR else (Notice, "limitkeeper.W001")
    return kind(f"{mistake.location}: {mistake.message}", hint=mistake.suggestion or None, id=name)


def functions(policy: Policy | None) -> Iterator[CheckMessage]:
    """Whether everything that the policy names can be called."""
    if policy is None or isinstance(policy_said(), Gate):  # a gate has found all of it
        return
    try:
        CompiledPolicy(policy, handlers_said()).close()
    except ConfigurationError as error:
        hint = 'Views are given as LIMITKEEPER = {"HANDLERS": {"cached": "shop.views.cached"}}.'
        yield Error(str(error), hint=hint, id="limitkeeper.E004")


def order(policy: Policy | None) -> Iterator[CheckMessage]:
    """Whether the middleware stands where its policy can be asked, and where its answers stay whole."""
    middleware = list(getattr(settings, "MIDDLEWARE", None) or ())
    place = next((number for number, name in enumerate(middleware) if name in OURS), None)
    if policy is None:
        return
    if place is None:
        yield Notice(
            "LIMITKEEPER names a policy, but nothing asks it.", hint=f"Put {OURS[0]!r} into MIDDLEWARE.", id="limitkeeper.W002"
        )
        return
    for read, name in sorted(read_by(policy)):
        if name not in middleware[:place]:
            yield Notice(
                f"The policy reads request.{read}, which {name} brings, but RateLimitMiddleware stands above it.",
                hint=f"Put {OURS[0]!r} below {name!r}, or know clients by header, token or address.",
                id="limitkeeper.W003",
            )
    if CACHE in middleware[:place]:
        yield Notice(
            "UpdateCacheMiddleware stands above RateLimitMiddleware and would keep the fields of one client for others.",
            hint=f"Put {OURS[0]!r} above {CACHE!r}.",
            id="limitkeeper.W004",
        )
    if CORS in middleware[place:]:
        yield Notice(
            "CorsMiddleware stands below RateLimitMiddleware: a refusal has no CORS headers, and scripts can't read it.",
            hint=f"Put {CORS!r} above {OURS[0]!r}.",
            id="limitkeeper.W005",
        )


def read_by(policy: Policy) -> set[tuple[str, str]]:
    """What the policy's callables read of a request that some middleware must have brought, by the names in their code."""
    calls: list[Any] = [identity.call for identity in policy.identify.values() if isinstance(identity, Called)]
    calls += [one for rule in policy.rules for one in (rule.cost.call, rule.charge.call) if one is not None]
    found: set[tuple[str, str]] = set()
    for call in calls:
        code = getattr(inspect.unwrap(call) if callable(call) else call, "__code__", None)
        names = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))} if code is not None else set()
        found |= {(name, BROUGHT[name]) for name in names if name in BROUGHT}
    return found


def several_workers() -> bool:
    """What gunicorn and uvicorn take for the number of their workers."""
    said = os.environ.get("WEB_CONCURRENCY", "")
    return said.isdecimal() and int(said) > 1


def memory(policy: Policy | None, workers: bool) -> Iterator[CheckMessage]:
    """Whether every worker would count for itself."""
    store = said().get("STORE", None if policy is None else policy.store)
    if workers and (isinstance(store, MemoryStore) or (isinstance(store, str) and store.startswith("memory:"))):
        yield Notice(
            "The limits are kept in the memory of each worker: several workers let pass several times the limit.",
            hint='Set "STORE": "shared:///run/shop.limits" for the workers of one host, or "redis://…" for several.',
            id="limitkeeper.W006",
        )
