"""What HEADGATE in the settings says, and the one gate of this process that comes of it.

HEADGATE = {
    "POLICY": "headgate.yaml",      # a path (from BASE_DIR), a Policy or a Gate; without it only decorated views are limited
    "STORE": "redis://…",           # a URL or a Store; default: what the policy says
    "HANDLERS": {"cached": view},   # what `degrade cached` means
}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed

from ...errors import ConfigurationError
from ...policy.gate import Gate, gate_of
from ...stores.urls import store_from_url
from ..routes import Site

WORDS = ("HANDLERS", "POLICY", "STORE")

_making = Lock()
_site: Site | None = None


def said() -> Mapping[str, Any]:
    """The setting as it stands."""
    found = getattr(settings, "HEADGATE", {})
    if not isinstance(found, Mapping):
        raise ConfigurationError(f'HEADGATE must be a dict such as {{"POLICY": "headgate.yaml"}}, not {found!r}')
    unknown = sorted(str(word) for word in found if word not in WORDS)
    if unknown:
        raise ConfigurationError(f"HEADGATE has no word {', '.join(map(repr, unknown))}: it knows {', '.join(WORDS)}")
    return found


def policy_said() -> Any:
    """The policy that is asked for; a relative path starts at BASE_DIR."""
    policy = said().get("POLICY")
    base = getattr(settings, "BASE_DIR", None)
    return Path(base) / policy if isinstance(policy, (str, Path)) and base is not None else policy


def site() -> Site:
    """The site of this process, made when it is first asked for. Every middleware and every view shares it."""
    global _site
    if _site is None:
        with _making:
            if _site is None:
                _site = made()
    return _site


def made() -> Site:
    words, policy = said(), policy_said()
    store = words.get("STORE")
    store = store_from_url(store) if isinstance(store, str) else store
    handlers = words.get("HANDLERS")
    return Site(None if policy is None else gate_of(policy, store=store, handlers=handlers), store, handlers)


def gate() -> Gate:
    """The gate of the policy in the settings: `gate().tally()`."""
    found = site().gate
    if found is None:
        raise ConfigurationError('there is no policy: set HEADGATE = {"POLICY": "headgate.yaml"}')
    return found


def forget(*, setting: str, **_: Any) -> None:
    """Tests that override HEADGATE get a gate of their own."""
    global _site
    if setting == "HEADGATE":
        _site = None


setting_changed.connect(forget, dispatch_uid="headgate")
