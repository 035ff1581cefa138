"""Limits of single routes that each worker counts in its own memory: every framework warns, once, with the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from flask import Flask

import limitkeeper
from limitkeeper import SeveralWorkers
from limitkeeper.policy import Policy
from limitkeeper.registry import Registry
from limitkeeper.stores import worker_warning
from limitkeeper.web.fastapi import RateLimit
from limitkeeper.web.flask import RateLimit as FlaskLimits
from limitkeeper.web.handler_limit import HandlerGates
from limitkeeper.web.starlette import limit

POLICY = Policy.of(limits=[{"name": "api", "limit": "5/s"}])
MAKERS = {
    "fastapi": lambda: RateLimit("5/s"),
    "fastapi, a rule": lambda: RateLimit(policy=POLICY, rule="api"),
    "starlette": lambda: limit("5/s")(lambda request: None),
    "flask": lambda: FlaskLimits(Flask("shop")),
    "django": lambda: HandlerGates(None),
    "registry": lambda: Registry(),
}


@pytest.fixture
def four_workers(monkeypatch):
    monkeypatch.setattr(worker_warning, "_warned", False)
    monkeypatch.setattr(sys, "argv", ["/bin/gunicorn", "-w", "4", "app:app"])


@pytest.mark.parametrize("framework", MAKERS)
def test_limits_of_single_routes_warn_once(four_workers, framework):
    """The first limit of a worker without a store warns with the remedy and the caller's location; the next ones do not."""
    with pytest.warns(SeveralWorkers, match=r"gunicorn runs several workers.*shared:///path.*redis://") as caught:
        kept = [MAKERS[framework]()]
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept += [make() for make in MAKERS.values()]


def test_limits_with_a_store_are_silent(four_workers, tmp_path):
    """A store that all workers share is the remedy."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RateLimit("5/s", store=f"shared://{tmp_path}/limits")


APPS = {
    "fastapi": """
from fastapi import Depends, FastAPI
from limitkeeper.web.fastapi import RateLimit
app = FastAPI()
@app.get("/", dependencies=[Depends(RateLimit("5/s"))])
def home(): return {}
""",
    "starlette": """
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from limitkeeper.web.starlette import limit
@limit("5/s")
async def home(request): return Response()
app = Starlette(routes=[Route("/", home)])
""",
    "flask": """
from flask import Flask
from limitkeeper.web.flask import RateLimit
app = Flask("shop")
limits = RateLimit(app)
@app.get("/")
@limits.limit("5/s")
def home(): return {}
""",
}
RUN = "import uvicorn\nif __name__ == '__main__': uvicorn.run('shop:app', port=0, workers={})"
SERVERS = {
    "uvicorn --workers": ["-m", "uvicorn", "--port", "0", "--workers", "2", "shop:app"],
    "uvicorn.run": ["run.py"],
    "hypercorn -w": ["-m", "hypercorn", "-b", "127.0.0.1:0", "-w", "2", "shop:app"],
    "hypercorn, a file": ["-m", "hypercorn", "-b", "127.0.0.1:0", "-c", "hypercorn.toml", "shop:app"],
    "gunicorn -w": ["-m", "gunicorn", "-b", "127.0.0.1:0", "-w", "2", "shop:app"],
    "gunicorn, a file": ["-m", "gunicorn", "-b", "127.0.0.1:0", "shop:app"],
}


def start(folder: Path, framework: str, arguments: list[str], workers: int) -> tuple[subprocess.Popen[bytes], Path]:
    (folder / "shop.py").write_text(APPS[framework] + "print('imported', flush=True)\n")
    (folder / "run.py").write_text(RUN.format(workers))
    (folder / "hypercorn.toml").write_text(f"workers = {workers}")
    (folder / "gunicorn.conf.py").write_text(f"workers = {workers}")
    paths = os.pathsep.join([str(Path(limitkeeper.__path__[0]).parent), str(folder)])
    environment = {**os.environ, "PYTHONPATH": paths}
    log = folder / "log"
    with log.open("wb") as written:
        command = [sys.executable, *[str(folder / one) if one == "run.py" else one for one in arguments]]
        return subprocess.Popen(command, cwd=folder, env=environment, stdout=written, stderr=written), log


def read_until(log: Path, text: str, times: int) -> str:
    end = time.monotonic() + 60
    while log.read_text().count(text) < times and time.monotonic() < end:
        time.sleep(0.05)
    return log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "server"),
    [(app, name) for app in APPS for name in SERVERS if (app == "flask") == name.startswith("gunicorn")],
)
def test_real_servers_with_two_workers_warn(tmp_path, framework, server):
    """Each worker that detects another one warns once, whether flags, a file or Python set the number."""
    process, log = start(tmp_path, framework, SERVERS[server], 2)
    try:
        read_until(log, "imported", 2)
        found = read_until(log, "runs several workers", 1)
    finally:
        process.terminate()
        process.wait(60)
    assert 1 <= found.count("runs several workers") <= found.count("imported") == 2, found
    assert "shared:///path" in found


@pytest.mark.slow
@pytest.mark.parametrize("server", ["uvicorn.run", "hypercorn, a file"])
def test_one_worker_does_not_warn(tmp_path, server):
    """A single worker is not several."""
    process, log = start(tmp_path, "fastapi", SERVERS[server], 1)
    try:
        found = read_until(log, "imported", 1)
    finally:
        process.terminate()
        process.wait(60)
    assert "imported" in found
    assert "several workers" not in log.read_text()
