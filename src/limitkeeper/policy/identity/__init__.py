"""Identities of a request, and the canonical forms of its path and host that rules are matched against."""

__all__: list[str] = []
