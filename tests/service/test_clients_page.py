"""Runs the programs of the page about clients, in each installed language, against a running service."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Running

import limitkeeper

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "service-clients.md").read_text()
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with Running(policy=ROOT / "examples" / "service" / "limitkeeper.yaml") as running:
        yield running


def programs(language: str, service: Running) -> list[str]:
    """The page's blocks of a language, with the ports of the service, and timeouts for a busy machine."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)
    ports = [one.replace("7070", str(service.http)).replace("7071", str(service.resp)) for one in found]
    return [re.sub(r"-m 1\b", "-m 60", one).replace("(1000)", "(60_000)").replace("timeout=0.25", "timeout=60") for one in ports]


def printed(*arguments: str, folder: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        arguments, capture_output=True, text=True, timeout=120, cwd=folder, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl(service):
    """The answer is a decision."""
    assert json.loads(printed("sh", "-c", programs("sh", service)[0]))["remaining"] == 9


CLI = shutil.which("redis-cli") or shutil.which("valkey-cli")


@pytest.mark.skipif(CLI is None, reason="there is no redis-cli or valkey-cli here")
def test_redis_cli(service):
    """The answer is five integers."""
    answer = printed("sh", "-c", programs("sh", service)[1].replace("redis-cli", str(CLI), 1))
    assert [int(one) for one in answer.split()][:4] == [1, 10, 9, 0]


def test_python(service):
    """Both programs, sync over HTTP and async over the Redis protocol."""
    paths = str(Path(limitkeeper.__path__[0]).parent)
    both = programs("python", service)
    assert [printed(sys.executable, "-c", one, PYTHONPATH=paths).strip() for one in both] == ["9", "[True, True, True, True]"]


NODE = shutil.which("node")


@pytest.mark.skipif(NODE is None, reason="there is no node here")
def test_node_with_fetch(service, tmp_path):
    """Without packages."""
    (tmp_path / "check.mjs").write_text(programs("js", service)[0])
    assert printed(str(NODE), "check.mjs", folder=tmp_path) == "9 left\n"


NPM = shutil.which("npm")


@pytest.mark.slow
@pytest.mark.skipif(NODE is None or NPM is None, reason="there is no node with npm here")
def test_node_with_redis(service, tmp_path):
    """node-redis, installed by npm, connects as to Redis."""
    install = [str(NPM), "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(tmp_path), "redis@5"]
    try:
        done = subprocess.run(install, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not answer within 200 s: the package redis can't be downloaded from here")
    if done.returncode:
        pytest.skip(f"npm can't install the package redis here: {done.stderr.strip()[-200:]}")
    (tmp_path / "check.mjs").write_text(programs("js", service)[1])
    assert printed(str(NODE), "check.mjs", folder=tmp_path) == "9 left\n"


JAVA = shutil.which("java") if shutil.which("javac") else None


@pytest.mark.slow
@pytest.mark.skipif(JAVA is None, reason="there is no java with a compiler here")
def test_java(service, tmp_path):
    """Compiled and run from its source."""
    (tmp_path / "Check.java").write_text(programs("java", service)[0].replace("ofSeconds(1)", "ofSeconds(60)"))
    assert printed(str(JAVA), "Check.java", folder=tmp_path).startswith('allowed: {"allowed":true,"limit":10,"remaining":9,')


GO = shutil.which("go")


@pytest.mark.slow
@pytest.mark.skipif(GO is None, reason="there is no go here")
def test_go(service, tmp_path):
    """With go-redis from the module proxy."""
    (tmp_path / "main.go").write_text(programs("go", service)[0])
    subprocess.run([str(GO), "mod", "init", "check"], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    if subprocess.run([str(GO), "mod", "tidy"], cwd=tmp_path, capture_output=True, timeout=200, check=False).returncode:
        pytest.skip("the package go-redis can't be downloaded from here")
    assert printed(str(GO), "run", ".", folder=tmp_path) == "9 left\n"
