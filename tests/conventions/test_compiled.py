"""One source, compiled or not: the files that must agree."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import limitkeeper
from limitkeeper import _cython_shim
from limitkeeper.algorithms import constants

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "limitkeeper"


def compiled_list() -> tuple[str, ...]:
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "COMPILED":
            return ast.literal_eval(node.value)
    raise AssertionError("setup.py has no COMPILED")


def carries_the_header(path: Path) -> bool:
    """Whether a file imports cython at its top, in the form that does without it too."""
    text = path.read_text()
    for node in ast.parse(text).body if "import cython" in text else ():
        if isinstance(node, ast.Try):
            names = [alias.name for step in node.body if isinstance(step, ast.Import) for alias in step.names]
            if names == ["cython"]:
                return True
    return False


def test_the_build_is_the_one_that_was_expected():
    """A run that names its build fails on the other one: a missing compiled core is not passed over in silence."""
    expected = os.environ.get("LIMITKEEPER_EXPECT", "any")
    assert expected in ("any", "compiled", "plain")
    if expected != "any":
        assert limitkeeper.compiled == (expected == "compiled"), f"expected {expected}, found {limitkeeper.__path__[0]}"


def test_compiled_is_the_running_build():
    """`limitkeeper.compiled` is true exactly when the rules come from an extension module."""
    files = [importlib.import_module(f"limitkeeper.{module.replace('/', '.')}").__file__ or "" for module in compiled_list()]
    assert {not file.endswith(".py") for file in files} == {limitkeeper.compiled}


def test_setup_compiles_exactly_the_files_with_the_header():
    """setup.py's list names every file that is written for the compiler, and no other."""
    with_header = {str(path.relative_to(SRC).with_suffix("")) for path in SRC.rglob("*.py") if carries_the_header(path)}
    with_header |= {str(path.relative_to(SRC).with_suffix("")) for path in SRC.rglob("*.pyx")}
    assert sorted(compiled_list()) == sorted(with_header)


def test_a_pyx_has_a_plain_twin():
    """What exists only for the compiler has a .py twin beside it, for where there is none."""
    assert [path for path in SRC.rglob("*.pyx") if not path.with_suffix(".py").exists()] == []


def only_foreign(path: Path) -> bool:
    """Whether a .pxd only declares foreign C functions."""
    code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)
    lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line for line in lines if not line.startswith((" ", "\t"))] == ["cdef extern from *:"]


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.pxd")), ids=lambda path: str(path.relative_to(SRC)))
def test_every_pxd_has_its_source(path):
    """A .pxd is the C interface of the .py or .pyx beside it, or declares only foreign C functions."""
    assert path.with_suffix(".py").exists() or path.with_suffix(".pyx").exists() or only_foreign(path)


def test_constants_are_the_same_in_python_and_in_c():
    """constants.py and constants.pxd define the same names and numbers."""
    text = (SRC / "algorithms" / "constants.pxd").read_text()
    defined = {name: int(value.rstrip("L")) for name, value in re.findall(r"#define (\w+) (\S+)", text)}
    found = {name: int(value) for name, value in re.findall(r"^    (\w+) = (-?\d+)$", text, re.M)}
    found |= {name: defined[there] for name, there in re.findall(r'const long long (\w+) "(\w+)"', text)}
    assert found.pop("PLAIN") != constants.PLAIN
    assert found == {name: value for name, value in vars(constants).items() if name.isupper() and name != "PLAIN"}


def used_of_cython(path: Path) -> set[str]:
    """Every name that a file takes from `cython`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cython":
            names.add(node.attr)
    return names


def test_plain_offers_everything_that_the_sources_use_of_cython():
    """Where Cython is not installed, `_cython_shim` has every marker and type that any source mentions."""
    used = {name for path in SRC.rglob("*.py") if carries_the_header(path) for name in used_of_cython(path)}
    assert sorted(name for name in used if not hasattr(_cython_shim, name)) == []


def test_every_name_of_the_plain_shim_is_used():
    """Every name that `_cython_shim` offers is used somewhere."""
    used = {name for path in SRC.rglob("*.py") if carries_the_header(path) for name in used_of_cython(path)}
    borrowed = {"annotations", "Any", "Callable", "T", "TypeAlias", "TypeVar"}
    offered = {
        name for name, value in vars(_cython_shim).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    offered -= borrowed
    assert sorted(offered - used) == []


def test_the_source_runs_where_nothing_else_is_installed(tmp_path):
    """The .py files alone, without Cython and without site-packages, are a working limitkeeper."""
    shutil.copytree(
        SRC, tmp_path / "limitkeeper", ignore=lambda _, names: [n for n in names if n.endswith((".so", ".pyd", ".pyx", ".pxd"))]
    )
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import limitkeeper
assert not limitkeeper.compiled and "cython" not in sys.modules and "Cython" not in sys.modules
limiter = limitkeeper.Limiter("token bucket 1/h burst 2; sliding window log 9/h; sliding window counter 9/h; fixed window 9/h")
print([bool(limiter.hit("a")) for _ in range(3)], limiter.reserve("b").cancel())
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("[True, True, False] True", 0), done.stderr


@pytest.mark.skipif(not limitkeeper.compiled, reason="about the compiled build")
def test_the_compiled_core_needs_nothing_else_installed():
    """The compiled package imports without site-packages."""
    root = str(Path(limitkeeper.__path__[0]).parent)
    code = f"import sys; sys.path.insert(0, {root!r}); import limitkeeper; print(limitkeeper.compiled)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.returncode) == ("True", 0), done.stderr


def test_both_switches_at_once_are_refused():
    """LIMITKEEPER_REQUIRE_COMPILED and LIMITKEEPER_DISABLE_COMPILED together are an error that names both."""
    environment = {**os.environ, "LIMITKEEPER_REQUIRE_COMPILED": "1", "LIMITKEEPER_DISABLE_COMPILED": "1"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert "LIMITKEEPER_REQUIRE_COMPILED and LIMITKEEPER_DISABLE_COMPILED" in done.stderr


def test_a_subinterpreter_names_the_remedies(python):
    """Compiled modules belong to one interpreter of a process: importing them in another is an error that names the remedies."""
    code = "; ".join(
        ("import sys", "sys.path = {sys.path!r}", "import limitkeeper", "print(limitkeeper.Limiter('5/s').hit('k').remaining)")
    )
    done = python(f"""
        import limitkeeper, sys
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        try:
            found = interpreters.run_string(interpreters.create(), f"{code}")
            print(found and found.formatted)
        except Exception as error:  # of Python 3.12 and older
            print(error)
    """)
    expected = "use worker processes instead of subinterpreters" if limitkeeper.compiled else "4\n"
    assert expected in done.stdout, done.stderr
