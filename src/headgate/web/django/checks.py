"""What `manage.py check` says about a site's limits, before its first request does.

    headgate.E001   the setting is not what it should be
    headgate.E002   the policy's file is not there
    headgate.E003   a mistake in the policy, with its line (one message each)
    headgate.W001   a mistake that lets the policy pass (one message each)
    headgate.W002   there is a policy, but the middleware is not in MIDDLEWARE
    headgate.W003   an identity reads the user or the session, but the middleware stands above what brings them
    headgate.W004   a cache stands above the middleware and would keep one client's fields for others
    headgate.W005   CORS headers are added below the middleware: scripts could not read a refusal
    headgate.W006   limits in the memory of each of several workers
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as Notice

from ...errors import ConfigurationError
from ...policy.model import Policy
from .site import policy_said, said, site

OURS = "headgate.web.django.RateLimitMiddleware"
OURS_TOO = ("headgate.web.django.middleware.RateLimitMiddleware", OURS)
SESSION = "django.contrib.sessions.middleware.SessionMiddleware"
USER = "django.contrib.auth.middleware.AuthenticationMiddleware"
CACHE = "django.middleware.cache.UpdateCacheMiddleware"
CORS = "corsheaders.middleware.CorsMiddleware"
#: What a callable reads of a request, and who brings it.
BROUGHT = {"user": USER, "auser": USER, "session": SESSION}


def check_settings(app_configs: Any = None, **_: Any) -> list[CheckMessage]:
    """Everything that can be said without knowing where the site will run."""
    try:
        policy = policy_said()
        said()
    except ConfigurationError as error:
        return [Error(str(error), id="headgate.E001")]
    if isinstance(policy, Path) and not policy.is_file():
        hint = "A relative path starts at BASE_DIR."
        return [Error(f"The policy {policy} is not there.", hint=hint, id="headgate.E002")]
    found = list(mistakes(policy))
    if any(message.id == "headgate.E003" for message in found):
        return found
    return [*found, *places(), *workers(many_workers())]


def check_deployment(app_configs: Any = None, **_: Any) -> list[CheckMessage]:
    """`check --deploy`: a site in production has several workers, unless somebody says otherwise."""
    if many_workers() or check_settings():
        return []
    return list(workers(os.environ.get("WEB_CONCURRENCY") != "1"))
