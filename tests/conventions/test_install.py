"""Installing from source where compiling fails: the package runs as plain Python, whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow

PROGRAM = """
import limitkeeper, limitkeeper.policy, limitkeeper.stores.shared, limitkeeper.web.asgi
limiter = limitkeeper.Limiter("token bucket 1/h burst 2")
print(limitkeeper.compiled, [bool(limiter.hit("a")) for _ in range(3)], limitkeeper.__file__)
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of the files that an installation reads, without anything built before."""
    built = shutil.ignore_patterns("*.so", "*.pyd", "*.c", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", tmp_path / "checkout" / "src", ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    return tmp_path / "checkout"


def install(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip install` into a directory beside the checkout, with the installed tools: nothing is downloaded."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index", "--no-build-isolation"]
    command += ["--no-deps", "--target", str(checkout.parent / "installed"), str(checkout)]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("LIMITKEEPER_", "PYTHON"))}
    return subprocess.run(command, cwd=checkout, env=inherited | environment, capture_output=True, text=True, timeout=200)


def assert_runs_plain(checkout: Path) -> None:
    """The installed package has no compiled file, imports and decides."""
    installed = checkout.parent / "installed"
    assert [path for ending in ("so", "pyd") for path in installed.rglob(f"*.{ending}")] == []
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(installed)!r})" + PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == f"False [True, True, False] {installed / 'limitkeeper' / '__init__.py'}", done.stderr


def failing_compiler(checkout: Path, module: str) -> str:
    """The C compiler that is here, but for one module."""
    script = checkout.parent / "cc"
    script.write_text(
        f'#!/bin/sh\ncase "$*" in *{module}.c*) echo "no {module}" >&2; exit 1;; esac\nexec {shutil.which("cc")} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def test_without_a_compiler_on_the_path_the_plain_source_is_installed(checkout):
    """Where PATH holds no C compiler, `pip install` succeeds."""
    empty = checkout.parent / "empty"
    empty.mkdir()
    done = install(checkout, PATH=str(empty))
    assert done.returncode == 0, done.stderr
    assert_runs_plain(checkout)


def test_with_a_compiler_that_fails_the_plain_source_is_installed(checkout):
    """Where the C compiler always fails, `pip install` succeeds."""
    done = install(checkout, CC="/bin/false")
    assert done.returncode == 0, done.stderr
    assert_runs_plain(checkout)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_module_that_fails_takes_the_compiled_others_with_it(checkout):
    """Compiled modules use each other's C interface, so all of them are installed or none."""
    done = install(checkout, CC=failing_compiler(checkout, "limiter_base"), CFLAGS="-O0")
    assert done.returncode == 0, done.stderr
    assert list(checkout.rglob("build/temp*/**/*.o")) != [], "no module was compiled before the one that failed"
    assert_runs_plain(checkout)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_required_core_that_does_not_compile_fails_the_installation(checkout):
    """LIMITKEEPER_REQUIRE_COMPILED=1 turns the fallback off."""
    done = install(checkout, CC="/bin/false", LIMITKEEPER_REQUIRE_COMPILED="1")
    assert done.returncode != 0
    assert "/bin/false" in done.stderr
    assert not (checkout.parent / "installed" / "limitkeeper").exists()
