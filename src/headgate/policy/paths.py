"""One spelling for a path, whatever disguise it came in: what rules are matched against."""

from __future__ import annotations


def tidy(path: str) -> str:
    return path.lower().rstrip("/") or "/"
