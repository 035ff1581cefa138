"""Runs the tutorials' files behind the servers that the pages name, with the commands of the pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import limitkeeper
from servers.valkey import free_port

PAGES = Path(__file__).parents[2] / "docs" / "web"
SHOP = re.compile(r"<!-- file: shop\.py -->\n```python\n(.*?)```", re.S)
SERVERS = {
    "fastapi.md": ("uvicorn shop:app", ["uvicorn", "shop:app", "--port"]),
    "flask.md": ("flask --app shop run", ["flask", "--app", "shop", "run", "--port"]),
}


def answer(url: str) -> tuple[int, str | None, str]:
    """(status, Retry-After, body) of a POST."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=60) as response:
            return response.status, response.headers["Retry-After"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"], error.read().decode()


@pytest.mark.parametrize("page", SERVERS)
def test_what_a_tutorial_serves(page, tmp_path):
    """The page's file, behind the command that it names: orders are placed, then refused with the text that the page shows."""
    text = (PAGES / page).read_text()
    said, command = SERVERS[page]
    assert f"$ {said}\n" in text
    (tmp_path / "shop.py").write_text(SHOP.search(text)[1])
    port = str(free_port())
    env = {**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}
    server = subprocess.Popen(
        [sys.executable, "-m", *command, port],
        cwd=tmp_path,
        env=env,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        for line in server.stderr:
            if "unning on" in line:
                break
        answers = [answer(f"http://127.0.0.1:{port}/checkout") for _ in range(60)]
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert {status for status, _, _ in answers[:10]} == {200}
    refused = [(wait, body) for status, wait, body in answers if status == 429]
    assert set(refused) == {("1", '{"code":"RATE_LIMITED","message":"Too many requests. Retry after 1s."}')}
    assert f"{refused[0][1]} 429" in text
