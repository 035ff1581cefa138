"""The command `limitkeeper top`: decisions per second by rule, and the keys refused most, live from a service's admin port."""

from __future__ import annotations

import argparse
import sys
from itertools import count
from typing import Any

from .cli import OK
from .clock import SYSTEM
from .errors import LimitkeeperError
from .keys_cli import ask_service
from .policy.explain import table
from .policy.key_inspection import key_text
from .rate import duration_us

CLEAR = "\x1b[H\x1b[2J"


def run_top(args: argparse.Namespace) -> int:
    """Prints the rates of each interval: on a terminal until it is interrupted, otherwise once, or `--count` times."""
    live = sys.stdout.isatty()
    most = args.count or (0 if live else 1)
    seconds, path = duration_us(args.interval) / 1e6, "/v1/status" + ("?keys=shown" if args.keys else "")
    try:
        before = read_status(args.admin, path)
        for number in count(1):
            SYSTEM.sleep(seconds)
            now = read_status(args.admin, path)
            print((CLEAR if live else "") + rates_text(before, now), flush=True)
            if number == most:
                break
            before = now
    except KeyboardInterrupt:
        pass
    return OK


def read_status(admin: str | None, path: str) -> dict[str, Any]:
    found = ask_service(admin, path)
    if "at" not in found:
        message = found.get("error", {}).get("message", "this is not the status of a service; name its admin port with --admin")
        raise LimitkeeperError(f"{path}: {message}")
    return found


def rates_text(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The decisions between two states of a service, per second. Counters that are lower than before are those of a new start."""
    seconds = max(0.001, float(now["at"] - before["at"]))

    def rate(name: str, new: dict[str, Any], old: dict[str, Any]) -> float:
        found, known = int(new[name]), int(old.get(name, 0))
        return (found - known if found >= known else found) / seconds

    def rule_row(rule: dict[str, Any]) -> list[str]:
        rates = [f"{rate(name, rule, earlier.get(rule['name'], {})):.1f}" for name in ("passed", "refused", "shadow_refused")]
        return [key_text(rule["name"]), *rates, str(rule["waiting"])]

    earlier = {rule["name"]: rule for rule in before["rules"]}
    workers, requests = now["workers"], rate("requests", now, before)
    refused = 100 * rate("refused", now, before) / requests if requests else 0.0
    answered = f"{workers['answered']} of {workers['running']} workers"
    lines = [
        f"{now['policy']['name']}: {requests:.1f} requests/s, {refused:.1f} % refused, {answered}",
        *table([["rule", "passed/s", "refused/s", "shadow/s", "waiting"], *map(rule_row, now["rules"])]),
    ]
    if now["offenders"]:
        rows = [[key_text(one["rule"]), key_text(one["key"]), str(one["count"])] for one in now["offenders"][:10]]
        lines += ["", "refused most:", *table([["rule", "key", "refusals"], *rows])]
    return "\n".join(lines)
