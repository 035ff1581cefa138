"""The shop's front page: its limits, the counts so far, and the commands to try it. The page reloads itself."""

from __future__ import annotations

from html import escape

from limitkeeper.observe.snapshot import RuleSnapshot
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.model import Limits, Match, Rule, Tiers
from shop.lines import lines

HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>The shop</title><style>
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; padding: 0 1rem }
table { border-collapse: collapse; width: 100% } td, th { padding: .2rem .6rem; text-align: left; border-bottom: 1px solid #8884 }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums } td.r { color: #b3261e; font-weight: 600 }
pre { background: #8881; padding: .8rem; overflow-x: auto } :root { color-scheme: light dark }
</style><h1>The shop</h1>"""


def page(gate: Gate, base: str) -> str:
    """The whole page."""
    snapshot = gate.snapshot()
    counted = {rule.name: rule for rule in snapshot.rules}
    rows = "".join(row(rule, counted[rule.name]) for rule in gate.policy.rules)
    typed = "\n\n".join(f"# {line.says}\n{line.command}" for line in lines(base))
    return (
        f"{HEAD}<p>{snapshot.requests} requests: {snapshot.allowed} passed, {snapshot.refused} refused, "
        f"{snapshot.exempt} exempt, {snapshot.penalty_box_clients} clients in the penalty box now.</p>"
        '<table><tr><th>limit<th>requests<th>per<th>at most<th class="n">passed<th class="n">near<th class="n">refused</tr>'
        f"{rows}</table><h2>Try it</h2><pre>{escape(typed)}</pre>"
        '<p>See also: <a href="/metrics">/metrics</a>, <a href="/docs">/docs</a>, <a href="/healthz">/healthz</a>.</p>'
    )


def row(rule: Rule, counted: RuleSnapshot) -> str:
    routes = ", ".join(match_text(match) for match in rule.match) or "all"
    cells = "".join(f"<td>{escape(text)}" for text in (rule.name, routes, key_text(rule), rule_text(rule)))
    refused = f'<td class="n{" r" if counted.refused else ""}">{counted.refused}'
    return f'<tr>{cells}<td class="n">{counted.passed}<td class="n">{counted.near}{refused}</tr>'


def match_text(match: Match) -> str:
    return f"{','.join(sorted(match.methods))} {match.host}{match.path}".strip()


def key_text(rule: Rule) -> str:
    """The key as text: parts are joined, alternatives are tried in order; without a key, all clients share one."""
    return " and ".join(" or ".join(part) for part in rule.key) or "all clients together"


def rule_text(rule: Rule) -> str:
    if rule.capacity is None:
        return limit_text(rule.limit)
    promised = ", ".join(f"{key}: {rate} guaranteed" for key, rate in rule.capacity.guarantees)
    return f"{rule.capacity.rate} for all together ({promised})"


def limit_text(limit: Limits | Tiers) -> str:
    if isinstance(limit, Tiers):
        return ", ".join(f"{name}: {limit_text(limits)}" for name, limits in limit.limits)
    return "; ".join(str(one) for one in limit) or "unlimited"
