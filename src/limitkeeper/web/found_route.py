"""The route that the framework has found for a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def found_route(scope: Mapping[str, Any]) -> Any:
    """The route of an ASGI scope; None: the request is not routed yet. FastAPI's routers share their routes among all places that
    include them: there it is the route of the place, with the whole path and the dependencies of the place."""
    route = scope.get("route")
    place = (scope.get("fastapi") or {}).get("effective_route_context")
    return place if place is not None and getattr(place, "original_route", None) is route else route
