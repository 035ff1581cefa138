"""Imports go one way only: from the public API down to modules without dependencies."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "limitkeeper"

#: Layers, the lowest first. A folder imports from its own layer and from those below.
LAYERS = (
    ("_cython_shim", "charts", "clock", "decision", "errors", "fork", "garbage_collection", "monotonic", "rate"),
    ("algorithms",),
    ("observe", "stores"),
    (
        *("concurrency", "decorators", "limiter", "limiter_base", "policy", "registry", "reservation", "resilience4j", "sharing"),
        *("fifo_gate", "future_charges", "periodic_thread", "testing", "wait_queue"),
    ),
    ("client", "plan", "simulate", "tasks", "web"),
    ("service",),
    ("__init__",),
    ("__main__", "cli", "keys_cli", "top_cli"),
)
HEIGHT = {room: height for height, rooms in enumerate(LAYERS) for room in rooms}

CIMPORT = re.compile(r"^\s*from\s+limitkeeper\.([\w.]+)\s+cimport\s|^\s*cimport\s+limitkeeper\.([\w.]+)", re.M)
FROM_CIMPORT = re.compile(r"^\s*from\s+limitkeeper\.([\w.]+)\s+cimport\s+(.+)$", re.M)


def files() -> list[Path]:
    return sorted(path for ending in ("py", "pyx", "pxd") for path in SRC.rglob(f"*.{ending}"))


def module(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts


def room(parts: tuple[str, ...]) -> str:
    return parts[0] if parts else "__init__"


@cache
def modules() -> set[tuple[str, ...]]:
    return {module(path) for path in files()}


def narrowed(parts: tuple[str, ...], names: list[str]) -> Iterator[tuple[str, ...]]:
    """The modules that `from parts import names` reads."""
    for name in names:
        yield (*parts, name) if (*parts, name) in modules() else (parts or ("__init__",))


def only_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(path: Path, in_functions: bool = True) -> set[tuple[str, ...]]:
    """The modules of this package that a file imports when it runs (`in_functions` False: when it is imported); what is
    imported for
    types only is left out."""
    text = path.read_text()
    found: set[tuple[str, ...]] = set()
    if path.suffix != ".py":
        for parts, names in FROM_CIMPORT.findall(text):
            found |= set(narrowed(tuple(parts.split(".")), [name.strip() for name in names.split(",")]))
        found |= {tuple(name.split(".")) for _, name in CIMPORT.findall(text) if name}
        return found
    here = path.relative_to(SRC).parts[:-1]
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if only_for_types(node):  # type: ignore[arg-type]
            continue
        if isinstance(node, ast.FunctionDef) and not in_functions:
            continue
        waiting.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.ImportFrom):
            parts = tuple((node.module or "").split(".")) if node.module else ()
            names = [alias.name for alias in node.names]
            if parts[:2] == ("cython", "cimports"):
                parts = parts[2:]
            if node.level:
                base = here[: len(here) - node.level + 1]
                found |= set(narrowed((*base, *parts), names))
            elif parts[:1] == ("limitkeeper",):
                found |= set(narrowed(parts[1:], names))
        elif isinstance(node, ast.Import):
            found |= {tuple(alias.name.split("."))[1:] for alias in node.names if alias.name.startswith("limitkeeper.")}
    return found


def test_imports_go_down():
    """A file imports from its own layer and from those below, never from above."""
    assert {room(module(path)) for path in files()} <= set(HEIGHT), "a new layer: add it to LAYERS"
    above = [
        f"{path.relative_to(SRC)} imports {'.'.join(other)}"
        for path in files()
        for other in sorted(imports(path))
        if HEIGHT[room(other)] > HEIGHT[room(module(path))]
    ]
    assert above == []


def test_there_is_no_round_trip():
    """No module imports itself through others, so the order of execution is always clear."""
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for path in files():
        graph.setdefault(module(path), set()).update(
            other for other in imports(path, in_functions=False) if other != module(path)
        )
    done: set[tuple[str, ...]] = set()

    def walk(here: tuple[str, ...], way: tuple[tuple[str, ...], ...]) -> None:
        assert here not in way, "an import cycle: " + " → ".join(".".join(step) for step in (*way[way.index(here) :], here))
        if here in done:
            return
        for other in sorted(graph.get(here, ())):
            walk(other, (*way, here))
        done.add(here)

    for start in sorted(graph):
        walk(start, ())


def test_the_reader_of_imports_sees_all_kinds():
    """The arrows are read from relative imports, absolute ones and cimports alike."""
    memory = imports(SRC / "stores" / "memory.py")
    assert ("algorithms", "all_of") in memory
    assert ("errors",) in memory
    assert ("algorithms", "limit") in imports(SRC / "stores" / "cell_table.pyx")
    assert ("decision",) in imports(SRC / "stores" / "memory.pxd")


def test_only_the_clock_reads_time():
    """`time` is imported in clock.py and nowhere else: everywhere else time is an argument."""
    guilty = []
    for path in SRC.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            if "time" in names:
                guilty.append(str(path.relative_to(SRC)))
    assert guilty == ["clock.py"]


def test_rules_import_no_clock_lock_log_or_random():
    """An algorithm imports nothing for time, locks, logs, randomness or I/O."""
    forbidden = {"asyncio", "datetime", "logging", "os", "random", "secrets", "socket", "threading", "time"}
    for path in (SRC / "algorithms").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not forbidden & {alias.name.split(".")[0] for alias in node.names}, path.name
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                assert (node.module or "").split(".")[0] not in forbidden, path.name
