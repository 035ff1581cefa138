"""The command `limitkeeper`. Exit codes: 0 no errors, 1 errors found, 2 bad usage.

limitkeeper policy check FILE…                     mistakes and warnings, each at its place
limitkeeper policy explain FILE --request "…"      what the policy makes of a request
limitkeeper policy schema                          JSON Schema for editors
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from typing import Any, TextIO

from .errors import LimitkeeperError
from .policy.reading.diagnostics import ERROR, Diagnostic

WELL, WRONG, UNREADABLE = 0, 1, 2
#: Who asks what a store holds has more time than a request.
PATIENCE_US = 5_000_000
COLOURS = {"error": "\x1b[31m", "warning": "\x1b[33m", "caret": "\x1b[36m", "end": "\x1b[0m"}


def main(argv: Sequence[str] | None = None) -> int:
    """What the command does; the answer is its exit code."""
    parser = parser_of()
    said = parser.parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not every terminal has an arrow
            stream.reconfigure(errors="replace")
    try:
        code: int = said.run(said)
        sys.stdout.flush()
        return code
    except LimitkeeperError as error:
        print(f"limitkeeper: {error}", file=sys.stderr)
        return UNREADABLE
    except BrokenPipeError:  # `limitkeeper … | head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WELL


def parser_of() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(prog="limitkeeper", description="Rate limiting for Python.")
    parser.add_argument("--version", action="version", version=f"limitkeeper {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    policy = commands.add_parser("policy", help="check and explain policy files", description="Check and explain policy files.")
    verbs = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_check(verbs)
    add_explain(verbs)
    schema = verbs.add_parser("schema", help="JSON Schema of policy files, for editors")
    schema.set_defaults(run=run_schema)
    return parser


def as_json(value: Any) -> str:
    """For programs; escaped where the way out can't carry every character."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(value, indent=2, ensure_ascii=not unicode)


# policy check ----------------------------------------------------------------------------------------------------------------


def add_check(verbs: Any) -> None:
    check = verbs.add_parser("check", help="find all mistakes of policy files")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument("--strict", action="store_true", help="warnings are errors")
    check.add_argument("--import", dest="imports", action="store_true", help="import what the policy calls")
    check.add_argument("--json", action="store_true", help="for programs")
    check.set_defaults(run=run_check)


def run_check(said: argparse.Namespace) -> int:
    from .policy.reading.load import examined

    if said.imports:
        sys.path.insert(0, os.getcwd())
    worst, reports = WELL, []
    for file in said.files:
        try:
            policy, page = examined(file, said.imports)
        except LimitkeeperError as error:  # the others are looked at all the same
            worst = UNREADABLE
            reports.append({"file": file, "ok": False, "unreadable": str(error), "mistakes": []})
            print(f"limitkeeper: {error}", file=sys.stderr)
            continue
        mistakes = page.mistakes()
        bad = policy is None or any(mistake.severity == ERROR or said.strict for mistake in mistakes)
        worst = max(worst, WRONG if bad else WELL)
        reports.append({"file": file, "ok": not bad, "mistakes": [mistake.as_dict() for mistake in mistakes]})
        if not said.json:
            show(file, mistakes, sys.stdout, said.strict)
            print(summary(file, policy, mistakes, said.strict))
    if said.json:
        print(as_json(reports))
    return worst


def summary(file: str, policy: Any, mistakes: Sequence[Diagnostic], strict: bool) -> str:
    errors = sum(mistake.severity == ERROR or strict for mistake in mistakes)
    others = len(mistakes) - errors
    found = [counted(number, word) for number, word in ((errors, "mistake"), (others, "warning")) if number]
    rules = "" if policy is None else f"{counted(len(policy.rules), 'rule')}, "
    return f"{file}: {rules}{' and '.join(found) or 'no mistakes'}"


def counted(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def show(file: str, mistakes: Sequence[Diagnostic], out: TextIO, strict: bool = False) -> None:
    """Each mistake with its line; in colour where somebody looks."""
    colourful = out.isatty() and "NO_COLOR" not in os.environ
    for mistake in mistakes:
        print(coloured(str(mistake), mistake.severity) if colourful else str(mistake), file=out)


def coloured(text: str, severity: str) -> str:
    head, _, rest = text.partition("\n")
    head = head.replace(f": {severity}: ", f": {COLOURS[severity]}{severity}{COLOURS['end']}: ", 1)
    line, _, caret = rest.rpartition("\n")
    return "\n".join(part for part in (head, line, f"{COLOURS['caret']}{caret}{COLOURS['end']}" if caret else "") if part)


# policy explain ----------------------------------------------------------------------------------------------------------------


def add_explain(verbs: Any) -> None:
    explain = verbs.add_parser("explain", help="what a policy makes of a request; nothing is charged")
    explain.add_argument("file", metavar="FILE")
    explain.add_argument(
        "--request", required=True, metavar="REQUEST", help="POST /checkout user=42 header:X-Tenant=acme peer=10.0.0.9"
    )
    explain.add_argument(
        "--store", nargs="?", const="", metavar="URL", help="look into this store, or the policy's own; default: an empty one"
    )
    explain.add_argument("--json", action="store_true", help="for programs")
    explain.set_defaults(run=run_explain)


def run_explain(said: argparse.Namespace) -> int:
    from .policy.reading.load import examined

    policy, page = examined(said.file)
    if policy is None:
        show(said.file, page.mistakes(), sys.stderr)
        return WRONG
    sys.path.insert(0, os.getcwd())
    explanation = explanation_of(policy, said.request, said.store)
    print(as_json(explanation.as_dict()) if said.json else explanation.text())
    return WELL


def explanation_of(policy: Any, line: str, url: str | None) -> Any:
    from .policy.explanation import Explanation
    from .policy.gate import Gate
    from .policy.request_line import read_request
    from .stores import MemoryStore, store_from_url

    request = read_request(line, policy)
    facts = request.facts()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process looks on: several workers are nobody's concern here
        store = MemoryStore() if url is None else store_from_url(url or policy.store)
    try:
        patient = replace(policy, budget_us=max(policy.budget_us, PATIENCE_US))
        with Gate(patient, store=store, imports=False) as gate:
            gate.store = store  # past the guard: a store that can't be asked is an error here, no answer
            wait_for_hashes(gate)
            return Explanation(policy, request, facts, gate.explain(facts))
    finally:
        store.close()


def wait_for_hashes(gate: Any) -> None:
    """Limits of single keys that are read in the background: an explanation without them would be wrong."""
    for clause in gate.compiled.rules:
        ready = getattr(clause.overrides, "ready", None)
        if ready is not None and not ready(2.0):
            print(f"limitkeeper: the overrides of {clause.name!r} can't be read; its own limit is shown", file=sys.stderr)


# policy schema -----------------------------------------------------------------------------------------------------------------


def run_schema(said: argparse.Namespace) -> int:
    from .policy.reading.schema import schema

    print(as_json(schema()))
    return WELL
