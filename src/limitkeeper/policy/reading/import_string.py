"""Import strings: callables that a policy names as "package.module:attribute". A gate imports them; reading a policy does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any

from ...errors import ConfigurationError
from ..callback_errors import check_callback
from ..model import Policy


@dataclass(frozen=True, slots=True)
class ImportString:
    """A callable by its import string; equal by name. The first call imports it."""

    name: str

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self.load()(*args, **kwargs)

    def load(self) -> Callable[..., object]:
        """Imports the callable; ConfigurationError when it can't be imported or called."""
        return import_callable(self.name)


@lru_cache(maxsize=1024)
def import_callable(name: str) -> Callable[..., object]:
    found = import_object(name)
    if not callable(found):
        raise ConfigurationError(f"{name!r}: {found!r} can't be called; name a function or a class")
    return found  # type: ignore[no-any-return]


def import_object(name: str) -> Any:
    """Imports what "package.module:attribute" names."""
    module, colon, path = name.partition(":")
    if not colon or not module or not path:
        raise ConfigurationError(f"{name!r} is not an import string; write package.module:attribute")
    try:
        found = import_module(module)
    except ImportError as error:
        raise ConfigurationError(f"{name!r}: the module {module!r} can't be imported here ({error})") from error
    except Exception as error:  # a module may raise anything while it is imported
        message = f"{name!r}: importing the module {module!r} raised {type(error).__name__} ({error})"
        raise ConfigurationError(f"{message}; it must be importable on its own") from error
    for attribute in path.split("."):
        try:
            found = getattr(found, attribute)
        except AttributeError:
            raise ConfigurationError(f"{name!r}: {module!r} has no {attribute!r}") from None
    return found


def callables_of(policy: Policy) -> Iterator[tuple[object, tuple[str, ...] | None]]:
    """The callables of a policy, and the arguments of those that are called while a request is decided: they must be synchronous.

    A degrade handler may be async; one without a colon in its name is given to the middleware.
    """
    for identity in policy.identify.values():
        yield getattr(identity, "call", None), ("request",)
    for rule in policy.rules:
        yield rule.cost.call, ("request",)
        yield rule.charge.call, ("status", "request")
        yield rule.answer.message if callable(rule.answer.message) else None, ("refusal", "request")
        yield getattr(rule.overrides, "call", None), ("key",)
    for handler in (rule.on_refusal.handler for rule in policy.rules):
        if isinstance(handler, str) and ":" in handler:
            yield ImportString(handler), None


def import_and_check(call: object, parameters: tuple[str, ...] | None) -> None:
    """Imports a callable; ConfigurationError when it can't be imported, can't be called so, or is async and must not be."""
    found = call.load() if isinstance(call, ImportString) else call
    if parameters is not None and found is not None:
        check_callback(found, *parameters)


def import_all(policy: Policy) -> None:
    """Imports all that a policy names, so that errors show before the first request."""
    for call, parameters in callables_of(policy):
        import_and_check(call, parameters)
