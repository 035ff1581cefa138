"""Reads the LIMITKEEPER setting, and makes the gates of this process from it.

LIMITKEEPER = {
    "POLICY": "limitkeeper.yaml",      # a path (from BASE_DIR), a Policy or a Gate; without it only decorated views are limited
    "STORE": "redis://…",              # a URL or a Store; default: the policy's store
    "CLIENT_IP": {"trusted_proxies": ["10.0.0.0/8"]},   # without a policy: as its `client_ip`
    "DEFAULT": "50/h",                 # of each view without a limit of its own; or {"limit": "50/h", "key": …}, as for `limit`
    "ENABLED": False,                  # nothing is limited; default: True
    "HANDLERS": {"cached": "shop.views.cached"},    # the views of `degrade cached`, or their import paths
}
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from types import FunctionType, NoneType
from typing import Any

from django.conf import settings
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from ...algorithms.limit import Limit
from ...errors import ConfigurationError
from ...policy.gate import Gate, gate_of
from ...policy.identity.client_ip import ClientIp
from ...policy.model import Policy
from ...stores import Store
from ...stores.urls import maker_of, store_from_url
from ..handler_limit import Handler, HandlerGates

#: The keys of the setting, the types of their values, and a description of these.
KEYS: dict[str, tuple[tuple[type, ...], str]] = {
    "CLIENT_IP": ((Mapping, ClientIp), 'a dict such as {"trusted_proxies": ["10.0.0.0/8"]}'),
    "DEFAULT": ((str, Limit, Mapping, list, tuple, FunctionType), "a limit such as '50/h', or a dict with a limit"),
    "ENABLED": ((bool,), "True or False"),
    "HANDLERS": ((Mapping,), "a dict of views by their names"),
    "POLICY": ((str, Path, Policy, Gate), "a path, a Policy or a Gate"),
    "STORE": ((str, Store), "a store or its URL"),
}

_lock = Lock()
_gates: HandlerGates | None = None


def read_setting() -> Mapping[str, Any]:
    """The setting, validated."""
    found = getattr(settings, "LIMITKEEPER", {})
    if not isinstance(found, Mapping):
        raise ConfigurationError(f'expected LIMITKEEPER to be a dict such as {{"POLICY": "limitkeeper.yaml"}}, got {found!r}')
    unknown = sorted(str(key) for key in found if key not in KEYS)
    if unknown:
        raise ConfigurationError(f"unknown key {', '.join(map(repr, unknown))} in LIMITKEEPER; expected {', '.join(KEYS)}")
    for key, (kinds, expected) in KEYS.items():
        if not isinstance(found.get(key), (*kinds, NoneType)):
            raise ConfigurationError(f"expected LIMITKEEPER[{key!r}] to be {expected}, got {found[key]!r}")
    if isinstance(found.get("STORE"), str):
        maker_of(found["STORE"].partition(":")[0], found["STORE"])
    return found


def read_policy() -> Policy | Gate | str | Path | None:
    """The policy of the setting; a relative path starts at BASE_DIR."""
    policy: Policy | Gate | str | Path | None = read_setting().get("POLICY")
    base = getattr(settings, "BASE_DIR", None)
    return Path(base) / policy if isinstance(policy, (str, Path)) and base is not None else policy


def import_handlers() -> dict[str, Handler]:
    """The views of `degrade NAME`; given as import paths where the settings can't import them."""
    found: dict[str, Handler] = {}
    for name, view in (read_setting().get("HANDLERS") or {}).items():
        try:
            found[name] = import_string(view) if isinstance(view, str) else view
        except ImportError as error:
            raise ConfigurationError(f"LIMITKEEPER['HANDLERS'][{name!r}]: {error}") from error
        if not callable(found[name]):
            place = f"LIMITKEEPER['HANDLERS'][{name!r}]"
            raise ConfigurationError(f"expected {place} to be a view or its import path, got {found[name]!r}")
    return found


def site_gates() -> HandlerGates:
    """The gates of this process, shared by all middlewares and views; made at their first use."""
    global _gates
    if _gates is None:
        with _lock:
            if _gates is None:
                _gates = make_gates()
    return _gates


def make_gates() -> HandlerGates:
    policy, handlers = read_policy(), import_handlers()
    store = read_setting().get("STORE")
    store = store_from_url(store) if isinstance(store, str) else store
    if read_setting().get("ENABLED") is False:
        return HandlerGates(None, store, enabled=False)
    gate = None if policy is None else gate_of(policy, store=store, handlers=handlers)
    setting = read_setting()
    return HandlerGates(gate, store, handlers, setting.get("CLIENT_IP"), default=setting.get("DEFAULT"))


def gate() -> Gate:
    """The gate of the policy in the settings: `gate().snapshot()`."""
    found = site_gates().gate
    if found is None:
        raise ConfigurationError('there is no policy: set LIMITKEEPER = {"POLICY": "limitkeeper.yaml"}')
    return found


def reset_gates(*, setting: str, **_: object) -> None:
    """Makes new gates after a test has overridden LIMITKEEPER."""
    global _gates
    if setting == "LIMITKEEPER":
        _gates = None


setting_changed.connect(reset_gates, dispatch_uid="limitkeeper")
