r"""Writes the configuration of a gateway from a policy: complete files of nginx, Caddy and Envoy that ask the service's /auth.

A gateway forwards only what the policy reads: the headers of its identities, of costs and of exemptions, and the client's address
as the gateway sees it, in the header that the policy reads it from. It asks about a path unless it is certain that no rule
matches:

    1. a path that a rule's template matches, in any case, whatever the method and the host      ask
    2. another path of plain segments (letters, digits and _ ~ @ . -, not beginning with a dot)  pass, without asking
    3. everything else: %2e, //, ;x, ..                                                          ask

Paths are compared as received, before the gateway decodes them. Rejected: the gateways' own path matchers, which decode, merge
and resolve less than the policy does, so that /x/..%2fcheckout would pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..errors import ConfigurationError
from ..policy.identity.body import BodyField
from ..policy.identity.client_ip import ClientIp
from ..policy.identity.identify import Called, Certificate, Cookie, Header, Network
from ..policy.identity.jwt import Jwt
from ..policy.identity.paths import normalize_path, segments_of
from ..policy.model import WAIT, Identity, Match, Policy, Tiers
from ..web.field_names import SPELLING, WORDS
from ..web.headers import DRAFTS
from . import gateway_templates as templates
from .app import is_address
from .settings import Address
from .settings import address as read_address

SEGMENT = "[A-Za-z0-9_~@-][A-Za-z0-9_~@.-]*"
PLAIN = f"/(?:{SEGMENT}(?:/{SEGMENT})*/?)?"
#: What the response to a refused client depends on.
ANSWER_HEADERS = ("Accept", "Origin")
#: nginx reads at most 4095 bytes as one word. A template has at most 400 characters, each at most five in a pattern.
MAX_NGINX = 4000
REFUSED = '{"code": "RATE_LIMITED", "message": "Too many requests."}'
UNAVAILABLE = '{"code": "RATE_LIMITED", "message": "Try again later."}'


@dataclass(frozen=True)
class Gateway:
    """What a gateway needs to know. `limited`: regular expressions of the paths that rules match, None: all. `headers`: the
    request headers that the policy reads, None: any. `retry_after` and `fields`: the response fields that the policy sends.
    `timeout_ms`: after it, the service is late."""

    policy: str
    limited: tuple[str, ...] | None
    headers: tuple[str, ...] | None
    address_header: str
    retry_after: str
    fields: tuple[str, ...]
    service: Address
    application: Address
    listen: Address
    fail_open: bool
    timeout_ms: int

    @staticmethod
    def of(policy: Policy, service: str, application: str, listen: str, fail_open: bool = True) -> Gateway:
        retry_after, *fields = response_fields(policy)
        return Gateway(
            re.sub(r"[^\w .-]", "?", policy.name),
            limited_paths(policy),
            read_headers(policy),
            address_header(policy),
            retry_after,
            tuple(fields),
            address("--service", service),
            address("--application", application),
            address("--listen", listen),
            fail_open,
            answer_time_ms(policy),
        )


def address(flag: str, text: str) -> Address:
    try:
        found = read_address(text)
    except ValueError as error:
        raise ConfigurationError(f"{flag}: {error}") from None
    if found is None or not found.port:
        raise ConfigurationError(f"{flag}: expected HOST:PORT such as 127.0.0.1:8080, got {text!r}")
    return found


# What the policy reads -----------------------------------------------------------------------------------------------


def limited_paths(policy: Policy) -> tuple[str, ...] | None:
    """Regular expressions of all rules' paths; None: some rule, or the penalty box, is about every path."""
    matches = [match for rule in policy.rules for match in rule.match or (Match(),)]
    if policy.penalty_box is not None or any(match.path in ("", "/**") for match in matches):
        return None
    return tuple(dict.fromkeys(template_pattern(match.path) for match in matches)) or ("(?:)",)


def template_pattern(template: str) -> str:
    """A template as a regular expression that all four engines (PCRE, RE2, Go, Python) read alike; it needs `(?i)`."""
    parts, found = segments_of(template), []
    rest = "(?:/.*)?" if parts[-1:] == ["**"] else "/?"
    for part in parts:
        if part.startswith(("*", "{")):
            found += ["[^/]+"] if part != "**" else []
        else:  # as the policy reads it: `%7Ebob` is "~bob"
            found += [literal(one) for one in segments_of(normalize_path("/" + part))]
    return "".join("/" + one for one in found) + rest


def literal(segment: str) -> str:
    """A segment; what is not plain is always asked about, so that it needs no exact pattern."""
    return re.sub(r"[^A-Za-z0-9_~@-]", lambda found: "[.]" if found[0] == "." else "[^/]*", segment)


def answer_time_ms(policy: Policy) -> int:
    """How long the service may take for an answer: the longest wait of a rule, the budget of the store, and 150 ms. A gateway
    that gives up earlier would let the requests pass that a rule delays."""
    waits = [rule.on_refusal.wait_us for rule in policy.rules if rule.on_refusal.action == WAIT]
    return 150 - (-(max(waits, default=0) + policy.budget_us) // 1000)


def read_headers(policy: Policy) -> tuple[str, ...] | None:
    """The request headers that a policy reads, in order; None: a callback may read any."""
    names = [*ANSWER_HEADERS]
    for identity in policy.identify.values():
        if isinstance(identity, Called) or (isinstance(identity, Network) and isinstance(identity.ip, Called)):
            return None
        names += identity_headers(identity)
    for rule in policy.rules:
        if any(callable(one) for one in (rule.cost.call, rule.charge.call, rule.answer.message)):
            return None
        names += [rule.cost.name] if rule.cost.source == "header" else []
        names += [rule.once.header] if rule.once is not None else []
    names += [name for exemption in policy.exempt for name, _ in exemption.headers]
    reserved = {"host", address_header(policy).lower()}
    return tuple({name.lower(): header_name(name) for name in names if name.lower() not in reserved}.values())


def header_name(name: str) -> str:
    return forwarded(name).title()


def forwarded(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9-]+", name) is None:
        raise ConfigurationError(
            f"header {name!r}: gateways forward only names of letters, digits and '-'; rename it in the policy"
        )
    return name


def identity_headers(identity: Identity) -> list[str]:
    if isinstance(identity, Header):
        return [identity.name]
    if isinstance(identity, Cookie):
        return ["Cookie"]
    if isinstance(identity, Jwt):
        verifier = identity.verifier
        return [name for name in (verifier.header, "Cookie" if verifier.cookie else None) if name]
    return []


def address_header(policy: Policy) -> str:
    """The header in which the policy expects the client's address."""
    headers = sorted({header_name(one.header.strip()) for one in addresses(policy)})
    if len(headers) > 1 or headers == ["Forwarded"]:
        raise ConfigurationError(
            f"the policy reads the client's address from {' and '.join(headers)}; a gateway writes one header with one address: "
            "use header: X-Forwarded-For"
        )
    return headers[0] if headers else "X-Forwarded-For"


def addresses(policy: Policy) -> list[ClientIp]:
    found = [one.ip if isinstance(one, Network) else one for one in policy.identify.values()]
    return [one for one in found if isinstance(one, ClientIp)]


def cautions(policy: Policy) -> Iterator[str]:
    """What the policy would read otherwise behind a gateway."""
    for name in sorted(used_identities(policy) & set(policy.identify)):
        identity = policy.identify[name]
        address = identity.ip if isinstance(identity, Network) else identity
        if isinstance(address, ClientIp) and not address.trusted_proxies:
            yield f"{name!r} trusts no proxy, so all clients would have the gateway's address; set trusted_proxies: [its address]"
        elif isinstance(identity, Certificate):
            yield f"{name!r} reads a client certificate, which a gateway does not pass on: it would be absent"
        elif isinstance(identity, BodyField):
            yield f"{name!r} reads the body, which a gateway does not pass on: it would be absent"
    for rule in policy.rules:
        if rule.concurrent is not None:
            yield f"rule {rule.name!r}: a gateway does not say when a request ends: each counts as running for its whole hold"


def used_identities(policy: Policy) -> set[str]:
    """The identities that keys, conditions, tiers and exemptions of a policy name; networks of exemptions are those of `ip`."""
    keys = [rule.key for rule in policy.rules] + [one.key for one in (policy.penalty_box,) if one is not None]
    found = {name for key in keys for part in key for name in part}
    for when in [*(rule.when for rule in policy.rules), *(one.when for one in policy.exempt)]:
        found |= {*when.present, *when.absent, *(name for name, _ in when.equals)}
    found |= {rule.limit.by for rule in policy.rules if isinstance(rule.limit, Tiers)}
    found |= {name for rule in policy.rules if rule.once is not None for name in rule.once.bind}
    return found | {"ip" for one in policy.exempt if one.networks}


def response_fields(policy: Policy) -> tuple[str, ...]:
    """The fields of responses under the policy's own names; the first is Retry-After, which only refusals have."""
    headers = policy.headers
    names = [b"retry-after", *DRAFTS[headers.wire][1]]
    names += [b"x-ratelimit-limit", b"x-ratelimit-remaining"] if headers.x else []
    names += [b"x-ratelimit-reset"] if headers.reset != "off" else []
    own = {WORDS[word]: forwarded(name) for word, name in headers.names}
    return tuple(own.get(name) or SPELLING[name] for name in names)


# Writers -------------------------------------------------------------------------------------------------------------


def fill(template: str, **values: object) -> str:
    """The template with each `<<name>>` replaced; further lines of a value are indented as its first one is."""
    for name, value in values.items():
        for indentation in re.findall(rf"(?m)^([ \t]*).*<<{name}>>", template):
            text = str(value).replace("\n", "\n" + indentation)
            template = template.replace(f"<<{name}>>", text, 1)
    return re.sub(r"(?m)^[ \t]+$\n", "", template)


def alternatives(patterns: Iterable[str], longest: int) -> Iterator[str]:
    """The patterns joined by `|`, in texts of at most `longest` characters."""
    joined = ""
    for one in patterns:
        if joined and len(joined) + len(one) >= longest:
            yield joined
            joined = ""
        joined += "|" * bool(joined) + one
    yield joined


def nginx(gateway: Gateway) -> str:
    def variable(name: str) -> str:
        return name.lower().replace("-", "_")

    asks, names = "", gateway.headers
    if gateway.limited is not None:
        lines = [f'"~*^(?:{one})(?:\\?|$)" 1;' for one in alternatives(gateway.limited, MAX_NGINX)]
        asks = fill(templates.NGINX_MAP, limited="\n".join(lines), plain=PLAIN)
    passed = "" if names is None else "proxy_pass_request_headers off;\n"
    passed += "\n".join(f"proxy_set_header {name} $http_{variable(name)};" for name in names or ())
    fields = (gateway.retry_after, *gateway.fields)
    return fill(
        templates.NGINX,
        asks=asks,
        skip='if ($limitkeeper_asks = "") { return 204; }   # no rule is about this path' if asks else "",
        headers=passed,
        set="\n".join(f"auth_request_set $limitkeeper_{variable(name)} $upstream_http_{variable(name)};" for name in fields),
        retry=f"add_header {gateway.retry_after} $limitkeeper_{variable(gateway.retry_after)} always;",
        add="\n".join(f"add_header {name} $limitkeeper_{variable(name)} always;" for name in gateway.fields),
        down="error_page 502 503 504 = @limitkeeper_down;   # the service is down or late: let requests pass"
        if gateway.fail_open
        else "",
        **shared_values(gateway),
    )


def caddy(gateway: Gateway) -> str:
    names = gateway.headers
    passed = "" if names is None else "header_up -*\n"
    passed += "\n".join(f"header_up {name} {{http.request.header.{name}}}" for name in names or ())
    shown = gateway.fields[:1]
    fields = "\n".join(f"header {name} {{rp.header.{name.title()}}}" for name in gateway.fields)
    return fill(
        templates.CADDY,
        routes=fill(templates.CADDY_ROUTES, limited="|".join(gateway.limited), plain=PLAIN)
        if gateway.limited is not None
        else "import limited",
        headers=passed,
        success=fill(templates.CADDY_SUCCESS, shown=shown[0], fields=fields) if shown else "",
        down=templates.CADDY_DOWN if gateway.fail_open else "",
        **shared_values(gateway),
    )


def envoy(gateway: Gateway) -> str:
    if not is_address(gateway.listen.host):
        raise ConfigurationError(f"--listen: Envoy listens on an IP address such as 127.0.0.1, got {gateway.listen.host!r}")
    patterns = (
        ["{safe_regex: {regex: '.*'}}"] if gateway.headers is None else [f"{{exact: {one.lower()}}}" for one in gateway.headers]
    )
    return fill(
        templates.ENVOY,
        routes=fill(templates.ENVOY_ROUTES, limited=quoted(f"(?i)(?:{'|'.join(gateway.limited)})"), plain=quoted(PLAIN))
        if gateway.limited is not None
        else "",
        headers="\n".join(f"- {one}" for one in patterns),
        fields="\n".join(f"- {{exact: {one.lower()}}}" for one in gateway.fields) or "- {exact: retry-after}",
        allow="true" if gateway.fail_open else "false",
        service_type="" if is_address(gateway.service.host) else templates.ENVOY_NAMED,
        application_type="" if is_address(gateway.application.host) else templates.ENVOY_NAMED,
        **shared_values(gateway),
    )


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def shared_values(gateway: Gateway) -> dict[str, object]:
    found: dict[str, object] = {"policy": gateway.policy, "address": gateway.address_header, "refused": REFUSED}
    found["unavailable"] = UNAVAILABLE
    found |= {"timeout": f"{gateway.timeout_ms}ms", "timeout_s": f"{gateway.timeout_ms / 1000:g}s"}
    for name, one in (("service", gateway.service), ("application", gateway.application), ("listen", gateway.listen)):
        found |= {name: one, f"{name}_host": one.host, f"{name}_port": one.port}
    return found


WRITERS: dict[str, Callable[[Gateway], str]] = {"nginx": nginx, "caddy": caddy, "envoy": envoy}
