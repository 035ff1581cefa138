"""The tests of arq in an environment of their own: arq needs redis-py below 6, and the other tests run on a newer one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import limitkeeper

pytestmark = [pytest.mark.slow, pytest.mark.server, pytest.mark.untraced]


def test_the_tests_of_arq_pass_where_it_is_installed(tmp_path):
    """In an environment with arq and its redis-py, and this one's packages behind them, every test of test_arq.py passes."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path)], check=True, timeout=120)
    python = str(next(tmp_path.glob("*/python")))
    installed = subprocess.run([python, "-m", "pip", "install", "-q", "arq"], capture_output=True, text=True, timeout=240)
    if installed.returncode:
        pytest.skip(f"arq can't be installed here: {installed.stderr[-300:]}")
    packages = next(tmp_path.glob("lib/*/site-packages"))
    (packages / "behind.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests / "tasks" / "test_arq.py")]
    done = subprocess.run(command, cwd=tests.parent, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " skipped" not in done.stdout
