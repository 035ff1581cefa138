"""The requests to which a rule applies: methods, paths and evasions by them, hosts, exemptions."""

from __future__ import annotations

from case_steps import ask, case, refused

CHECKOUT = "limits: [{name: checkout, match: POST /checkout, key: ip, limit: token bucket 1/h burst 1}]"

MATCH = (
    case(
        "path-tricks",
        "spelling a path otherwise does not slip past its rule",
        CHECKOUT,
        ask("POST /checkout"),
        *(
            refused(f"POST {path}")
            for path in (
                *("/checkout", "//checkout", "/checkout/", "/./checkout", "/%63heckout", "/Checkout", "/CHECKOUT"),
                *("/x/../checkout", "/checkout?x=1", "///checkout//", "/%2Fcheckout", "/checkout%2F", "/%2e/checkout"),
            )
        ),
        ask("POST /checkouts"),
        ask("POST /x/checkout"),
    ),
    case(
        "path-tricks-served",
        "spelling a path otherwise does not slip past its rule when a real server reads it either",
        CHECKOUT,
        ask("POST /checkout"),
        *(refused(f"POST {path}") for path in ("/checkout", "//checkout", "/checkout/", "/%63heckout", "/%2Fcheckout")),
        real=True,
    ),
    case(
        "methods",
        "a rule means the methods it names; HEAD goes with GET",
        "limits:\n  - {name: read, match: GET /things, key: ip, limit: token bucket 1/min burst 2}\n"
        '  - {name: write, match: "POST,PUT /things", key: ip, limit: token bucket 1/min burst 2}',
        ask("GET /things"),
        ask("HEAD /things"),
        refused("HEAD /things", body=""),
        refused("GET /things"),
        ask("POST /things"),
        ask("PUT /things"),
        refused("POST /things"),
        ask("DELETE /things", json={"remaining": None}),
    ),
    case(
        "templates",
        "templates name a segment, stars stand for one or for the rest",
        "identify: {order: {path: order_id}}\n"
        "limits:\n  - {name: order, match: 'GET /orders/{order_id}', key: order, limit: token bucket 1/min burst 1}\n"
        "  - {name: star, match: /files/*/raw, key: ip, limit: token bucket 1/min burst 1}\n"
        "  - {name: rest, match: /admin/**, key: ip, limit: token bucket 1/min burst 1}",
        ask("GET /orders/1"),
        ask("GET /orders/2"),
        refused("GET /orders/1"),
        ask("GET /orders/1/items", json={"remaining": None}),
        ask("GET /files/a/raw"),
        refused("GET /files/b/raw"),
        ask("GET /files/a/b/raw", json={"remaining": None}),
        ask("GET /admin/a/b/c"),
        refused("GET /admin/d"),
    ),
    case(
        "host",
        "a rule may be for one host; a port does not matter, nor do capitals",
        "limits: [{name: api, match: {host: api.shop.test, path: /**}, key: ip, limit: token bucket 1/min burst 1}]",
        ask("GET /a", headers={"Host": "www.shop.test"}, times=2, json={"remaining": None}),
        ask("GET /a", headers={"Host": "api.shop.test"}),
        refused("GET /a", headers={"Host": "API.shop.test:8080"}),
    ),
    case(
        "several-matches",
        "one rule over several paths is one limit for all of them",
        "limits: [{name: login, match: [POST /login, POST /otp], key: ip, limit: fixed window 2/min}]",
        ask("POST /login"),
        ask("POST /otp"),
        refused("POST /login"),
        ask("GET /login", json={"remaining": None}),
    ),
    case(
        "exempt",
        "exempt paths, networks, headers and identities are never limited",
        "identify: {service: {header: X-Service}}\n"
        "exempt:\n  - path: /healthz\n  - network: 10.1.0.0/16\n"
        "  - header: {X-Probe: let-me-in}\n  - when: {service: [billing]}\n"
        "limits: [{name: api, limit: token bucket 1/h burst 1}]",
        ask("GET /a"),
        refused("GET /a"),
        ask("GET /healthz", times=3, json={"remaining": None}, fields={"RateLimit": None}),
        ask("GET /a", peer="10.1.2.3"),
        ask("GET /a", headers={"X-Probe": "let-me-in"}),
        refused("GET /a", headers={"X-Probe": "please"}),
        ask("GET /a", headers={"X-Service": "billing"}),
        refused("GET /a", peer="10.2.2.3"),
    ),
    case(
        "exempt-from-some",
        "an exemption may name the limits it is from",
        "exempt: [{network: 10.2.0.0/16, limits: [user]}]\n"
        "limits:\n  - {name: user, key: ip, limit: token bucket 1/min burst 1}\n"
        "  - {name: all, limit: token bucket 1/min burst 3}",
        ask("GET /a", peer="10.2.0.1", times=3),
        refused("GET /a", peer="10.2.0.1"),
    ),
    case(
        "nothing-meant",
        "a request that no rule means passes untouched",
        CHECKOUT,
        ask(
            "GET /products",
            times=3,
            json={"remaining": None},
            fields={"RateLimit": None, "RateLimit-Policy": None, "X-RateLimit-Limit": None},
        ),
    ),
)
