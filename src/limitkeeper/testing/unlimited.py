"""`unlimited()`: switches limiting off in the whole process, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..limiter_base import switch


@contextmanager
def unlimited() -> Iterator[None]:
    """Switches limiting off in the whole process: every call is allowed, and nothing is stored."""
    switch(True)
    try:
        yield
    finally:
        switch(False)
