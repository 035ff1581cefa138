"""Which clients share a limit: clients, users, tenants, plans, single keys."""

from __future__ import annotations

from case_steps import Advance, ask, case, refused
from signed_tokens import SECRET, token, unsigned

USER = "identify: {user: {header: X-User}}\n"
JWT = f"""
identify:
  user: {{jwt: {{claim: sub, key: "{SECRET}", algorithms: [HS256]}}}}
  plan: {{jwt: {{claim: plan}}, default: free}}
"""
FREE = {"X-RateLimit-Limit": "1"}

KEYS = (
    case(
        "per-client",
        "two clients never share a limit, unless somebody asked for it",
        "limits: [{name: api, key: ip, limit: token bucket 1/min burst 3}]",
        ask("GET /products", peer="192.0.2.1", times=3),
        refused("GET /products", peer="192.0.2.1"),
        ask("GET /products", peer="192.0.2.2", json={"remaining": 2}),
    ),
    case(
        "one-for-all",
        "a rule without a key is one limit for everybody",
        "limits: [{name: api, limit: token bucket 1/min burst 2}]",
        ask("GET /products", peer="192.0.2.1"),
        ask("GET /products", peer="192.0.2.2"),
        refused("GET /products", peer="192.0.2.3"),
    ),
    case(
        "per-user",
        "users have limits of their own, whatever address they come from",
        USER + "limits: [{name: api, key: user, limit: token bucket 1/h burst 2}]",
        ask("GET /products", user="ada", times=2),
        refused("GET /products", user="ada"),
        ask("GET /products", user="ben", json={"remaining": 1}),
        refused("GET /products", user="ada"),
        real=True,
    ),
    case(
        "first-present",
        "the first identity that is there makes the key: whoever has no user is known by the address",
        USER + "limits: [{name: api, key: user | ip, limit: token bucket 1/min burst 1}]",
        ask("GET /products", user="ada", peer="192.0.2.1"),
        ask("GET /products", peer="192.0.2.1"),
        refused("GET /products", peer="192.0.2.1"),
        refused("GET /products", user="ada", peer="192.0.2.9"),
    ),
    case(
        "kinds-apart",
        "a user who is called like an address does not spend that address's limit",
        USER + "limits: [{name: api, key: user | ip, limit: token bucket 1/min burst 1}]",
        ask("GET /products", user="192.0.2.1", peer="192.0.2.7"),
        ask("GET /products", peer="192.0.2.1"),
    ),
    case(
        "joined",
        "a joined key is all of its parts: the same user of another tenant is somebody else",
        "identify: {tenant: {header: X-Tenant}, user: {header: X-User}}\n"
        "limits: [{name: both, key: [tenant, user], limit: token bucket 1/min burst 1}]",
        ask("GET /products", user="ada", headers={"X-Tenant": "acme"}),
        refused("GET /products", user="ada", headers={"X-Tenant": "acme"}),
        ask("GET /products", user="ada", headers={"X-Tenant": "bolt"}),
        ask("GET /products", user="ben", headers={"X-Tenant": "acme"}),
    ),
    case(
        "joined-not-glued",
        "parts of a joined key can't be moved across the seam",
        "identify: {tenant: {header: X-Tenant}, user: {header: X-User}}\n"
        "limits: [{name: both, key: [tenant, user], limit: token bucket 1/min burst 1}]",
        ask("GET /products", user="c", headers={"X-Tenant": "a|b"}),
        ask("GET /products", user="b|c", headers={"X-Tenant": "a"}),
        refused("GET /products", user="b|c", headers={"X-Tenant": "a"}),
    ),
    case(
        "unidentified-skip",
        "who has no part of the key is not meant by the rule",
        USER + "limits: [{name: api, key: user, limit: token bucket 1/min burst 1}]",
        ask("GET /products", times=5, json={"remaining": None}, fields={"RateLimit": None, "X-RateLimit-Limit": None}),
    ),
    case(
        "unidentified-share",
        "the unidentified crowd can share one limit, and then spends nothing of those who are known",
        USER + "limits: [{name: api, key: user, unidentified: share, limit: token bucket 1/min burst 2}]",
        ask("GET /products", times=2),
        refused("GET /products"),
        ask("GET /products", user="ada"),
    ),
    case(
        "tiers",
        "a limit by plan: free is the default, pro has more, enterprise has none",
        USER.replace("}}", "}, plan: {header: X-Plan, default: free}}")
        + "limits:\n  - {name: user, key: user, limit: {by: plan, free: token bucket 1/min burst 1, "
        "pro: token bucket 1/min burst 3, enterprise: unlimited}}",
        ask("GET /products", user="ada"),
        refused("GET /products", user="ada"),
        ask("GET /products", user="ben", headers={"X-Plan": "pro"}, times=3),
        refused("GET /products", user="ben", headers={"X-Plan": "pro"}),
        ask("GET /products", user="eve", headers={"X-Plan": "enterprise"}, times=9, json={"remaining": None}),
    ),
    case(
        "token-claims",
        "claims of a verified token make key and plan; a forged or unsigned token is nobody's",
        JWT + "limits:\n  - {name: user, key: user | ip, limit: {by: plan, "
        "free: token bucket 1/min burst 1, pro: token bucket 1/min burst 2}}",
        ask("GET /products", headers=token(sub="ada", plan="pro"), times=2),
        refused("GET /products", headers=token(sub="ada", plan="pro")),
        ask("GET /products", headers=token(sub="ben")),
        refused("GET /products", headers=token(sub="ben")),
        ask(
            "GET /products",
            headers=token("another secret, long enough for it", sub="eve", plan="pro"),
            fields={"X-RateLimit-Limit": "1"},
        ),
        refused("GET /products", headers=unsigned(sub="mallory", plan="pro")),
    ),
    case(
        "override",
        "a single key can have another limit than the rest",
        "identify: {partner: {header: X-Api-Key}}\n"
        "limits: [{name: partner, when: {present: partner}, key: partner, limit: token bucket 1/min burst 1, "
        "override: {acme-corp: token bucket 1/min burst 4}}]",
        ask("GET /products", headers={"X-Api-Key": "acme-corp"}, times=4),
        refused("GET /products", headers={"X-Api-Key": "acme-corp"}),
        ask("GET /products", headers={"X-Api-Key": "small"}),
        refused("GET /products", headers={"X-Api-Key": "small"}),
        ask("GET /products", json={"remaining": None}),
    ),
    case(
        "all-or-nothing",
        "a request that one limit refuses spends nothing of the others",
        USER + "limits:\n  - {name: user, key: user, limit: token bucket 1/min burst 1}\n"
        "  - {name: everybody, limit: token bucket 1/min burst 3}",
        ask("GET /products", user="ada"),
        refused("GET /products", user="ada", times=10),
        ask("GET /products", user="ben"),
        ask("GET /products", user="cy"),
        refused("GET /products", user="dan"),
    ),
    case(
        "two-limits-of-a-rule",
        "several limits of one rule are charged together, and the longest wait is told",
        "limits: [{name: api, key: ip, limit: token bucket 1/s burst 2; fixed window 3/h}]",
        ask("GET /products", times=2),
        refused("GET /products", fields={"Retry-After": "1"}),
        Advance(1),
        ask("GET /products"),
        Advance(5),
        refused("GET /products", fields={"Retry-After": "3594"}),
    ),
    case(
        "checkout-and-products",
        "checkout's limits never spend what /products has, and the other way round",
        USER + "limits:\n  - {name: checkout, match: POST /checkout, key: user, limit: token bucket 1/h burst 2}\n"
        "  - {name: products, match: GET /products, key: user, limit: token bucket 1/h burst 3}",
        ask("POST /checkout", user="ada", times=2),
        refused("POST /checkout", user="ada", times=5),
        ask("GET /products", user="ada", json={"remaining": 2}),
        ask("GET /products", user="ada", times=2),
        refused("GET /products", user="ada", times=5),
        ask("POST /checkout", user="ben", json={"remaining": 1}),
        real=True,
    ),
    case(
        "when",
        "a rule may be for those with an identity, without one, or with a certain one",
        "identify: {partner: {header: X-Api-Key}, class: {header: X-Class}}\n"
        "limits:\n  - {name: public, when: {absent: partner}, key: ip, limit: token bucket 1/min burst 1}\n"
        "  - {name: internal, when: {class: [internal]}, key: class, limit: token bucket 1/min burst 5}",
        ask("GET /products"),
        refused("GET /products"),
        ask("GET /products", headers={"X-Api-Key": "acme"}, times=3, json={"remaining": None}),
        ask("GET /products", headers={"X-Api-Key": "acme", "X-Class": "internal"}, json={"remaining": 4}),
    ),
    case(
        "spoofed-forwarding",
        "X-Forwarded-For is believed from trusted proxies only, from the right",
        "identify: {ip: {client_ip: {trusted_proxies: [10.0.0.0/8]}}}\n"
        "limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]",
        ask("GET /a", peer="203.0.113.9", headers={"X-Forwarded-For": "1.1.1.1"}),
        refused("GET /a", peer="203.0.113.9", headers={"X-Forwarded-For": "2.2.2.2"}),
        refused("GET /a", peer="203.0.113.9"),
        ask("GET /a", peer="10.0.0.1", headers={"X-Forwarded-For": "9.9.9.9, 198.51.100.7"}),
        refused("GET /a", peer="10.0.0.2", headers={"X-Forwarded-For": "8.8.8.8, 198.51.100.7"}),
        refused("GET /a", peer="10.0.0.2", headers={"X-Forwarded-For": "198.51.100.7, 10.3.3.3"}),
        ask("GET /a", peer="10.0.0.2", headers={"X-Forwarded-For": "198.51.100.8"}),
    ),
    case(
        "forwarding-untrusted",
        "without trusted proxies the peer's address is the client's, whatever it says",
        "limits: [{name: api, key: ip, limit: token bucket 1/h burst 1}]",
        ask("GET /a", headers={"X-Forwarded-For": "1.1.1.1"}),
        refused("GET /a", headers={"X-Forwarded-For": "2.2.2.2"}),
        refused("GET /a", headers={"X-Real-IP": "3.3.3.3", "Forwarded": "for=4.4.4.4"}),
        real=True,
    ),
    case(
        "ipv6-rotation",
        "an IPv6 client is its /64: rotating addresses within it gains nothing",
        "limits: [{name: api, key: ip, limit: token bucket 1/min burst 1}]",
        ask("GET /a", peer="2001:db8:1:2::1"),
        refused("GET /a", peer="2001:db8:1:2:ffff::9"),
        ask("GET /a", peer="2001:db8:1:3::1"),
    ),
)
