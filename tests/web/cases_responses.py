"""Responses: statuses, header fields, bodies, and secrets that they never show."""

from __future__ import annotations

from case_steps import Advance, WaitThenPass, ask, case, refused

USER = "identify: {user: {header: X-User}}\n"
CHECKOUT = (
    USER
    + """limits:
  - name: checkout
    match: POST /checkout
    key: user
    limit: token bucket 5/s burst 10
    message: "Too many checkout attempts. Retry after {retry_after}s."
"""
)
ONE = "limits: [{name: api, key: ip, limit: token bucket 1/min burst 2}]"
JSON = "application/json"
PROBLEM = "application/problem+json"
VIOLATED = {"status": 429, "violated-policies": ["api"]}
EXPOSE, ORIGIN = "Access-Control-Expose-Headers", {"Origin": "https://shop.test"}
EXPOSED = "RateLimit-Policy, RateLimit, X-RateLimit-Limit, X-RateLimit-Remaining"

ANSWERS = (
    case(
        "hundred-per-quarter",
        "100 per 15 minutes: the 101st call at the start is told to come back in 900 s",
        "limits: [{name: api, key: ip, limit: fixed window 100 per 15 minutes}]",
        ask("GET /products", fields={"X-RateLimit-Limit": "100", "X-RateLimit-Remaining": "99", "Retry-After": None}),
        ask("GET /products", times=98),
        ask("GET /products", fields={"X-RateLimit-Remaining": "0", "Retry-After": None}),
        refused(
            "GET /products",
            fields={"X-RateLimit-Limit": "100", "X-RateLimit-Remaining": "0", "Retry-After": "900", "Cache-Control": "no-store"},
        ),
        Advance(899),
        refused("GET /products", fields={"Retry-After": "1"}),
        Advance(1),
        ask("GET /products", fields={"X-RateLimit-Remaining": "99"}),
    ),
    case(
        "eleventh-checkout",
        "the eleventh checkout is refused in exactly these words, and passes after waiting what it was told",
        CHECKOUT,
        ask("POST /checkout", user="42", times=10),
        refused(
            "POST /checkout",
            user="42",
            content=b"cart" * 1000,
            fields={
                "Retry-After": "1",
                "X-RateLimit-Limit": "10",
                "X-RateLimit-Remaining": "0",
                "Content-Type": JSON,
                "Content-Length": "79",
            },
            body='{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}',
        ),
        ask("POST /checkout", user="43"),
        Advance(1),
        ask("POST /checkout", user="42"),
    ),
    case(
        "wait-retry-after",
        "waiting exactly Retry-After is enough, every time",
        USER + "limits: [{name: api, key: user, limit: token bucket 7 per 3 s burst 3}]",
        WaitThenPass(ask("GET /products", user="ada"), rounds=5),
    ),
    case(
        "wait-retry-after-served",
        "waiting exactly Retry-After is enough against a real server, in real time",
        USER + "limits: [{name: api, key: user, limit: token bucket 1/s burst 3}]",
        WaitThenPass(ask("GET /products", user="ada"), rounds=1),
        real=True,
    ),
    case(
        "refusal-served",
        "a refusal over the wire has the status, the fields and the body of a refusal, and reads no body",
        USER + "limits: [{name: checkout, match: POST /checkout, key: user, limit: token bucket 1/h burst 2, message: Enough.}]",
        ask("POST /checkout", user="42", content=b"x" * 100, times=2),
        refused(
            "POST /checkout",
            user="42",
            content=b"x" * 100,
            fields={"Retry-After": "3600", "X-RateLimit-Limit": "2", "X-RateLimit-Remaining": "0", "Content-Type": JSON},
            body='{"code":"RATE_LIMITED","message":"Enough."}',
        ),
        ask("GET /products"),
        real=True,
    ),
    case(
        "success-always",
        "successes carry the fields too, and the handler's own answer is whole",
        ONE,
        ask(
            "GET /products",
            fields={"X-RateLimit-Limit": "2", "X-RateLimit-Remaining": "1"},
            json={"path": "/products", "remaining": 1},
        ),
    ),
    case(
        "success-never",
        "the policy may keep the fields to refusals",
        "headers: {success: never}\n" + ONE,
        ask("GET /a", times=2, fields={"RateLimit": None, "RateLimit-Policy": None, "X-RateLimit-Limit": None}),
        refused("GET /a", fields={"X-RateLimit-Limit": "2", "Retry-After": "60"}),
    ),
    case(
        "success-near",
        "the policy may tell only those who have less than a fifth left",
        "headers: {success: near}\nlimits: [{name: api, key: ip, limit: fixed window 10/h}]",
        ask("GET /a", times=8, fields={"X-RateLimit-Remaining": None, "RateLimit": None}),
        ask("GET /a", fields={"X-RateLimit-Remaining": "1"}),
    ),
    case(
        "headers-off",
        "the policy may tell nothing but Retry-After",
        "headers: off\n" + ONE,
        ask("GET /a", times=2, fields={"RateLimit": None, "RateLimit-Policy": None, "X-RateLimit-Limit": None}),
        refused("GET /a", fields={"RateLimit": None, "RateLimit-Policy": None, "X-RateLimit-Limit": None}),
    ),
    case(
        "statuses-pass",
        "whatever the handler answers, the fields are on it",
        "limits: [{name: api, key: ip, limit: token bucket 1/min burst 9}]",
        ask("GET /status/404", status=404, ran=True, fields={"X-RateLimit-Remaining": "8", "Retry-After": None}),
        ask("GET /status/503", status=503, ran=True, fields={"X-RateLimit-Remaining": "7", "Retry-After": None}),
        ask("GET /status/204", status=204, ran=True, fields={"X-RateLimit-Remaining": "6"}, body=""),
    ),
    case(
        "streams",
        "a streamed answer comes whole, with the fields on it",
        "limits: [{name: api, key: ip, limit: token bucket 1/h burst 9}]",
        ask("GET /stream", body="onetwothree", fields={"X-RateLimit-Remaining": "8"}),
        ask("GET /big?n=100000", body="x" * 100_000, fields={"X-RateLimit-Remaining": "7"}),
        real=True,
    ),
    case(
        "bodies-pass",
        "a request's body reaches the handler whole",
        ONE.replace("burst 2", "burst 5"),
        ask("POST /body", content=b"x" * 70_000, json={"length": 70_000}),
        ask("POST /body", json={"length": 0}),
    ),
    case(
        "raises",
        "a handler that raises is a 500 like everywhere, and the next request is limited as ever",
        ONE,
        ask("GET /raise", status=500, ran=True),
        ask("GET /raise", status=500, ran=True),
        refused("GET /raise"),
    ),
    case(
        "problem-policy",
        "the policy may answer with application/problem+json",
        "problem: true\n" + ONE,
        ask("GET /a", times=2),
        refused("GET /a", fields={"Content-Type": PROBLEM, "Retry-After": "60"}, json=VIOLATED),
    ),
    case(
        "problem-accept",
        "a client that asks for problem details gets them",
        ONE,
        ask("GET /a", times=2),
        refused(
            "GET /a",
            headers={"Accept": PROBLEM},
            fields={"Content-Type": PROBLEM},
            json=VIOLATED,
        ),
        refused("GET /a", headers={"Accept": "text/html"}, fields={"Content-Type": JSON}, json={"code": "RATE_LIMITED"}),
    ),
    case(
        "own-words",
        "a rule may have a status, a message and a body of its own",
        "limits:\n  - {name: a, match: /a, key: ip, limit: fixed window 1/min, status: 503, message: 'Busy: {retry_after}s.'}\n"
        "  - {name: b, match: /b, key: ip, limit: fixed window 1/min, message: Slow down, "
        "body: {code: SLOW_DOWN, message: '{message}', retry: '{retry_after}'}}",
        ask("GET /a"),
        refused("GET /a", status=503, fields={"Retry-After": "60"}, body='{"code":"RATE_LIMITED","message":"Busy: 60s."}'),
        ask("GET /b"),
        refused("GET /b", json={"code": "SLOW_DOWN", "message": "Slow down", "retry": "60"}),
    ),
    case(
        "priority",
        "of several refusals the highest priority speaks, and the longest wait is told",
        "limits:\n  - {name: slow, key: ip, limit: fixed window 1/h, message: slow}\n"
        "  - {name: loud, key: ip, limit: fixed window 1/min, message: loud, priority: 10}",
        ask("GET /a"),
        refused("GET /a", fields={"Retry-After": "3600"}, json={"message": "loud"}),
    ),
    case(
        "several-policies",
        "every limit that was asked is told of, and the X- fields speak of the tightest",
        "limits:\n  - {name: wide, key: ip, limit: fixed window 100/h}\n  - {name: tight, key: ip, limit: fixed window 5/min}",
        ask(
            "GET /a",
            fields={
                "RateLimit-Policy": '"wide";q=100;w=3600, "tight";q=5;w=60',
                "RateLimit": '"wide";r=99;t=3600, "tight";r=4;t=60',
                "X-RateLimit-Limit": "5",
                "X-RateLimit-Remaining": "4",
            },
        ),
    ),
    case(
        "draft-fields",
        "RateLimit and RateLimit-Policy are written as the draft says",
        "limits: [{name: api, key: ip, limit: fixed window 2/min}]",
        ask("GET /a", fields={"RateLimit-Policy": '"api";q=2;w=60', "RateLimit": '"api";r=1;t=60'}),
        Advance(20),
        ask("GET /a", fields={"RateLimit": '"api";r=0;t=40'}),
        refused("GET /a", fields={"RateLimit-Policy": '"api";q=2;w=60', "RateLimit": '"api";r=0;t=40', "Retry-After": "40"}),
    ),
    case(
        "never-echoed",
        "a key is never shown, nor does what it holds become a header",
        USER + "limits: [{name: api, key: user, limit: token bucket 1/min burst 1, message: No.}]\nheaders: {partition: true}",
        ask("GET /a", user='secret-ada" ;x=1', lacks=("secret-ada",)),
        refused("GET /a", user='secret-ada" ;x=1', lacks=("secret-ada",)),
    ),
    case(
        "absurd-headers",
        "absurdly long identities are limited like any other, and shown to nobody",
        USER + "limits: [{name: api, key: user, limit: token bucket 1/min burst 1}]",
        ask("GET /a", user="u" * 6000, lacks=("u" * 100,)),
        refused("GET /a", user="u" * 6000, lacks=("u" * 100,)),
        ask("GET /a", user="u" * 5999),
    ),
    case(
        "cors",
        "scripts of other origins may read the fields; nobody else is told that",
        ONE,
        ask("GET /a", fields={EXPOSE: None}),
        ask("GET /a", headers=ORIGIN, fields={EXPOSE: EXPOSED}),
        refused("GET /a", headers=ORIGIN, fields={EXPOSE: f"{EXPOSED}, Retry-After"}),
        refused("GET /a", fields={EXPOSE: None}),
    ),
)
