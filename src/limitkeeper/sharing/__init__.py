"""Shares: one capacity divided among tenants, with guarantees and weighted fair shares of the rest."""

from __future__ import annotations

from .tenant_fair_share import FairShare

__all__ = ["FairShare"]
