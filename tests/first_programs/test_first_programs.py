"""The programs of examples/first_programs do what their first lines describe."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jwt
import pytest
from programs import PROGRAMS, load, run, start, statuses

from limitkeeper.testing import ManualClock, use_clock
from servers.valkey import Valkey, free_port
from virtual_time import VirtualClock


@pytest.fixture(autouse=True)
def clock() -> Iterator[ManualClock]:
    """The clock of all limits that a program declares."""
    with use_clock(clock := ManualClock()):
        yield clock


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_first_program_is_short_and_has_a_docstring(path):
    """Every program has at most 30 lines, and begins with a docstring."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 30
    assert lines[0].startswith('"""')


def test_a_function(capsys):
    """The fourth code within a minute is refused with the wait; another user gets one."""
    load("function", "__main__")
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["a code was sent to ann"] * 3 + ["ann: try again in 20 seconds", "a code was sent to ben"]


def test_fastapi_with_two_routes(clock):
    """Each route refuses beyond its own limit, and accepts again after the time."""
    app = load("fastapi_app")["app"]
    assert statuses(app, 6, "/login", "POST") == [200] * 5 + [429]
    assert statuses(app, 21, "/search") == [200] * 20 + [429]
    clock.advance(12)
    assert statuses(app, 2, "/login", "POST") == [200, 429]


def test_flask():
    """The view counts by API key, and by address without one."""
    client = load("flask_app")["app"].test_client()
    for headers in ({"X-Api-Key": "acme"}, {"X-Api-Key": "bolt"}, {}):
        assert [client.get("/search", headers=headers).status_code for _ in range(4)] == [200] * 3 + [429]


def test_django():
    """The fourth request to the view within a minute is refused."""
    script = (
        "import django, django_app\n"
        "from django.test import Client\n"
        "from limitkeeper.testing import ManualClock, use_clock\n"
        "django.setup()\n"
        "with use_clock(ManualClock()):\n"
        "    print([Client().get('/search').status_code for _ in range(4)])\n"
    )
    assert run("-c", script) == "[200, 200, 200, 429]\n"


def test_llm_tokens_and_requests(clock):
    """A call takes one request and the tokens that it used; one beyond the tokens of a minute waits until they have come back."""
    program = load("llm_tokens")
    limits, complete = program["limits"], program["complete"]
    assert complete("x" * 575) == "an answer"
    left = {decision.name: decision.remaining for decision in limits.peek("my account").decisions}
    assert left == {"requests": 59, "tokens": 89_000}
    assert clock.now_us() == 0
    limits.hit("my account", cost={"tokens": 89_000})
    complete("x" * 500)
    assert clock.now_us() == 1_000_000  # 1500 tokens at 90000 per minute


def test_a_hundred_tasks_at_ten_per_second():
    """100 tasks that start together call 100 ms apart: the last one after 9.9 seconds."""

    async def seconds() -> float:
        clock = VirtualClock(0)
        with use_clock(clock):
            tasks = asyncio.ensure_future(load("hundred_tasks")["main"]())

            async def settle() -> None:
                for _ in range(20):
                    await asyncio.sleep(0)

            await clock.run_until(9_899_999, settle)
            assert not tasks.done()
            await clock.run_until(9_900_000, settle)
            assert await tasks == list(range(100))
            return clock.now_us() / 1e6

    assert asyncio.run(seconds()) == 9.9


def test_a_flask_limiter_application_moved():
    """The default limit counts all views but the exempt one, and views have limits of their own besides."""
    client = load("moved_from_flask_limiter")["app"].test_client()
    assert [client.get("/slow").status_code for _ in range(2)] == [200, 429]
    assert [client.get("/export").status_code for _ in range(3)] == [200, 200, 429]
    assert {client.get("/ping").status_code for _ in range(60)} == {200}


def test_a_slowapi_application_moved(clock):
    """Each route has its own limits; those of one route are charged together or not at all."""
    app = load("moved_from_slowapi")["app"]
    assert statuses(app, 6, "/home") == [200] * 5 + [429]
    assert statuses(app, 3, "/mars") == [200, 200, 429]
    clock.advance(1)
    assert statuses(app, 3, "/mars") == [200, 200, 429]
    clock.advance(1)
    assert statuses(app, 2, "/mars") == [200, 429]  # the refused ones did not count


def test_jwt_keys():
    """A signed token names the user and the plan; a forged one is limited by address."""
    app = load("jwt_keys")["app"]

    def bearer(secret: str, **claims: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {jwt.encode(claims, secret, 'HS256')}"}

    secret = "a secret of at least 32 bytes 123"
    assert statuses(app, 3, "/", headers=bearer(secret, sub="ann")) == [200, 200, 429]
    assert statuses(app, 6, "/", headers=bearer(secret, sub="ben", plan="pro")) == [200] * 5 + [429]
    forged = bearer("another secret of at least 32 bytes", sub="ann", plan="pro")
    assert statuses(app, 3, "/", headers=forged) == [200, 200, 429]
    assert statuses(app, 1, "/") == [429]


def test_a_test_with_a_clock():
    """The example's own test passes."""
    load("test_with_a_clock")["test_a_user_gets_three_mails_an_hour"]()


@pytest.mark.server
def test_redis_with_two_processes(valkey: Valkey):
    """Two processes admit together what one limit admits."""
    valkey.client().flushall()
    assert run("redis_two_processes.py", valkey.url) == "100 of 160 calls were admitted\n"


@pytest.mark.server
@pytest.mark.slow
def test_gunicorn_with_four_workers(tmp_path, eventually):
    """Four workers of one host admit together what one limit admits."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/"

    def status() -> int:
        try:
            return int(urllib.request.urlopen(url, timeout=60).status)
        except urllib.error.HTTPError as error:
            return error.code
        except urllib.error.URLError:
            return 0

    command = ["-m", "gunicorn", "--workers", "4", "--bind", f"127.0.0.1:{port}", "gunicorn_app:app"]
    server = start(*command, pipe=None, LIMITS=f"shared://{tmp_path}/limits")
    try:
        eventually(lambda: status() == 200)
        assert Counter(status() for _ in range(40)) == {200: 19, 429: 21}
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.server
@pytest.mark.slow
def test_a_celery_task(valkey: Valkey):
    """A worker runs all five tasks, though only one may start at once."""
    valkey.client().flushall()
    options = ["--pool", "solo", "--loglevel", "error", "--without-gossip", "--without-mingle"]
    worker = start("-m", "celery", "--app", "celery_task", "worker", *options, pipe=None, REDIS_URL=valkey.url)
    try:
        printed = run("celery_task.py", REDIS_URL=valkey.url)
    finally:
        worker.terminate()
        worker.wait(60)
    assert printed == f"{[f'sent to user{number}@example.com' for number in range(5)]}\n"


SOURCE = PROGRAMS[0].parents[2] / "src"


def mypy_errors(folder: Path) -> str:
    """mypy's findings with the settings of the project, which are strict; Celery's decorators have no types."""
    options = [f"--cache-dir={folder}", "--allow-untyped-decorators"]
    command = [sys.executable, "-m", "mypy", *options, *map(str, PROGRAMS)]
    environment = os.environ | {"MYPYPATH": str(SOURCE)}
    return subprocess.run(command, cwd=SOURCE.parent, env=environment, capture_output=True, text=True).stdout


def pyright_errors(folder: Path) -> str:
    """pyright's findings in its mode for most users, errors only. Celery has no types: a task is a bare function there."""
    typed = [str(path) for path in PROGRAMS if path.stem != "celery_task"]
    settings = {"include": typed, "extraPaths": [str(SOURCE)], "typeCheckingMode": "standard"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--level", "error", "--project", str(folder)]
    return subprocess.run([*command, "--pythonpath", sys.executable], capture_output=True, text=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("errors", [mypy_errors, pyright_errors], ids=["mypy", "pyright"])
def test_type_checkers_accept_the_programs(errors, tmp_path):
    """mypy and pyright find no error in any program."""
    found = errors(tmp_path)
    assert re.search(r"no issues found in 13 source files|^0 errors", found, re.M), found
