"""The web: the overhead of a middleware on a request, the cost of a refusal, the growth of matching, and a real server under
load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import cycle
from typing import Any

import web_apps as apps
import web_peers as peers
import web_protocol as protocol
from report import Section, Table, number
from timing import Case, Effort, measure, one_core
from web_served import served
from web_slices import SCOPE, Loop, Taken, asgi, asgi_new_paths, paths, status_of, take, wsgi

from limitkeeper.policy.compiled_policy import CompiledPolicy
from limitkeeper.policy.gate import Gate
from limitkeeper.policy.request_context import RequestContext
from limitkeeper.web.asgi import AsgiRequestContext

#: Our cases: (name, base, app, request). The name of a floor describes it.
ONE, FIVE, FIVE_NEW = (
    "limitkeeper, 1 rule",
    "limitkeeper, 200 rules, 5 apply",
    "limitkeeper, 200 rules, 5 apply, paths never seen",
)
ONE_WSGI = "limitkeeper, WSGI, 1 rule"
FIVE_WSGI = "limitkeeper, WSGI, 200 rules, 5 apply"
ONE_FLASK = "limitkeeper around Flask, 1 rule"
THROUGH, BY_HAND = "floor: a middleware that does nothing", "floor: a bucket in a dict, 2 X- fields"
BASES = {
    "starlette": lambda: asgi(apps.starlette()),
    "starlette, new paths": lambda: asgi_new_paths(apps.starlette()),
    "fastapi": lambda: asgi(peers.fastapi()),
    "wsgi": lambda: wsgi(apps.plain_wsgi),
    "flask": lambda: wsgi(apps.flask()),
}
OURS: tuple[tuple[str, str, Callable[[], Loop]], ...] = (
    (THROUGH, "starlette", lambda: asgi(apps.Through(apps.starlette()))),
    (BY_HAND, "starlette", lambda: asgi(apps.ByHand(apps.starlette()))),
    (ONE, "starlette", lambda: asgi(apps.limitkeeper(apps.one_rule()))),
    (FIVE, "starlette", lambda: asgi(apps.limitkeeper(apps.five_of(200)))),
    (FIVE_NEW, "starlette, new paths", lambda: asgi_new_paths(apps.limitkeeper(apps.five_of(200)))),
    (ONE_WSGI, "wsgi", lambda: wsgi(apps.limitkeeper_wsgi(apps.one_rule()))),
    (FIVE_WSGI, "wsgi", lambda: wsgi(apps.limitkeeper_wsgi(apps.five_of(200)))),
    (ONE_FLASK, "flask", lambda: wsgi(apps.limitkeeper_wsgi(apps.one_rule(), apps.flask()))),
)
REFUSED = "refused: "


async def checked(app: Any) -> Any:
    """An ASGI app that refuses, after one admitted request as a check."""
    seen = [await status_of(app) for _ in range(3)]
    if seen != [200, 429, 429]:
        raise RuntimeError(f"it answered {seen}")
    return app


async def refusals(failed: dict[str, str]) -> dict[str, Loop]:
    """Apps that refuse every request."""
    made: dict[str, Loop] = {
        f"{REFUSED}{ONE}": asgi(await checked(apps.limitkeeper(apps.one_rule(apps.DENY)))),
        f"{REFUSED}{FIVE}": asgi(await checked(apps.limitkeeper(apps.five_of(200, apps.DENY)))),
        f"{REFUSED}{BY_HAND}": asgi(await checked(apps.ByHand(apps.starlette(), 1 / 3600, 1.0))),
        f"{REFUSED}{ONE_WSGI}": wsgi(apps.limitkeeper_wsgi(apps.one_rule(apps.DENY))),
    }
    for peer in (*peers.ASGI, *peers.WSGI):
        try:
            app = peer.build(peers.ONE)
            made[REFUSED + peer.name] = wsgi(app) if peer in peers.WSGI else asgi(await checked(app))
        except Exception as error:
            failed[REFUSED + peer.name] = f"{type(error).__name__}: {error}"
    return made


async def measured(effort: Effort, note: Callable[[str], None], failed: dict[str, str]) -> Taken:
    """Ours and each base in one family, the peers of each base (and the base again) in another, refusals in a third."""
    taken = Taken()
    for base, build_base in BASES.items():
        loops = {base: build_base()} | {name: build() for name, on, build in OURS if on == base}
        taken |= await take(loops, effort, note, failed)
    for base in ("starlette", "fastapi", "flask"):
        loops = {f"{base} beside peers": BASES[base]()}
        for peer in (*peers.ASGI, *peers.WSGI):
            if peer.base == base:
                try:
                    loops[peer.name] = (wsgi if peer in peers.WSGI else asgi)(peer.build(peers.MANY))
                except Exception as error:
                    failed[peer.name] = f"{type(error).__name__}: {error}"
        taken |= await take(loops, effort, note, failed)
    try:
        taken |= await take(protocol.loops(), effort, note, failed)
    except ImportError as error:
        failed["uvicorn's protocol"] = str(error)
    return taken | await take(await refusals(failed), effort, note, failed)


def matching(effort: Effort, note: Callable[[str], None]) -> dict[str, float]:
    """Nanoseconds to find the rules that a request matches, of one rule and of a thousand."""
    cases = []
    for name, policy in (("one", apps.one_of(1)), ("1000", apps.one_of(1000)), ("1000 hosts", apps.by_host(1000))):
        edition = CompiledPolicy(policy)
        path = paths()
        facts = cycle([RequestContext("GET", next(path)) for _ in range(12_000)])
        cases.append(Case(f"{name}, seen", "match(k)", {"match": edition.match, "k": RequestContext("GET", "/products/17")}))
        cases.append(Case(f"{name}, new", "match(k())", {"match": edition.match, "k": facts.__next__}))
        cases.append(
            Case(f"{name}, asked", "ask(facts(k))", {"ask": Gate(policy).ask_nowait, "facts": AsgiRequestContext, "k": SCOPE})
        )
    took, _ = measure(cases, effort, note)
    return took


def quick_loop() -> Any:
    """uvloop's, which servers use where it is; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def figures(section: Section, taken: Taken, took: dict[str, float]) -> None:
    for name, base, _ in OURS:
        goal = {ONE: 4, FIVE: 15, ONE_WSGI: 4}.get(name)
        section.figure(f"added by {name}", taken.added(name, base) / 1000, goal, "µs")
    for way, said in (("seen", "seen before"), ("new", "never seen")):
        section.figure(f"matching: 1000 rules / one, paths {said}", took[f"1000, {way}"] / took[f"one, {way}"], 3, "×")
    for way, said in (("1000", "1000 rules"), ("1000 hosts", "1000 rules for the same path, a host each")):
        section.figure(
            f"the whole question: {said} / one, path seen before", took[f"{way}, asked"] / took["one, asked"], None, "×"
        )
    for name in (protocol.INLINE, protocol.FIELDS):
        if protocol.OURS in taken:
            ratio = taken.total(name) / taken.total(protocol.OURS)
            section.figure(f"uvicorn without sockets: requests/s, limitkeeper / {name}", ratio, None, "×")
    for name in (ONE, FIVE, ONE_WSGI):
        section.figure(f"a refusal by {name}, all of it", taken.total(REFUSED + name) / 1000, None, "µs")


def beside(taken: Taken, alone: dict[str, float]) -> list[Table]:
    """All figures, ours and the peers'."""
    table = Table(("what", "added µs", "/ limitkeeper", "a refusal µs"))
    ours = {"flask beside peers": taken.added(ONE_FLASK, "flask")}
    rows = [(name, base) for name, base, _ in OURS]
    rows += [(peer.name, f"{peer.base} beside peers") for peer in (*peers.ASGI, *peers.WSGI) if peer.name in taken]
    for name, base in rows:
        added = taken.added(name, base)
        refused = f"{taken.total(REFUSED + name) / 1000:.1f}" if REFUSED + name in taken else ""
        over = number(added / ours.get(base, taken.added(ONE, "starlette")), "×")
        table.rows.append((name, f"{added / 1000:.2f}", "" if "limitkeeper" in name else over, refused))
    if alone:
        over = number(alone["added"] / taken.added(ONE, "starlette"), "×")
        table.rows.append((peers.ALONE.name, f"{alone['added'] / 1000:.2f}", over, f"{alone['refused'] / 1000:.1f}"))
    bases = Table(("app alone", "µs"))
    bases.rows = [(name, f"{taken.total(name) / 1000:.1f}") for name in BASES]
    spoken = Table(("uvicorn's protocol, no sockets", "µs a request"))
    spoken.rows = [
        (name, f"{taken.total(name) / 1000:.1f}")
        for name in (protocol.BARE, protocol.INLINE, protocol.FIELDS, protocol.OURS)
        if name in taken
    ]
    return [table, bases, spoken]


def run(floors: Any, effort: Effort, note: Callable[[str], None]) -> Section:
    section = Section(
        "Web",
        "A prepared request to an app with one handler, with and without the middleware, asked in turns in slices of 0.5 ms: the "
        "smallest slice of a repeat, less that of the bare app; of the quietest fifth of the repeats the median. Memory store, "
        "header fields on. A refusal is the whole of it: no handler is called. A server is uvicorn with uvloop and httptools, "
        "one process for each app, asked in turns.",
    )
    failed: dict[str, str] = {}
    with one_core():
        with asyncio.Runner(loop_factory=quick_loop()) as runner:
            taken = runner.run(measured(effort, note, failed))
        note("matching")
        took = matching(effort, note)
    note("asgi-ratelimit, apart")
    alone = peers.apart(effort.quick, failed)
    figures(section, taken, took)
    section.details = beside(taken, alone)
    table = Table(("matching", "ns"))
    table.rows = [(name, number(value, "")) for name, value in took.items()]
    section.details.append(table)
    served(section, effort, note, failed)
    section.fail(failed)
    return section
