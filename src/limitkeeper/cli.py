"""The command `limitkeeper`. Exit codes: 0 no errors, 1 errors found, 2 bad usage.

limitkeeper policy check FILE…                     report all errors and warnings with their positions
limitkeeper policy explain FILE --request "…"      show which rules apply to a request
limitkeeper policy schema                          print the JSON Schema for editors
limitkeeper policy init [FILE]                     write a commented starting policy
limitkeeper policy test FILE…                      check requests against a policy, on a manual clock
limitkeeper policy diff OLD NEW                    show which rules change, and for which requests
limitkeeper keys list|show|reset LIMIT [KEY]       the keys of a limit in a store
limitkeeper keys override LIMIT KEY [TO]           set, show or remove the limit of one key or pattern at run time
limitkeeper plan [analyze|probe|suggest] …         choose limits from numbers, files, a probe, or live metrics
limitkeeper simulate SCENARIO.yaml …                  simulate clients, limits and services on a virtual clock
limitkeeper policy export nginx|caddy|envoy FILE   print the configuration of a gateway that asks the service
limitkeeper serve [FILE] [--store URL] …           serve decisions over HTTP, the Redis protocol and gRPC (Envoy)
limitkeeper top [--admin URL]                      live decisions of a service by rule, and the keys refused most
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn, TextIO

from .errors import LimitkeeperError
from .policy.reading.diagnostics import ERROR, NOTE, Diagnostic

if TYPE_CHECKING:
    from .policy.explain import RequestExplanation
    from .policy.gate import Gate
    from .policy.model import Policy
    from .stores import Store

OK, ERRORS, USAGE = 0, 1, 2
#: Time limit of a remote store in `explain`: an operator has more time than a request.
BUDGET_US = 5_000_000
COLORS = {"error": "\x1b[31m", "warning": "\x1b[33m", "note": "\x1b[36m", "caret": "\x1b[36m", "end": "\x1b[0m"}


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


class CommandParser(argparse.ArgumentParser):
    """Suggests `policy check` for `check`, and --help for a missing command."""

    #: The commands of `policy`.
    of_policy: tuple[str, ...] = ()

    def error(self, message: str) -> NoReturn:
        for word in self.of_policy:
            if f"invalid choice: {word!r}" in message:
                message += f"; did you mean '{self.prog} policy {word}'?"
        if message.endswith("required: COMMAND"):
            message += f"; '{self.prog} --help' lists them"
        super().error(message)


def build_parser() -> argparse.ArgumentParser:
    from . import __version__

    exit_codes = "Exit codes: 0 no errors, 1 errors found, 2 bad usage."
    root = CommandParser(prog="limitkeeper", description="Rate limiting for Python.", epilog=exit_codes)
    parser: argparse.ArgumentParser = root
    parser.add_argument("--version", action="version", version=f"limitkeeper {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    policy = commands.add_parser("policy", help="check and explain policy files", description="Check and explain policy files.")
    actions = policy.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check = actions.add_parser("check", help="report all errors, warnings and notes of policy files")
    check.set_defaults(run=run_check)
    check.add_argument("files", nargs="+", metavar="FILE")
    check.add_argument("--strict", action="store_true", help="treat warnings as errors")
    check.add_argument("--import", dest="imports", action="store_true", help="also import the callables that the policy names")
    explain = actions.add_parser("explain", help="show which rules apply to a request; nothing is charged")
    explain.set_defaults(run=run_explain)
    explain.add_argument("file", metavar="FILE")
    example = "for example: POST /checkout user=42 header:X-Tenant=acme"
    explain.add_argument("--request", required=True, metavar="REQUEST", help=example)
    stores = "read this store, or the policy's own; default: an empty one"
    explain.add_argument("--store", nargs="?", const="", metavar="URL", help=stores)
    schema = actions.add_parser("schema", help="print the JSON Schema of policy files, for editors")
    schema.set_defaults(run=run_schema)
    init = actions.add_parser("init", help="write a commented starting policy")
    init.set_defaults(run=run_init)
    init.add_argument("file", nargs="?", default="limitkeeper.yaml", metavar="FILE", help="default: limitkeeper.yaml")
    init.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    test = actions.add_parser("test", help="run test files: requests with their expected outcome")
    test.set_defaults(run=run_test)
    test.add_argument("files", nargs="+", metavar="FILE", help="YAML with `policy` and `tests`")
    diff = actions.add_parser("diff", help="show which rules change between two policies, and for which requests")
    diff.set_defaults(run=run_diff)
    diff.add_argument("old", metavar="OLD")
    diff.add_argument("new", metavar="NEW")
    for command in (check, explain, test, diff):
        command.add_argument("--json", action="store_true", help="print JSON")
    add_keys(commands)
    add_plan(commands)
    add_replay(commands)
    add_simulate(commands)
    add_export(actions)
    root.of_policy = tuple(actions.choices)
    add_serve(commands)
    add_top(commands)
    return parser


def to_json(value: object) -> str:
    """Indented JSON; ASCII only where the output encoding is not Unicode."""
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    return json.dumps(value, indent=2, ensure_ascii=not unicode)


# policy check ----------------------------------------------------------------------------------------------------------------


def run_check(args: argparse.Namespace) -> int:
    from .policy.reading.load import examine

    if args.imports:
        sys.path.insert(0, os.getcwd())
    code, reports = OK, []
    for file in args.files:
        try:
            policy, context = examine(file, args.imports, keys_needed=False)
        except LimitkeeperError as error:  # the other files are still checked
            code = USAGE
            reports.append({"file": file, "ok": False, "unreadable": str(error), "diagnostics": []})
            print(f"limitkeeper: {error}", file=sys.stderr)
            continue
        found = context.diagnostics()
        serious = [one for one in found if one.severity != NOTE]
        failed = policy is None or any(one.severity == ERROR or args.strict for one in serious)
        code = max(code, ERRORS if failed else OK)
        reports.append({"file": file, "ok": not failed, "diagnostics": [one.as_dict() for one in found]})
        if not args.json:
            print_diagnostics(found, sys.stdout)
            print(summarize(file, policy, serious, args.strict))
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


def run_explain(args: argparse.Namespace) -> int:
    from .policy.reading.load import examine

    policy, context = examine(args.file, keys_needed=False)
    if policy is None:
        print_diagnostics(context.diagnostics(), sys.stderr)
        return ERRORS
    explanation = explain_request(policy, args.request, args.store)
    print(to_json(explanation.as_dict()) if args.json else explanation.text())
    return OK


def explain_request(policy: Policy, line: str, url: str | None) -> RequestExplanation:
    from .policy.explain import RequestExplanation
    from .policy.key_inspection import open_shared_store
    from .policy.one_line_request import parse_request
    from .stores import MemoryStore

    request = parse_request(line, policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about several workers do not concern this process
        store = MemoryStore() if url is None else open_shared_store(url or policy.store)
    try:
        with open_gate(policy, store) as gate:
            return RequestExplanation(policy, request, gate.explain(request))
    finally:
        store.close()


@contextmanager
def open_gate(policy: Policy, store: Store) -> Iterator[Gate]:
    """A gate that has read all overrides. Its store has no guard: one that fails is an error here, not a decision."""
    from .policy.gate import Gate

    sys.path.insert(0, os.getcwd())
    patient = replace(policy, budget_us=max(policy.budget_us, BUDGET_US))
    with Gate(patient, store=store, imports=False) as gate:
        gate.compiled.store = store
        gate.operator_overrides.refresh()
        wait_for_overrides(gate)
        yield gate


def wait_for_overrides(gate: Gate) -> None:
    """Waits for overrides that are read in the background: without them the explanation would be wrong."""
    for rule in gate.compiled.rules:
        ready = getattr(rule.overrides, "ready", None)
        if ready is not None and not ready(2.0):
            print(f"limitkeeper: can't read the overrides of {rule.name!r}; showing its own limit", file=sys.stderr)


# policy schema -----------------------------------------------------------------------------------------------------------------


def run_schema(args: argparse.Namespace) -> int:
    from .policy.reading.policy_sections import policy_schema

    print(to_json(policy_schema()))
    return OK


# policy init, test, diff -------------------------------------------------------------------------------------------------------


def run_init(args: argparse.Namespace) -> int:
    from .policy.starter_policy import write_starter_policy

    write_starter_policy(args.file, args.force)
    print(f"{args.file}: written; next: limitkeeper policy check {args.file}")
    return OK


def run_test(args: argparse.Namespace) -> int:
    from .policy.policy_test_file import run_policy_tests

    sys.path.insert(0, os.getcwd())
    code, reports = OK, []
    for file in args.files:
        run = run_policy_tests(file)
        found = run.context.diagnostics()
        code = max(code, ERRORS if found else OK)
        tests = [{"name": test.name, "ok": test not in run.failed} for test in run.tests]
        reports.append({"file": file, "ok": not found, "tests": tests, "diagnostics": [one.as_dict() for one in found]})
        if not args.json:
            print_diagnostics(found, sys.stdout)
            result = f"{len(run.failed)} failed" if run.failed else "all passed"
            print(f"{file}: {counted(len(tests), 'test')}, {result}" if tests else f"{file}: {counted(len(found), 'error')}")
    if args.json:
        print(to_json(reports))
    return code


def run_diff(args: argparse.Namespace) -> int:
    from .policy.policy_diff import PolicyDiff, read_source_policy
    from .policy.reading.diagnostics import PolicyError

    try:
        diff = PolicyDiff.of(read_source_policy(args.old), read_source_policy(args.new))
    except PolicyError as error:
        print_diagnostics(error.diagnostics, sys.stderr)
        return ERRORS
    print(to_json(asdict(diff)) if args.json else diff.text())
    return OK


# keys --------------------------------------------------------------------------------------------------------------------------


def run_keys(args: argparse.Namespace) -> int:
    from . import keys_cli

    return keys_cli.run_override(args) if args.action == "override" else keys_cli.run_keys(args)


def add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "List, show and reset the keys of a limit, and change the limits of single keys."
    keys = commands.add_parser("keys", help="list, show, reset and override single keys", description=text)
    actions = keys.add_subparsers(title="commands", metavar="COMMAND", required=True)
    texts = {"list": "list the keys that have state", "show": "show the state of a key", "reset": "delete the state of a key"}
    for action, text in texts.items():
        command = actions.add_parser(action, help=text)
        command.set_defaults(run=run_keys, action=action, json=False)
        command.add_argument("limit", metavar="LIMIT", help="name of the rule")
        if action == "list":
            command.add_argument("--match", default="*", metavar="PATTERN", help="only keys such as 'user:*'")
            command.add_argument("--first", type=int, default=20, metavar="N", help="how many are shown (default: 20)")
        else:
            command.add_argument("key", metavar="KEY", help="key, as `keys list` shows it")
        if action != "reset":
            command.add_argument("--json", action="store_true", help="print JSON")
        command.add_argument("--policy", default="limitkeeper.yaml", metavar="FILE", help="default: limitkeeper.yaml")
        command.add_argument("--store", metavar="URL", help="default: the policy's store")
    text = "Set the limit of a key, or of a pattern such as 'premium_*', at run time; without TO, show it."
    override = actions.add_parser("override", help="set, show or remove the limit of a key or pattern", description=text)
    override.set_defaults(run=run_keys, action="override")
    override.add_argument("limit", metavar="LIMIT", help="name of the rule")
    override.add_argument("key", metavar="KEY", help="key, or pattern with *")
    override.add_argument("to", nargs="?", metavar="TO", help="'token bucket 5/s burst 10', 'unlimited' or 'blocked'")
    override.add_argument("--for", dest="duration", metavar="DURATION", help="such as 1h; default: until it is removed")
    override.add_argument("--reason", default="", metavar="TEXT", help="for the audit log")
    override.add_argument("--remove", action="store_true", help="remove the override")
    override.add_argument("--admin", metavar="URL", help="admin port of the service (default: http://127.0.0.1:7073)")
    override.add_argument("--policy", metavar="FILE", help="write to the store of this policy, without a service")
    override.add_argument("--store", metavar="URL", help="with --policy: another store than the policy's")


# top ---------------------------------------------------------------------------------------------------------------------------


def run_top(args: argparse.Namespace) -> int:
    from . import top_cli

    return top_cli.run_top(args)


def add_top(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = (
        "Show the decisions of a service by rule, and the keys that it refuses most: every second on a terminal, otherwise once."
    )
    parser = commands.add_parser("top", help="show live decisions of a service", description=text)
    parser.set_defaults(run=run_top)
    parser.add_argument("--admin", metavar="URL", help="admin port of the service (default: http://127.0.0.1:7073)")
    parser.add_argument("--interval", default="1s", metavar="DURATION", help="time between two views (default: 1s)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after N views")
    parser.add_argument("--keys", action="store_true", help="show keys instead of their hashes (needs the scope operate)")


# plan --------------------------------------------------------------------------------------------------------------------------


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `plan` and its subcommands to the command line."""
    parser = commands.add_parser(
        "plan", help="choose limits from capacity and measurements", description="Choose limits from numbers."
    )
    parser.set_defaults(run=run_plan, action="run_numbers")
    parser.add_argument("--p95", metavar="TIME", help="p95 latency, as in 800ms")
    parser.add_argument("--mean", metavar="TIME", help="mean latency, for comparison by Little's law")
    parser.add_argument("--threads", metavar="N", help="threads of one pod")
    parser.add_argument("--db-pool", metavar="N", help="database connections of one pod")
    parser.add_argument("--dependency", action="append", default=[], metavar="NAME=CAPACITY", help="300, 100@80ms, '100@80ms x2'")
    add_common(parser)
    actions = parser.add_subparsers(title="commands", metavar="COMMAND")
    found = actions.add_parser("analyze", help="choose limits from latencies, access logs and load tests")
    found.set_defaults(run=run_plan, action="run_analyze")
    found.add_argument("files", nargs="+", metavar="FILE")
    found.add_argument("--unit", default="ms", help="unit of latencies without one (default: ms)")
    found.add_argument("--window", default="10s", metavar="TIME", help="windows of the load–latency curve (default: 10s)")
    probe = actions.add_parser("probe", help="raise the load of a URL step by step until the SLO is broken")
    probe.set_defaults(run=run_plan, action="run_probe")
    add_probe(probe)
    for one in (found, probe):
        one.add_argument("--slo", default="p95=800ms,p99=2s", metavar="SLO", help="objectives (default: p95=800ms,p99=2s)")
        add_common(one)
    suggest = actions.add_parser("suggest", help="propose changes of a policy from a log or live metrics")
    suggest.set_defaults(run=run_plan, action="run_suggest")
    add_suggest(suggest)


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pods", metavar="N", help="instances of the service")
    parser.add_argument("--concurrency", metavar="N", help="requests that one pod safely handles at once")
    parser.add_argument("--margin", default="0.7", help="share of the ceiling (default: 0.7)")
    parser.add_argument("--split", metavar="SHARES", help="shares of client classes, as in partner=200,public=rest")
    parser.add_argument("--endpoints", metavar="SHARES", help="shares of endpoints, as in 'POST /checkout=60%%,GET /orders=rest'")
    for name in ("user", "tenant", "partner"):
        parser.add_argument(f"--per-{name}", metavar="RPS", help=f"limit of each {name}: 5, or by plan: free=5,pro=20")
    parser.add_argument("--internal", metavar="RPS", help="share kept for internal jobs: 20, or 10%%")
    parser.add_argument("--burst", type=int, metavar="N", help="burst of the limit (default: the slots free at the limit)")
    parser.add_argument("--oversubscribe", default="1", metavar="FACTOR", help="shares may add up to FACTOR × the limit")
    parser.add_argument("--match", action="append", default=[], metavar="REQUEST", help="what is limited, as in 'POST /checkout'")
    parser.add_argument("--name", default="planned", help="name of the plan and the policy")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts")
    parser.add_argument("--write-policy", metavar="FILE", help="write the limits as a policy file")
    parser.add_argument("--overwrite", action="store_true", help="overwrite files that exist")


def add_probe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL")
    parser.add_argument("--start", type=float, default=10, metavar="RPS", help="first load (default: 10)")
    parser.add_argument("--factor", type=float, default=1.5, help="each load is FACTOR × the one before (default: 1.5)")
    parser.add_argument("--max-rate", type=float, default=500, metavar="RPS", help="largest load (default: 500)")
    parser.add_argument("--step", default="5s", metavar="TIME", help="length of a step (default: 5s)")
    parser.add_argument("--time", default="120s", metavar="TIME", help="length of the whole probe (default: 120s)")
    parser.add_argument("--method", default="GET")
    parser.add_argument("--header", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--data", default="", help="body of each request")
    parser.add_argument("--allow-remote", action="store_true", help="probe a URL that is not on this machine")


def add_suggest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", required=True, metavar="FILE")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--log", metavar="FILE", help="access log with times")
    source.add_argument("--metrics", metavar="URL_OR_FILE", help="Prometheus text of a running service")
    parser.add_argument("--slo", default="p95=800ms,p99=2s", metavar="SLO")
    parser.add_argument("--ceiling", metavar="RPS", help="measured ceiling × margin, for limits without a key")
    parser.add_argument(
        "--stage", choices=("shadow", "force"), default="shadow", help="shadow: beside the old limits; force: instead of them"
    )
    parser.add_argument("--hash-keys", action="store_true", help="show keyed hashes instead of keys")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write-policy", metavar="FILE", help="write the proposed policy")
    parser.add_argument("--overwrite", action="store_true", help="overwrite files that exist")


def run_plan(args: argparse.Namespace) -> int:
    from .plan import cli as plan_cli

    code: int = getattr(plan_cli, args.action)(args)
    return code


# replay ------------------------------------------------------------------------------------------------------------------------


def add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Replay an access log through a policy: who would have been refused, when, and by which rule. Nothing is changed."
    parser = commands.add_parser("replay", help="show whom a policy would have refused in an access log", description=text)
    parser.set_defaults(run=run_plan, action="run_replay")
    parser.add_argument("log", metavar="ACCESS_LOG", help="nginx, uvicorn, JSON lines or CSV, with times; .gz too")
    parser.add_argument("--policy", required=True, metavar="FILE")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="keys to show of each rule (default: 10)")
    parser.add_argument("--hash-keys", action="store_true", help="show keyed hashes instead of keys")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--csv", action="store_true", help="print a row for each refusal, as it is replayed")


# simulate ----------------------------------------------------------------------------------------------------------------------


def add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Simulate clients, limits and services on a virtual clock. Several scenarios are compared side by side."
    parser = commands.add_parser("simulate", help="simulate clients, limits and services", description=text)
    parser.set_defaults(run=run_simulate)
    parser.add_argument("files", nargs="+", metavar="SCENARIO")
    parser.add_argument("--seed", type=int, metavar="N", help="another seed than the scenario's")
    parser.add_argument("--duration", metavar="TIME", help="another duration than the scenario's")
    parser.add_argument("--json", action="store_true", help="print JSON, with the series")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts")
    parser.add_argument("--title", default="Simulation", help="title of the page")
    parser.add_argument("--csv", metavar="FILE", help="write the series")
    parser.add_argument("--png", metavar="FOLDER", help="write the charts as PNG files (needs matplotlib)")
    parser.add_argument("--overwrite", action="store_true", help="overwrite files that exist")


def run_simulate(args: argparse.Namespace) -> int:
    from .simulate import cli as command

    return command.run_simulate(args)


# policy export -----------------------------------------------------------------------------------------------------------------


def add_export(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = (
        "Print a configuration of the gateway: it asks the service about the paths of the policy, with the headers that it reads."
    )
    parser = actions.add_parser("export", help="print the configuration of a gateway that asks the service", description=text)
    parser.set_defaults(run=run_export)
    parser.add_argument("gateway", choices=("nginx", "caddy", "envoy"))
    parser.add_argument("file", metavar="FILE")
    for name, default in (("service", "127.0.0.1:7070"), ("application", "127.0.0.1:8080"), ("listen", "127.0.0.1:8000")):
        parser.add_argument(f"--{name}", default=default, metavar="HOST:PORT", help=f"default: {default}")
    modes = "what happens to requests when the service is down: they pass (open), or are refused; default: open"
    parser.add_argument("--on-failure", choices=("open", "closed"), default="open", help=modes)


def run_export(args: argparse.Namespace) -> int:
    from .policy.reading.load import examine
    from .service.gateway_config import WRITERS, Gateway, cautions

    policy, context = examine(args.file)
    if policy is None:
        print_diagnostics(context.diagnostics(), sys.stderr)
        return ERRORS
    gateway = Gateway.of(policy, args.service, args.application, args.listen, args.on_failure == "open")
    for caution in cautions(policy):
        print(f"limitkeeper: {args.file}: {caution}", file=sys.stderr)
    print(WRITERS[args.gateway](gateway), end="")
    return OK


# serve -------------------------------------------------------------------------------------------------------------------------


def add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from .service.settings import PREFIX, settings_fields

    text = f"Serve decisions. Every option is also an environment variable ({PREFIX}HTTP=…) and a line of the --config file."
    parser = commands.add_parser("serve", help="serve decisions over HTTP, the Redis protocol and gRPC (Envoy)", description=text)
    parser.set_defaults(run=run_serve)
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--check", action="store_true", help="check settings and policy, print them, and exit")
    for one in settings_fields():
        data = one.metadata
        default = f" (default: {data['text']})" if data["text"] else ""
        if one.name == "policy":
            parser.add_argument("policy", nargs="?", metavar=data["metavar"], help=data["help"])
        else:
            parser.add_argument(f"--{one.name.replace('_', '-')}", metavar=data["metavar"], help=data["help"] + default)


def run_serve(args: argparse.Namespace) -> int:
    import logging

    from . import __version__
    from .policy.reading.diagnostics import PolicyError
    from .service import serve, settings

    found = settings.load(vars(args), os.environ, args.config)
    try:
        policy, domains = serve.load_policy(found), serve.load_envoy(found)
    except PolicyError as error:
        print(error, file=sys.stderr)
        return ERRORS
    if args.check:
        serve.tls_context(found)
        serve.check_installed(found)
        serve.check_store_url(serve.store_url(found, policy))
        for name, value, source in found.table():
            print(f"{name:<18}{value:<28}{source}")
        missing = f"no policy file ({serve.DEFAULT_POLICY} not found here)"
        print(f"{policy.source or missing}: {counted(len(policy.rules), 'limit')}, no errors")
        if domains:
            print(f"{found.envoy}: {counted(len(domains), 'domain')}, no errors")
        return OK
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    return serve.serve(found, __version__)
