"""The installed package shows its types to users: mypy and pyright find the mistakes of a user's program, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]

#: Lines with a mistake end in `# wrong`; every other line is right.
PROGRAM = """
from typing import assert_type

from limitkeeper import AsyncLimiter, Decision, FixedWindow, Limiter, MemoryStore, Reservation, TokenBucket
from limitkeeper.stores import Store

bucket = TokenBucket("5/s burst 10")
limiter = Limiter({"user": bucket, "tenant": FixedWindow("1000/min")}, store=MemoryStore(), name="api")
decision = limiter.hit({"user": "u42", "tenant": None}, cost={"tenant": 3})
assert_type(decision, Decision)
assert_type(decision.allowed, bool)
assert_type(decision.retry_after, float)
assert_type(decision.remaining, int)
assert_type(decision.source, str)
assert_type(decision.decisions, tuple[Decision, ...])
assert_type(limiter.peek("u42"), Decision)
assert_type(limiter.hit_many(["a", "b"]), list[Decision])
assert_type(limiter.acquire("u42", timeout=1.5), Decision)
assert_type(limiter.reserve("u42"), Reservation)
assert_type(limiter.store, Store)
assert_type(bucket.capacity, int)
from limitkeeper import MemoryStor  # wrong
decision.retry_afterr  # wrong
limiter.hit(42)  # wrong
limiter.hitt("u42")  # wrong
limiter.hit("u42", cost="3")  # wrong
TokenBucket("5/s", bursts=3)  # wrong


async def asks() -> None:
    limiter = AsyncLimiter(bucket)
    assert_type(await limiter.hit("u42"), Decision)
    assert_type(await limiter.peek("u42"), Decision)
    async with limiter.reserve("u42", max_wait=1) as reservation:
        assert_type(await reservation.settle(1), bool)
    (await limiter.hit("u42")).remainig  # wrong
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package installed from a wheel, and a user's program beside it."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    for path in ("src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        target = source / path
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", ROOT / path, target], check=True)
    for built in [*source.rglob("*.so"), *source.rglob("*.pyd")]:
        built.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    plain = os.environ | {"LIMITKEEPER_DISABLE_COMPILED": "1"}
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True, env=plain)
    (wheel,) = folder.glob("*.whl")
    site = folder / "site"
    subprocess.run([*pip, "install", "-q", "--no-deps", "--target", site, wheel], check=True)
    (site / "program.py").write_text(PROGRAM)
    return site


def run_mypy(site: Path) -> str:
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={site / 'cache'}", "program.py"]
    return subprocess.run(mypy, cwd=site, env=os.environ | {"PYTHONPATH": str(site)}, capture_output=True, text=True).stdout


def run_pyright(site: Path) -> str:
    pyright = [sys.executable, "-m", "basedpyright", "--level", "error", "program.py"]
    return subprocess.run(pyright, cwd=site, capture_output=True, text=True).stdout


@pytest.mark.parametrize("check", [run_mypy, run_pyright], ids=["mypy", "pyright"])
def test_a_type_checker_finds_the_mistakes_of_a_users_program_and_nothing_else(
    installed: Path, check: Callable[[Path], str]
) -> None:
    """With the installed package a type checker finds each mistake of a user's program, and no other."""
    pytest.importorskip("mypy" if check is run_mypy else "basedpyright")
    said = check(installed)
    found = {int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+)?\s*[-:] error", said)}
    wrong = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, said
