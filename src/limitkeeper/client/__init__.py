"""Limits on outgoing calls: a third party's quota, retries, tokens and budgets, for httpx, httpx2, requests and aiohttp."""

from .client_limits import ClientLimits, Meter, UsageReader
from .errors import BudgetSpent, ClientClosed, RetriesExhausted, Throttled
from .llm import TokenMeter
from .response_fields import Quota
from .retry import Retry
from .spend_guard import SpendGuard

__all__ = [
    "BudgetSpent",
    "ClientClosed",
    "ClientLimits",
    "Meter",
    "Quota",
    "RetriesExhausted",
    "Retry",
    "SpendGuard",
    "Throttled",
    "TokenMeter",
    "UsageReader",
]
