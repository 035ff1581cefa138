"""Runs the commands of the page about the service, and compares the answers with the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from running import Running

import limitkeeper
from limitkeeper.service.settings import settings_fields

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "service.md").read_text()
EXCHANGES = re.findall(r"```sh\n(.*?)```\n\n```json\n(.*?)```", PAGE, re.S)


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_commands_of_the_page_are_answered_as_shown():
    """All but the times, which differ."""
    with Running(policy=ROOT / "examples" / "service" / "limitkeeper.yaml") as service:
        assert len(EXCHANGES) == 5
        for command, answer in EXCHANGES:
            typed = command.replace(":7070", f":{service.http}")
            done = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, timeout=60)
            assert timeless(json.loads(done.stdout)) == timeless(json.loads(answer)), command


def timeless(value: object) -> object:
    if isinstance(value, dict):
        return {name: timeless(one) for name, one in value.items() if name != "reset_after"}
    return [timeless(one) for one in value] if isinstance(value, list) else value


def test_the_page_names_every_setting_and_its_default():
    """Those of the served ports."""
    for one in settings_fields():
        if one.name != "policy":
            flag = f"--{one.name.replace('_', '-')}"
            line = next((line for line in PAGE.splitlines() if line.startswith("| `--") and flag in line), None)
            assert line is not None, flag
            default = (one.metadata["text"] or "").replace("127.0.0.1", "").replace("1000000", "1 000 000")
            assert default in line, line


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_commands_of_the_dashboard_page_work():
    """Each is answered without an error; the second block begins with overrides that are put, and removes one."""
    page = (ROOT / "docs" / "service-dashboard.md").read_text()
    with Running(policy=ROOT / "examples" / "service" / "limitkeeper.yaml") as service:
        lines = [line for block in re.findall(r"```sh\n(.*?)```", page, re.S) for line in block.splitlines()]
        assert len(lines) == 6
        environment = {**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}
        for line in lines:
            typed = line.replace("http://127.0.0.1:7073", service.admin)
            typed = (
                typed.replace("limitkeeper keys", f"{sys.executable} -m limitkeeper keys") if typed.startswith("lim") else typed
            )
            typed += f" --admin {service.admin}" if " keys override " in typed else ""
            done = subprocess.run(["sh", "-c", typed], capture_output=True, text=True, timeout=60, env=environment)
            assert done.returncode == 0, done
            assert "error" not in json.loads(done.stdout), line
