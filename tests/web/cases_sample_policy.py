"""A whole policy, as a shop would write it: partners, tenants, tiers, checkout, logins, payments, and capacities behind them."""

from __future__ import annotations

from case_steps import Advance, ask, case, refused
from signed_tokens import pair, signed, token

SAMPLE = f"""
identify:
  tenant:  {{header: X-Tenant}}
  user:    {{jwt: {{claim: sub, key_file: "{pair()[1]}", algorithms: [RS256]}}}}
  partner: {{header: X-Api-Key}}
  plan:    {{jwt: {{claim: plan}}, default: free}}
  ip:      {{client_ip: {{trusted_proxies: [10.0.0.0/8], ipv6_prefix: 64}}}}
exempt:
  - path: /healthz
  - network: 10.1.0.0/16
limits:
  - name: partner
    when: {{present: partner}}
    key: partner
    limit: token bucket 200/s burst 400
    override: {{acme-corp: token bucket 500/s burst 1000}}
  - name: tenant-and-user
    key: [tenant, user]
    limit: sliding window counter 1000/min
  - name: user
    key: user | ip
    limit: {{by: plan, free: token bucket 20/s burst 40, pro: token bucket 100/s burst 200, enterprise: unlimited}}
  - name: checkout
    match: POST /checkout
    key: user
    limit: token bucket 5/s burst 10
    message: "Too many checkout attempts. Retry after {{retry_after}}s."
    on_refusal: reject
  - name: login
    match: [POST /login, POST /otp, POST /password-reset]
    key: [ip, user]
    limit: fixed window 5/min
  - name: payment
    match: POST /payments
    key: user
    limit: sliding window log 5/min
  - name: checkout-capacity
    match: POST /checkout
    limit: token bucket 350/s burst 40
  - name: public-checkout
    match: POST /checkout
    when: {{absent: partner}}
    limit: token bucket 150/s burst 40
"""

ADA, BEN, PRO, BOSS = signed(sub="ada"), signed(sub="ben"), signed(sub="cy", plan="pro"), signed(sub="dan", plan="enterprise")
FREE_USER = {"RateLimit-Policy": '"tenant-and-user";q=1000;w=60, "user";q=40;w=2'}
SAID = '{"code":"RATE_LIMITED","message":"Too many checkout attempts. Retry after 1s."}'

SAMPLES = (
    case(
        "sample-checkout",
        "sample policy: a user's eleventh checkout is refused in its words, others are not concerned, a second later it passes",
        SAMPLE,
        ask("POST /checkout", headers=ADA, times=10),
        refused("POST /checkout", headers=ADA, fields={"Retry-After": "1"}, body=SAID),
        ask("POST /checkout", headers=BEN, json={"remaining": 29}),
        ask("GET /products", headers=ADA, fields=FREE_USER),
        Advance(1),
        ask("POST /checkout", headers=ADA),
    ),
    case(
        "sample-tiers",
        "sample policy: free users have 40 at once, pro users 200, enterprise users none of theirs; a forged token is nobody's",
        SAMPLE,
        ask("GET /products", headers=ADA, times=40),
        refused("GET /products", headers=ADA, fields={"Retry-After": "1"}),
        ask("GET /products", headers=PRO, fields={"X-RateLimit-Limit": "200", "X-RateLimit-Remaining": "199"}),
        ask("GET /products", headers=BOSS, fields={"X-RateLimit-Limit": "1000"}),
        ask("GET /products", headers=token(sub="ada", plan="enterprise"), times=40, fields={"X-RateLimit-Limit": "40"}),
        refused("GET /products", headers=token(sub="eve", plan="enterprise")),
    ),
    case(
        "sample-exempt-and-partners",
        "the sample policy: health checks and services pass, partners have 400 at once, one of them 1000",
        SAMPLE,
        ask("GET /healthz", times=3, json={"remaining": None}),
        ask("GET /products", peer="10.1.2.3", times=3, json={"remaining": None}),
        ask("GET /products", headers={"X-Api-Key": "small", **BOSS}, fields={"X-RateLimit-Limit": "400"}),
        ask("GET /products", headers={"X-Api-Key": "acme-corp", **BOSS}, fields={"X-RateLimit-Limit": "1000"}),
    ),
    case(
        "sample-login-and-payment",
        "the sample policy: five logins and five payments a minute, each for itself",
        SAMPLE,
        ask("POST /login"),
        ask("POST /otp", times=2),
        ask("POST /password-reset", times=2),
        refused("POST /login", fields={"Retry-After": "60"}),
        ask("POST /payments", headers=ADA, times=5),
        refused("POST /payments", headers=ADA, fields={"Retry-After": "60"}),
        ask("POST /payments", headers=BEN),
    ),
)
