"""The command `limitkeeper`. Exit codes: 0 no errors, 1 errors found, 2 bad usage.

limitkeeper policy check FILE…                     report all errors and warnings with their positions
limitkeeper policy explain FILE --request "…"      show which rules apply to a request
limitkeeper policy schema                          print the JSON Schema for editors
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
from typing import TYPE_CHECKING, TextIO

from .errors import LimitkeeperError
from .policy.reading.diagnostics import ERROR, Diagnostic

if TYPE_CHECKING:
    from .policy.explain import RequestExplanation
    from .policy.gate import Gate
    from .policy.model import Policy

    SubParsers = argparse._SubParsersAction[argparse.ArgumentParser]

OK, ERRORS, USAGE = 0, 1, 2
#: Time limit of a remote store in `explain`: an operator has more time than a request.
BUDGET_US = 5_000_000
COLORS = {"error": "\x1b[31m", "warning": "\x1b[33m", "caret": "\x1b[36m", "end": "\x1b[0m"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    args = build_parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # not every encoding has an arrow
            stream.reconfigure(errors="replace")
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except LimitkeeperError as error:
        print(f"limitkeeper: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:  # `limitkeeper … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def build_parser() -> argparse.ArgumentParser:
    from . import __version__

    exit_codes = "Exit codes: 0 no errors, 1 errors found, 2 bad usage."
    parser = argparse.ArgumentParser(prog="limitkeeper", description="Rate limiting for Python.", epilog=exit_codes)
    parser.add_argument("--version", action="version", version=f"limitkeeper {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    policy = commands.add_parser("policy", help="check and explain policy files", description="Check and explain policy files.")
    actions = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_check(actions)
    add_explain(actions)
    schema = actions.add_parser("schema", help="print the JSON Schema of policy files, for editors")
    schema.set_defaults(run=run_schema)
    return parser


def to_json(value: object) -> str:
    """Indented JSON; ASCII only where the output encoding is not Unicode."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(value, indent=2, ensure_ascii=not unicode)


# policy check ----------------------------------------------------------------------------------------------------------------


def add_check(actions: SubParsers) -> None:
    check = actions.add_parser("check", help="report all errors and warnings of policy files")
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument("--strict", action="store_true", help="treat warnings as errors")
    check.add_argument("--import", dest="imports", action="store_true", help="also import the callables that the policy names")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    from .policy.reading.load import examine

    if args.imports:
        sys.path.insert(0, os.getcwd())
    code, reports = OK, []
    for file in args.files:
        try:
            policy, context = examine(file, args.imports)
        except LimitkeeperError as error:  # the other files are still checked
            code = USAGE
            reports.append({"file": file, "ok": False, "unreadable": str(error), "diagnostics": []})
            print(f"limitkeeper: {error}", file=sys.stderr)
            continue
        found = context.diagnostics()
        failed = policy is None or any(one.severity == ERROR or args.strict for one in found)
        code = max(code, ERRORS if failed else OK)
        reports.append({"file": file, "ok": not failed, "diagnostics": [one.as_dict() for one in found]})
        if not args.json:
            print_diagnostics(found, sys.stdout)
            print(summarize(file, policy, found, args.strict))
    if args.json:
        print(to_json(reports))
    return code


def summarize(file: str, policy: Policy | None, found: Sequence[Diagnostic], strict: bool) -> str:
    errors = sum(one.severity == ERROR or strict for one in found)
    counts = [counted(number, noun) for number, noun in ((errors, "error"), (len(found) - errors, "warning")) if number]
    rules = "" if policy is None else f"{counted(len(policy.rules), 'rule')}, "
    return f"{file}: {rules}{' and '.join(counts) or 'no errors'}"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_diagnostics(found: Sequence[Diagnostic], out: TextIO) -> None:
    """Prints each diagnostic with its source line; in color on a terminal unless NO_COLOR is set."""
    color = out.isatty() and "NO_COLOR" not in os.environ
    for one in found:
        print(colorize(str(one), one.severity) if color else str(one), file=out)


def colorize(text: str, severity: str) -> str:
    head, _, rest = text.partition("\n")
    head = head.replace(f": {severity}: ", f": {COLORS[severity]}{severity}{COLORS['end']}: ", 1)
    line, _, caret = rest.rpartition("\n")
    return "\n".join(part for part in (head, line, f"{COLORS['caret']}{caret}{COLORS['end']}" if caret else "") if part)


# policy explain ----------------------------------------------------------------------------------------------------------------


def add_explain(actions: SubParsers) -> None:
    explain = actions.add_parser("explain", help="show which rules apply to a request; nothing is charged")
    explain.add_argument("file", metavar="FILE")
    explain.add_argument(
        "--request", required=True, metavar="REQUEST", help="for example: POST /checkout user=42 header:X-Tenant=acme"
    )
    explain.add_argument(
        "--store", nargs="?", const="", metavar="URL", help="read this store, or the policy's own; default: an empty one"
    )
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    from .policy.reading.load import examine

    policy, context = examine(args.file)
    if policy is None:
        print_diagnostics(context.diagnostics(), sys.stderr)
        return ERRORS
    sys.path.insert(0, os.getcwd())
    explanation = explain_request(policy, args.request, args.store)
    print(to_json(explanation.as_dict()) if args.json else explanation.text())
    return OK


def explain_request(policy: Policy, line: str, url: str | None) -> RequestExplanation:
    from .policy.explain import RequestExplanation
    from .policy.gate import Gate
    from .policy.request_line import parse_request
    from .stores import MemoryStore, store_from_url

    parsed = parse_request(line, policy)
    request = parsed.context()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about several workers do not concern this process
        store = MemoryStore() if url is None else store_from_url(url or policy.store)
    try:
        patient = replace(policy, budget_us=max(policy.budget_us, BUDGET_US))
        with Gate(patient, store=store, imports=False) as gate:
            gate.store = store  # without the guard: a store that fails is an error here, not a decision
            wait_for_overrides(gate)
            return RequestExplanation(policy, parsed, request, gate.explain(request))
    finally:
        store.close()


def wait_for_overrides(gate: Gate) -> None:
    """Waits for overrides that are read in the background: without them the explanation would be wrong."""
    for rule in gate.compiled.rules:
        ready = getattr(rule.overrides, "ready", None)
        if ready is not None and not ready(2.0):
            print(f"limitkeeper: can't read the overrides of {rule.name!r}; showing its own limit", file=sys.stderr)


# policy schema -----------------------------------------------------------------------------------------------------------------


def run_schema(args: argparse.Namespace) -> int:
    from .policy.reading.sections import policy_schema

    print(to_json(policy_schema()))
    return OK
