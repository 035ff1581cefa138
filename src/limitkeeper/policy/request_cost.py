"""The cost of a request that depends on the request: a header, a query parameter, or a callback of the application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .callback_errors import CallbackErrors, callback_name
from .model import Cost
from .request_context import RequestContext

#: Errors of cost callbacks.
callback_errors = CallbackErrors()


def request_cost(cost: Cost, context: RequestContext) -> int:
    """A cost that depends on the request, at most `most`. What is there but is not written in ASCII digits costs `most`: the
    application may read `+100`, ` 100` or `1_00` as 100. A client can't declare its own request free: 0 is a cost only where the
    default is 0, and for a callback of the application."""
    if cost.call is not None:
        return callback_cost(cost, cost.call, context)
    if context.differs(cost.source, cost.name):  # several values, of which the application may use any
        return cost.most
    text = context.header(cost.name) if cost.source == "header" else context.query(cost.name)
    if text is None:
        return cost.units
    units = int(text) if len(text) <= 18 and text.isascii() and text.isdigit() else cost.most
    return max(min(1, cost.units), min(units, cost.most))


def callback_cost(cost: Cost, call: Callable[[Any], int], context: RequestContext) -> int:
    """The cost that a callback of the application returns; the default when it raises, or returns no whole number."""
    raised: Exception | None = None
    try:
        units = context.call(call)
    except Exception as error:
        if context.passes_on(error):
            raise
        text, found, raised = "%s raised %s: the request costs %d", type(error).__name__, error
    else:
        if isinstance(units, int) and not isinstance(units, bool):
            return max(0, min(units, cost.most))
        text, found = "%s returned a %s, not an integer: it costs %d", type(units).__name__
    callback_errors.report(text, callback_name(call), found, cost.units, raised=raised)
    return cost.units
