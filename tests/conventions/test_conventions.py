"""The conventions that a test can check."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest

import limitkeeper
from limitkeeper import errors

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "limitkeeper"
LEFT_OUT = {".git", ".venv", "build", "dist", "site", "out", "__pycache__", "node_modules"}
TEXT = {
    ".py",
    ".pyx",
    ".pxd",
    ".pyi",
    ".md",
    ".toml",
    ".yml",
    ".yaml",
    ".cfg",
    ".txt",
    ".sh",
    ".json",
    ".lua",
    ".css",
    ".js",
    ".html",
    "",
}


def tree() -> list[Path]:
    """Every text file of the project that is written by hand."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.endswith((".egg-info", "_cache", "_CACHE"))]
        folders[:] = [name for name in folders if not name.startswith(".") or name in (".ci", ".github")]
        found += [Path(folder, name) for name in names if Path(name).suffix in TEXT]
    return sorted(found)


def isort_style(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions, each in alphabetical order."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def test_all_is_exactly_the_public_names():
    """`limitkeeper.__all__` names everything public in the package, and nothing else."""
    public = {
        name for name, value in vars(limitkeeper).items() if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(public | set(limitkeeper._LATER)) == sorted(limitkeeper.__all__)


def packages() -> list[types.ModuleType]:
    found = [limitkeeper]
    infos = pkgutil.walk_packages(limitkeeper.__path__, "limitkeeper.")
    return [*found, *(importlib.import_module(info.name) for info in infos if info.ispkg)]


@pytest.mark.parametrize("package", packages(), ids=lambda package: package.__name__)
def test_every_package_has_a_sorted_all_that_is_true(package):
    """Each package lists in `__all__` what it offers: sorted, once each, and existing."""
    names = list(package.__all__)
    assert names == sorted(set(names), key=isort_style)
    assert [name for name in names if not hasattr(package, name)] == []


def test_star_import_gives_the_public_names():
    """`from limitkeeper import *` brings exactly the public names."""
    namespace: dict[str, object] = {}
    exec("from limitkeeper import *", namespace)
    assert sorted(set(namespace) - {"__builtins__"}) == sorted(limitkeeper.__all__)


def test_every_public_thing_has_a_docstring():
    """Every public name has a docstring: classes, functions, and the verbs of limiters and reservations."""
    things = {name: getattr(limitkeeper, name) for name in limitkeeper.__all__}
    shown = {name: thing for name, thing in things.items() if isinstance(thing, (type, types.FunctionType))}
    verbs = ["hit", "peek", "acquire", "reserve", "refund", "reset", "hit_many", "limit", "stats", "waiting", "events"]
    for owner in (limitkeeper.Limiter, limitkeeper.AsyncLimiter):
        shown |= {f"{owner.__name__}.{verb}": getattr(owner, verb) for verb in verbs}
    shown |= {f"Reservation.{name}": getattr(limitkeeper.Reservation, name) for name in ("wait", "decision", "settle", "cancel")}
    assert [name for name, thing in shown.items() if not inspect.getdoc(thing)] == []


def test_the_version_is_said_once():
    """`limitkeeper.__version__` is the version of the project file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert limitkeeper.__version__ == project["version"]


def test_there_is_no_required_dependency():
    """The installed package needs nothing: every requirement belongs to an extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == []
    required = [line for line in importlib.metadata.requires("limitkeeper") or [] if "extra ==" not in line]
    assert required == []


def test_the_package_imports_only_what_python_brings():
    """`import limitkeeper` loads nothing but the standard library and itself."""
    code = """
import sys
before = set(sys.modules)
import limitkeeper
new = {name.split(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names) - {"limitkeeper"}))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(limitkeeper.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    foreign = [name for name in done.stdout.split() if not name.startswith(("cython", "Cython", "_cython", "_distutils_hack"))]
    assert foreign == []  # Cython itself is looked for, and may be missing (see test_compiled.py)


def test_the_package_is_typed():
    """py.typed lies in the package, so that type checkers read its annotations."""
    assert (SRC / "py.typed").exists()


# Errors


def drawn() -> dict[str, str]:
    """Each error of the drawn tree with the one it hangs from."""
    lines = [line for line in (errors.__doc__ or "").splitlines() if re.match(r"\s*(?:[│├└─ ]+)?[A-Z]\w+(?:\s{2,}|\s*$)", line)]
    path: list[tuple[int, str]] = []
    found = {}
    for line in lines:
        name = re.search(r"[A-Z]\w+", line)
        assert name is not None
        depth = name.start()
        while path and path[-1][0] >= depth:
            path.pop()
        found[name[0]] = path[-1][1] if path else "Exception"
        path.append((depth, name[0]))
    return found


def test_the_error_tree_is_drawn_as_it_is():
    """The docstring of errors.py draws every error under the one it derives from."""
    defined = {
        name: thing.__mro__[1].__name__
        for name, thing in vars(errors).items()
        if isinstance(thing, type) and issubclass(thing, Exception)
    }
    assert drawn() == defined


def test_every_error_is_public():
    """Each error of the tree can be imported from the package."""
    assert [name for name in drawn() if name not in limitkeeper.__all__] == []


# Files


def test_files_are_short():
    """A source file has at most 600 lines, one object."""
    most = 600
    assert [path for path in (*SRC.rglob("*.py"), *SRC.rglob("*.pyx")) if len(path.read_text().splitlines()) > most] == []


def test_a_module_opens_by_saying_its_idea():
    """Every module has a docstring."""
    assert [path for path in SRC.rglob("*.py") if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_names_are_nouns_of_the_domain():
    """No file or folder is called utils, helpers, manager or impl."""
    forbidden = {"utils", "util", "helpers", "helper", "manager", "managers", "impl", "misc", "common"}
    assert [str(path) for path in (ROOT / "src").rglob("*") if path.stem.strip("_") in forbidden] == []


def test_no_machine_path_is_written_down():
    """No file contains a path of the machine it was written on."""
    places = [str(ROOT), str(Path.home()), "/ro" + "ot/", "/User" + "s/", "/ho" + "me/"]
    guilty = [
        f"{path.relative_to(ROOT)}: {place}"
        for path in tree()
        for place in places
        if len(place) > 1 and place in path.read_text(errors="replace")
    ]
    assert guilty == []


def test_nothing_is_left_to_be_done():
    """No file contains a note about missing work."""
    notes = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
    guilty = []
    for path in tree():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if notes.search(line):
                guilty.append(f"{path.relative_to(ROOT)}:{number}")
    assert guilty == []


def test_tests_state_a_truth_each():
    """Every test has a docstring: one fact, in a sentence."""
    silent = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            a_test = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test")
            if a_test and not ast.get_docstring(node):
                silent.append(f"{path.relative_to(ROOT)}::{node.name}")
    assert silent == []


def test_test_files_have_names_of_their_own():
    """No two test files share a name, since tests are no package."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_make_help_describes_every_target():
    """`make help` prints a line for each target that the Makefile declares as phony."""
    targets = re.search(r"^\.PHONY: (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    variables = {"PATH": os.environ["PATH"]}  # without those of the make that runs the tests
    printed = subprocess.run(["make", "-s", "help"], cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout
    assert targets is not None
    assert sorted(line.split()[1] for line in printed.splitlines()) == sorted(targets[1].split())
