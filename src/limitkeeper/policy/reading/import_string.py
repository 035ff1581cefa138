"""Things to call that a policy file names: "package.module:attribute". Imported when a gate is made, never by reading a file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ...errors import ConfigurationError
from ..identity.callback_errors import checked_call
from ..model import Policy
from .reference import resolved


@dataclass(frozen=True, slots=True)
class Named:
    """A callable by its name. Two of the same name are equal; calling it imports it where nobody did before."""

    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return imported(self.name)(*args, **kwargs)

    def found(self) -> Any:
        """What it names; ConfigurationError when it can't be imported or called."""
        return imported(self.name)


@lru_cache(maxsize=1024)
def imported(name: str) -> Any:
    """What "package.module:attribute" names: something that can be called."""
    found = resolved(name)
    if not callable(found):
        raise ConfigurationError(f"{name!r}: {found!r} can't be called; name a function or a class")
    return found


def calls_of(policy: Policy) -> Iterator[Any]:
    """What a policy calls while a request is decided: it answers at once."""
    for identity in policy.identify.values():
        yield getattr(identity, "call", None)
    for rule in policy.rules:
        yield from (rule.cost.call, rule.charge.call, getattr(rule.overrides, "call", None))


def handlers_of(policy: Policy) -> Iterator[Named]:
    """Degrade handlers by name, which may be async; without a colon it is one that the middleware is given."""
    for rule in policy.rules:
        handler = rule.on_refusal.handler
        if isinstance(handler, str) and ":" in handler:
            yield Named(handler)


def names_of(policy: Policy) -> Iterator[Named]:
    """Everything that a policy calls by a name."""
    yield from (call for call in calls_of(policy) if isinstance(call, Named))
    yield from handlers_of(policy)


def sound(call: Any) -> None:
    """Imports what is called; ConfigurationError when it can't be, or would have to be awaited."""
    if call is not None:
        checked_call(call.found() if isinstance(call, Named) else call)


def import_all(policy: Policy) -> None:
    """Imports everything that a policy names, so that what is missing is told before the first request."""
    for call in calls_of(policy):
        sound(call)
    for handler in handlers_of(policy):
        handler.found()
