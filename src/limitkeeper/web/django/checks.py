"""System checks of a site's limits, for `manage.py check`.

limitkeeper.E001   the setting is invalid
limitkeeper.E002   the policy's file does not exist
limitkeeper.E003   an error in the policy, with its line (one message each)
limitkeeper.E004   the policy names a function that does not exist: a degrade handler, an identity's callable
limitkeeper.W001   a warning about the policy (one message each)
limitkeeper.W002   there is a policy or a default limit, but the middleware is not in MIDDLEWARE
limitkeeper.W003   an identity reads the user or the session, but the middleware stands above the one that sets them
limitkeeper.W004   a cache stands above the middleware and would store one client's fields for others
limitkeeper.W005   CORS headers are added below the middleware: scripts could not read a refusal
limitkeeper.W006   limits in the memory of each of several workers
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning

from ...errors import ConfigurationError
from ...policy.compiled_policy import CompiledPolicy
from ...policy.gate import Gate
from ...policy.model import Policy
from ...policy.reading.diagnostics import ERROR, NOTE, Diagnostic
from ...policy.reading.import_string import ImportString, callables_of
from ...policy.reading.load import examine
from ...stores.memory import MemoryStore
from ..handler_limit import default_limit
from .settings import import_handlers, read_policy, read_setting

MIDDLEWARE = ("limitkeeper.web.django.RateLimitMiddleware", "limitkeeper.web.django.middleware.RateLimitMiddleware")
SESSION = "django.contrib.sessions.middleware.SessionMiddleware"
USER = "django.contrib.auth.middleware.AuthenticationMiddleware"
CACHE = "django.middleware.cache.UpdateCacheMiddleware"
CORS = "corsheaders.middleware.CorsMiddleware"
#: Attributes of a request that a callable may read, and the middleware that sets them.
SET_BY = {"user": USER, "auser": USER, "session": SESSION}


def check_settings(app_configs: object = None, **_: object) -> list[CheckMessage]:
    """All checks that do not depend on the deployment."""
    try:
        default_limit(read_setting().get("DEFAULT"))
        policy, found = check_policy()
    except ConfigurationError as error:
        return [Error(str(error), id="limitkeeper.E001")]
    if any(message.id in ("limitkeeper.E002", "limitkeeper.E003") for message in found):
        return found
    workers = os.environ.get("WEB_CONCURRENCY", "")  # gunicorn and uvicorn read it too
    several = workers.isdecimal() and int(workers) > 1
    return [*found, *check_functions(policy), *check_order(policy), *check_memory(policy, several)]


def check_deployment(app_configs: object = None, **_: object) -> list[CheckMessage]:
    """`check --deploy`: a site in production has several workers, unless WEB_CONCURRENCY is 1."""
    try:
        policy, _found = check_policy()
    except ConfigurationError:
        return []  # reported by check_settings
    return list(check_memory(policy, os.environ.get("WEB_CONCURRENCY") is None))


def check_policy() -> tuple[Policy | None, list[CheckMessage]]:
    """The policy (None: there is none, or it is invalid) and its diagnostics."""
    policy = read_policy()
    if isinstance(policy, Gate):
        return policy.policy, []
    if not isinstance(policy, (str, Path)):
        return policy, []
    if not Path(policy).is_file():
        hint = "A relative path starts at BASE_DIR, or at the working directory when there is none."
        return None, [Error(f"The policy {policy} does not exist.", hint=hint, id="limitkeeper.E002")]
    made, context = examine(policy)
    return made, [check_message(one) for one in context.diagnostics() if one.severity != NOTE]


def check_message(diagnostic: Diagnostic) -> CheckMessage:
    """A diagnostic of a policy file as a check message: its place in front, its suggestion as the hint."""
    kind, number = (Error, "limitkeeper.E003") if diagnostic.severity == ERROR else (CheckWarning, "limitkeeper.W001")
    return kind(f"{diagnostic.location}: {diagnostic.message}", hint=diagnostic.suggestion or None, id=number)


def check_functions(policy: Policy | None) -> Iterator[CheckMessage]:
    """Whether all functions that the policy names exist."""
    if policy is None or isinstance(read_policy(), Gate):  # a gate has imported them
        return
    try:
        CompiledPolicy(policy, import_handlers()).close()
    except ConfigurationError as error:
        hint = 'Views are given as LIMITKEEPER = {"HANDLERS": {"cached": "shop.views.cached"}}.'
        yield Error(str(error), hint=hint, id="limitkeeper.E004")


def check_order(policy: Policy | None) -> Iterator[CheckMessage]:
    """Whether the middleware stands below what its policy reads, and where its responses stay intact."""
    middleware = list(getattr(settings, "MIDDLEWARE", None) or ())
    place = next((number for number, name in enumerate(middleware) if name in MIDDLEWARE), None)
    ours = MIDDLEWARE[0]
    names = "a policy" if policy is not None else "a default limit" if read_setting().get("DEFAULT") is not None else ""
    if place is None and names:
        hint = f"Put {ours!r} into MIDDLEWARE."
        yield CheckWarning(f"LIMITKEEPER names {names}, but no middleware applies it.", hint=hint, id="limitkeeper.W002")
    if place is None or policy is None:
        return
    for attribute, name in sorted(attributes_read(policy)):
        if name not in middleware[:place]:
            yield CheckWarning(
                f"The policy reads request.{attribute}, which {name} sets, but RateLimitMiddleware stands above it.",
                hint=f"Put {ours!r} below {name!r}, or identify clients by header, token or address.",
                id="limitkeeper.W003",
            )
    if CACHE in middleware[:place]:
        yield CheckWarning(
            "UpdateCacheMiddleware stands above RateLimitMiddleware and would store the fields of one client for others.",
            hint=f"Put {ours!r} above {CACHE!r}.",
            id="limitkeeper.W004",
        )
    if CORS in middleware[place:]:
        yield CheckWarning(
            "CorsMiddleware stands below RateLimitMiddleware: a refusal has no CORS headers, and scripts can't read it.",
            hint=f"Put {CORS!r} above {ours!r}.",
            id="limitkeeper.W005",
        )


def attributes_read(policy: Policy) -> set[tuple[str, str]]:
    """The attributes of a request that the policy's callables read and a middleware sets, by the names in their code."""
    found: set[tuple[str, str]] = set()
    for call, parameters in callables_of(policy):
        with suppress(ConfigurationError):  # E004
            call = call.load() if isinstance(call, ImportString) and parameters is not None else call
        code = getattr(inspect.unwrap(call) if callable(call) else call, "__code__", None)
        names = {*code.co_names, *(one for one in code.co_consts if isinstance(one, str))} if code is not None else set()
        found |= {(name, SET_BY[name]) for name in names if name in SET_BY}
    return found


def check_memory(policy: Policy | None, several_workers: bool) -> Iterator[CheckMessage]:
    """Whether every worker would count for itself."""
    store = read_setting().get("STORE", None if policy is None else policy.store)
    if several_workers and (isinstance(store, MemoryStore) or (isinstance(store, str) and store.startswith("memory:"))):
        yield CheckWarning(
            "The limits are kept in the memory of each worker: several workers admit several times the limit.",
            hint='Set "STORE": "shared:///dev/shm/shop.limits" for the workers of one host, or "redis://…" for several.',
            id="limitkeeper.W006",
        )
