"""What LIMITKEEPER in the settings says, and the one gate of this process that comes of it.

LIMITKEEPER = {
    "POLICY": "limitkeeper.yaml",      # a path (from BASE_DIR), a Policy or a Gate; without it only decorated views are limited
    "STORE": "redis://…",           # a URL or a Store; default: what the policy says
    "HANDLERS": {"cached": "shop.views.cached"},    # what `degrade cached` means: a view, or where it is
}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import NoneType
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ...errors import ConfigurationError
from ...policy.gate import Gate, gate_of
from ...policy.model import Policy
from ...stores import Store
from ...stores.urls import maker_of, store_from_url
from ..view_limit import ViewLimits

WORDS = ("HANDLERS", "POLICY", "STORE")
#: What each of them may be, and how that is said.
KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "HANDLERS": ((Mapping,), "a dict of views by their names"),
    "POLICY": ((str, Path, Policy, Gate), "a path, a Policy or a Gate"),
    "STORE": ((str, Store), "a store or its URL"),
}

_making = Lock()
_site: ViewLimits | None = None


def said() -> Mapping[str, Any]:
    """The setting as it stands."""
    found = getattr(settings, "LIMITKEEPER", {})
    if not isinstance(found, Mapping):
        raise ConfigurationError(f'LIMITKEEPER must be a dict such as {{"POLICY": "limitkeeper.yaml"}}, not {found!r}')
    unknown = sorted(str(word) for word in found if word not in WORDS)
    if unknown:
        raise ConfigurationError(f"LIMITKEEPER has no word {', '.join(map(repr, unknown))}: it knows {', '.join(WORDS)}")
    for word, (kinds, meant) in KINDS.items():
        if not isinstance(found.get(word), (*kinds, NoneType)):
            raise ConfigurationError(f"LIMITKEEPER[{word!r}] must be {meant}, not {found[word]!r}")
    if isinstance(found.get("STORE"), str):
        maker_of(found["STORE"].partition(":")[0], found["STORE"])
    return found


def policy_said() -> Any:
    """The policy that is asked for; a relative path starts at BASE_DIR."""
    policy = said().get("POLICY")
    base = getattr(settings, "BASE_DIR", None)
    return Path(base) / policy if isinstance(policy, (str, Path)) and base is not None else policy


def handlers_said() -> dict[str, Any]:
    """The views of `degrade NAME`, imported where the settings, which views are imported after, only say where they are."""
    found: dict[str, Any] = {}
    for name, view in (said().get("HANDLERS") or {}).items():
        try:
            found[name] = import_string(view) if isinstance(view, str) else view
        except ImportError as error:
            raise ConfigurationError(f"LIMITKEEPER['HANDLERS'][{name!r}]: {error}") from error
        if not callable(found[name]):
            raise ConfigurationError(f"LIMITKEEPER['HANDLERS'][{name!r}] must be a view or where it is, not {found[name]!r}")
    return found


def site() -> ViewLimits:
    """The site of this process, made when it is first asked for. Every middleware and every view shares it."""
    global _site
    if _site is None:
        with _making:
            if _site is None:
                _site = made()
    return _site


def made() -> ViewLimits:
    words, policy = said(), policy_said()
    store = words.get("STORE")
    store = store_from_url(store) if isinstance(store, str) else store
    handlers = handlers_said()
    return ViewLimits(None if policy is None else gate_of(policy, store=store, handlers=handlers), store, handlers)


def gate() -> Gate:
    """The gate of the policy in the settings: `gate().snapshot()`."""
    found = site().gate
    if found is None:
        raise ConfigurationError('there is no policy: set LIMITKEEPER = {"POLICY": "limitkeeper.yaml"}')
    return found


def forget(*, setting: str, **_: Any) -> None:
    """Tests that override LIMITKEEPER get a gate of their own."""
    global _site
    if setting == "LIMITKEEPER":
        _site = None


setting_changed.connect(forget, dispatch_uid="limitkeeper")
