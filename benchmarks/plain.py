"""The same source without a compiler: a copy of the .py files, in a process that finds neither compiled modules nor Cython."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import Section, Table, number
from timing import Effort


def copy_of_source(folder: str) -> None:
    import limitkeeper

    source = Path(limitkeeper.__file__).parent
    for file in source.rglob("*.py"):
        target = Path(folder, "limitkeeper", file.relative_to(source))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)


def child(effort: Effort) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        copy_of_source(folder)
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, __file__, "quick" if effort.quick else "full"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=100)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section("Plain Python", "The hot key once more, with the plain source: no compiled module, no Cython to import.")
    note("timing a copy of the source")
    took = child(effort)
    table = Table(("rule", "allow ns", "deny ns"))
    for name in sorted({name.rsplit(" ", 1)[0] for name in took if name.endswith((" allow", " deny"))}):
        pair = [took.get(f"{name} {verdict}") for verdict in ("allow", "deny")]
        table.rows.append((name, *(number(value, "") if value else "" for value in pair)))
        for verdict, value in zip(("allow", "deny"), pair, strict=True):
            if value is not None:
                section.figure(f"{name}, {verdict}", value / 1000, None if "log" in name else 2.5, "µs")
    table.rows.append(("empty Python function", number(took["empty Python function"], ""), ""))
    section.details = [table]
    return section


def main(quick: bool) -> None:
    sys.modules["cython"] = None  # type: ignore[assignment]
    import limitkeeper

    if limitkeeper.compiled:
        raise SystemExit("the copy runs compiled: the compiled modules are still found")
    from hot import floor_cases, limitkeeper_cases
    from timing import measure, one_core

    with one_core():
        took, failed = measure([*floor_cases(None), *limitkeeper_cases()], Effort(quick), lambda text: None)
    if failed:
        raise SystemExit(str(failed))
    print(json.dumps(took))


if __name__ == "__main__":
    main(sys.argv[1] == "quick")
