"""The fields of a scenario file: a validator for each, from the small ones to SCENARIO. docs/simulate.md describes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigurationError, InvalidLimit
from ..plan.slo import Slo
from ..policy import Policy, PolicyError
from ..policy.reading.diagnostics import Invalid, ParseContext, ParseError, bounded_text, did_you_mean, split_remedy
from ..policy.reading.nodes import Node, Scalar, SourcePosition
from ..policy.reading.validators import (
    AnyOf,
    Boolean,
    Choice,
    Duration,
    Field,
    Fields,
    Integer,
    ListOf,
    ParsedFields,
    Text,
    Validator,
)
from ..policy.reading.value_parsers import parse_cap, parse_single_limit
from ..rate import parse_rate
from .arrivals import CONSTANT, POISSON, Profile, flash_crowd, on_off
from .calls import Backoff, BreakerSettings, BulkheadSettings, CallSettings
from .clients import CLIENT_BACKOFF, ClientSettings
from .distributions import ServiceTime
from .gateway import CENTRAL, LEASED, PER_NODE, SHARDED, Fault, GatewaySettings, StoreSettings
from .scenario import Scenario, ServiceSettings

MAX_USERS = 1_000_000


def table(required: str = "", **validators: Validator[Any]) -> dict[str, Field]:
    """The fields of a mapping; `required` names those that must be there. `for_` is the field "for"."""
    return {name.rstrip("_"): Field(one, name, name in required.split()) for name, one in validators.items()}


def given(fields: ParsedFields, *others: str, **renamed: str) -> dict[str, Any]:
    """The values that are written, without `others`, under the names of the settings' attributes."""
    return {renamed.get(name, name): fields[name] for name in fields.node.entries if name not in others}


class Number(Validator[float]):
    """A number within bounds; a share may be written as "10%"."""

    def __init__(self, what: str, low: float, high: float, share: bool = False) -> None:
        self.expects = f"{what} (a number from {low:g} to {high:g}{', or a percentage' if share else ''})"
        self.low, self.high, self.share = low, high, share
        self.schema = {"type": ["number", "string"] if share else "number", "minimum": low, "maximum": high}

    def parse(self, node: Node, context: ParseContext) -> float | Invalid:
        value = node.value
        if self.share and isinstance(value, str) and value.endswith("%"):
            try:
                value = float(value[:-1]) / 100
            except ValueError:
                return self.reject(node, context)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self.low <= value <= self.high:
            return self.reject(node, context)
        return float(value)


def parse_rps(text: str) -> float:
    """ "500/s" as arrivals per second; "0/s" is none."""
    if text.replace(" ", "") in ("0", "0/s"):
        return 0.0
    try:
        rate, _ = parse_rate(text)
    except InvalidLimit as error:
        raise ParseError(*split_remedy(error)) from None
    return rate.count * 1e6 / rate.period


def parse_endpoint(text: str) -> str:
    method, _, path = bounded_text(text).partition(" ")
    if not method.isupper() or not path.startswith("/"):
        raise ParseError(f"{text!r} is no request", "write a method and a path, as in POST /checkout")
    return text


def parse_slo(text: str) -> Slo:
    try:
        return Slo.of(text)
    except ConfigurationError as error:
        raise ParseError(*split_remedy(error)) from None


def parse_time(text: str) -> float:
    """A time that is a key, in seconds."""
    found = TIME.parse(Scalar(SourcePosition(), text, text), ParseContext())
    if isinstance(found, Invalid):
        raise ParseError(f"{text!r} is no time", "write it like 30s")
    return found / 1e6


def check_time_name(name: str) -> None:
    if name not in ("mean", "max") and not (name[:1] == "p" and name[1:].replace(".", "", 1).isdigit()):
        raise ParseError(f"{name!r} is no part of a service time", "write mean, percentiles such as p95, and max")


def as_dict(fields: ParsedFields, context: ParseContext) -> dict[str, Any]:
    return dict(fields.values)


TIME, DELAY, FLAG, TEXT = Duration("0s", "30d"), Duration("1us", "1h"), Boolean(), Text("a string", bounded_text, loose=True)
COUNT, SIZE = Integer("a count", 0, 10_000_000), Integer("a size", 1, 10_000_000)
PODS, ATTEMPTS = Integer("a number of instances", 1, 100_000), Integer("a number of attempts", 1, 100)
RATE: Text[float] = Text("a rate", parse_rps, "500/s")
SHARE, ENDPOINT = Number("a share", 0, 1, share=True), Text("a request", parse_endpoint, "POST /checkout")
SERVICE_TIME: AnyOf[ServiceTime] = Fields(
    "service time",
    {},
    lambda fields, context: ServiceTime.of(fields.values),
    others=TIME,
    key=Text("a part of a service time", check_time_name),
    example="{p50: 20ms, p95: 60ms}",
).or_else("a service time", scalar=TIME.map(lambda time_us: ServiceTime(constant_us=time_us)))

# Clients ---------------------------------------------------------------------------------------------------------------------

RAMP: Fields[ParsedFields] = Fields("ramp", table("at to over", at=TIME, to=RATE, over=DELAY))
FLASH: Fields[ParsedFields] = Fields("flash crowd", table("at peak", at=TIME, peak=RATE, rise=TIME, half_life=DELAY))
PROFILE = Fields(
    "profile",
    {},
    lambda fields, context: sorted((parse_time(at), rate) for at, rate in fields.values.items()),
    others=RATE,
    key=Text("a time", parse_time),
    minimum=1,
    example="{0s: 500/s, 60s: 20000/s}",
)


def build_profile(fields: ParsedFields) -> Profile:
    rate: float = fields.get("rate", 0.0)
    if "profile" in fields:
        points: Profile = fields["profile"]
        return points if points[0][0] == 0 else [(0.0, points[0][1]), *points]
    if "on" in fields:
        return on_off(rate, fields["on"] / 1e6, fields.get("off", fields["on"]) / 1e6, 86_400.0)
    if "flash" in fields:
        flash = fields["flash"]
        times = flash.get("rise", 1_000_000) / 1e6, flash.get("half_life", 30_000_000) / 1e6
        return flash_crowd(rate, flash["at"] / 1e6, flash["peak"], *times)
    if "ramp" in fields:
        begin, over = fields["ramp"]["at"] / 1e6, fields["ramp"]["over"] / 1e6
        return [(0.0, rate), (begin, rate), (begin + over, fields["ramp"]["to"])]
    return [(0.0, rate)]


def build_arrivals(fields: ParsedFields, context: ParseContext) -> dict[str, Any]:
    shapes = ("rate", "profile", "on", "off", "flash", "ramp")
    found = given(fields, *shapes, start="start_us", loop="workers", pause="pause_us")
    return found if "loop" in fields else {**found, "profile": tuple(build_profile(fields))}


SHAPES = table(rate=RATE, profile=PROFILE, on=DELAY, off=DELAY, flash=FLASH, ramp=RAMP)
ARRIVALS = Fields(
    "arrivals",
    {**SHAPES, **table(spacing=Choice(POISSON, CONSTANT), start=TIME, loop=COUNT, pause=TIME)},
    build_arrivals,
    renamed={"rps": "rate", "poisson": "spacing: poisson", "workers": "loop"},
).or_else("arrivals", scalar=RATE.map(lambda rate: {"profile": ((0.0, rate),)}))


def build_backoff(fields: ParsedFields, context: ParseContext) -> Backoff:
    return Backoff(**{**vars(CLIENT_BACKOFF), **given(fields, first="first_us", most="most_us")})


BACKOFF = Fields("backoff", table(first=TIME, factor=Number("a factor", 1, 100), most=TIME, jitter=FLAG), build_backoff)
USER_COUNT = Integer("a count", 1, MAX_USERS)
USERS = Fields(
    "users",
    table("count", count=USER_COUNT, zipf=Number("an exponent", 0, 5)),
    lambda fields, context: given(fields, count="users"),
).or_else("users", scalar=USER_COUNT.map(lambda count: {"users": count}))
TEXTS = Fields("texts", {}, as_dict, others=TEXT)
REQUESTS = Fields(
    "requests",
    {},
    lambda fields, context: tuple(fields.values.items()),
    others=Number("a weight", 0, 1e9, share=True),
    key=ENDPOINT,
    minimum=1,
    example="{POST /checkout: 20%, GET /products: 80%}",
).or_else("requests", scalar=ENDPOINT.map(lambda one: ((one, 1.0),)))
ONCE_MORE = "attempts: 3 (the first one counts)"
CLIENT = Fields(
    "client",
    {
        **table("arrivals", arrivals=ARRIVALS, requests=REQUESTS, identities=TEXTS, headers=TEXTS, users=USERS, timeout=DELAY),
        **table(attempts=ATTEMPTS, backoff=BACKOFF, retry_refused=FLAG, obey_retry_after=FLAG, idempotency_key=FLAG),
    },
    lambda fields, context: {
        **given(fields, "arrivals", "users", timeout="timeout_us"),
        **fields["arrivals"],
        **fields.get("users", {}),
    },
    renamed={"retries": ONCE_MORE, "rate": "arrivals: {rate: …}"},
)

# Services --------------------------------------------------------------------------------------------------------------------

BULKHEAD = Fields(
    "bulkhead",
    table("concurrent", concurrent=SIZE, max_waiting=COUNT, timeout=DELAY, adaptive=Choice("gradient2", "aimd")),
    lambda fields, context: BulkheadSettings(**given(fields, timeout="timeout_us")),
)
BREAKER = Fields(
    "breaker",
    table(failures=Integer("a number of failures", 1, 10_000), ratio=SHARE, backoff=DELAY, max_backoff=DELAY, ramp=DELAY),
    lambda fields, context: BreakerSettings(**given(fields, backoff="backoff_us", max_backoff="max_backoff_us", ramp="ramp_us")),
)
ENDPOINTS, CAP = ListOf(ENDPOINT, "requests"), Text("a limit", parse_cap, "300/s")
CALL = Fields(
    "call",
    {
        **table("to", to=TEXT, for_=ENDPOINTS, probability=SHARE, timeout=DELAY, attempts=ATTEMPTS, backoff=BACKOFF),
        **table(background=FLAG, optional=FLAG, commits=FLAG, cap=CAP, cap_wait=TIME, bulkhead=BULKHEAD, breaker=BREAKER),
    },
    lambda fields, context: CallSettings(
        **given(fields, **{"timeout": "timeout_us", "for": "endpoints", "cap_wait": "cap_wait_us"})
    ),
    renamed={"retries": ONCE_MORE, "service": "to"},
).or_else("a call", scalar=TEXT.map(lambda to: CallSettings(to)))
SLOWS = Fields("slowdown", table(contention=Number("σ", 0, 1), coherency=Number("κ", 0, 1)), as_dict)
#: Requests of one gateway node at a time, unless the scenario says so: it forwards, and does not hold a thread for each.
GATEWAY_PLACES = 1_000_000
SERVICE_FIELDS = table(time=SERVICE_TIME, concurrency=SIZE, queue=COUNT, slows=SLOWS, calls=ListOf(CALL, "calls"))


def build_service(fields: ParsedFields, context: ParseContext) -> dict[str, Any]:
    return {
        **{name: fields[name] for name in ("pods", *SERVICE_FIELDS) if name in fields and name != "slows"},
        **fields.get("slows", {}),
    }


SERVICE = Fields(
    "service", {**table(pods=PODS), **SERVICE_FIELDS}, build_service, renamed={"instances": "pods", "latency": "time"}
)

# Gateway ---------------------------------------------------------------------------------------------------------------------

KIND = Choice(CENTRAL, LEASED, SHARDED, PER_NODE)
STORE = Fields(
    "store",
    table("kind", kind=KIND, latency=ListOf(TIME, "latencies"), shards=PODS, lease=PODS, life=DELAY, strict=FLAG),
    lambda fields, context: StoreSettings(**given(fields, latency="latency_us", life="life_us")),
)
FAULT = Fields(
    "fault",
    table("at down", at=TIME, down=TIME, node=COUNT, loses=FLAG),
    lambda fields, context: Fault(**given(fields, at="at_us", down="down_us")),
)


class PolicyFile(Validator[Policy]):
    """The path of a policy file, relative to the scenario."""

    expects, example = "the path of a policy file", "limitkeeper.yaml"
    schema: Mapping[str, object] = {"type": "string"}

    def parse(self, node: Node, context: ParseContext) -> Policy | Invalid:
        if isinstance(node.value, Policy):
            return node.value
        if not isinstance(node.value, str):
            return self.reject(node, context)
        try:
            return Policy.load(context.folder / node.value)
        except PolicyError as error:
            first = error.errors[0]
            return context.error(node.position, f"{first.location}: {first.message}", first.suggestion, node.text)
        except ConfigurationError as error:
            return context.error(node.position, *split_remedy(error), node.text)


def build_gateway(fields: ParsedFields, context: ParseContext) -> tuple[GatewaySettings, dict[str, Any] | None]:
    """The nodes, and the service that they are: None where they make no calls."""
    settings = GatewaySettings(**given(fields, *SERVICE_FIELDS, skew="skew_us"))
    for fault in settings.faults:
        if fault.node is not None and fault.node >= settings.nodes:
            remedy = f"nodes count from 0 to {settings.nodes - 1}"
            context.error(fields.at("faults").position, f"there is no node {fault.node}", remedy, "faults")
    serves = any(name in fields for name in SERVICE_FIELDS)
    return settings, {**build_service(fields, context), "pods": settings.nodes} if serves else None


FAULTS, SKEW = ListOf(FAULT, "faults"), ListOf(TIME, "clock errors")
GATEWAY = Fields(
    "gateway",
    {**SERVICE_FIELDS, **table(nodes=PODS, policy=PolicyFile(), store=STORE, skew=SKEW, faults=FAULTS)},
    build_gateway,
    renamed={"pods": "nodes", "policies": "policy"},
)


def build_scenario(fields: ParsedFields, context: ParseContext) -> Scenario:
    gateway, gateway_service = fields.get("gateway", (GatewaySettings(), None))
    services = {name: ServiceSettings(name, **given) for name, given in fields.get("services", {}).items()}
    if gateway_service is not None:
        services["gateway"] = ServiceSettings("gateway", **{"concurrency": GATEWAY_PLACES, **gateway_service})
    check_calls(services, fields, context)
    if "limit" in fields and ("gateway" in fields or "services" in fields):
        message, remedy = "a scenario with 'limit' is a trace through one limiter", "remove gateway and services, or the limit"
        context.error(fields.key("limit"), message, remedy, "limit")
    plain = given(fields, "clients", "gateway", "services", duration="duration_us", interval="interval_us")
    clients = tuple(ClientSettings(name, **one) for name, one in fields["clients"].items())
    for one in clients:
        if "limit" in fields and one.workers:
            message, remedy = "a 'loop' waits for responses, and a limit alone has none", "write a rate, or add a gateway"
            context.error(fields.at("clients").child(one.name).child("arrivals").position, message, remedy, "loop")
    return Scenario(clients, gateway=gateway, services=services, **plain)


def check_calls(services: Mapping[str, ServiceSettings], fields: ParsedFields, context: ParseContext) -> None:
    """Every call goes to a service of the scenario, and no service calls itself through others."""
    for name, one in services.items():
        node = fields.at("gateway") if name == "gateway" else fields.at("services").child(name)
        position = node.child("calls").position
        for call in one.calls:
            if call.to not in services or call.to == "gateway":
                known = [each for each in services if each != "gateway"]
                context.error(position, f"{name} calls the unknown service {call.to!r}", did_you_mean(call.to, known), call.to)

    def walk(name: str, way: tuple[str, ...]) -> None:
        if name in way:
            circle = " → ".join((*way[way.index(name) :], name))
            context.error(fields.at("services").position, f"services call each other in a circle: {circle}", "remove a call")
            return
        for call in services[name].calls if name in services else ():
            walk(call.to, (*way, name))

    for name in services:
        walk(name, ())


def mapping_of(what: str, item: Validator[Any], minimum: int = 0) -> Fields[dict[str, Any]]:
    return Fields(what, {}, as_dict, others=item, key=TEXT, minimum=minimum)


LIMIT, ABOUT = Text("a limit", parse_single_limit, "token bucket 5/s burst 10"), Text("a string", str)
OBJECTIVES = Text("objectives", parse_slo, "p95=800ms,p99=2s")
DURATIONS = table(duration=Duration("1ms", "1d"), interval=Duration("1ms", "1h"))
PARTS = table("clients", clients=mapping_of("clients", CLIENT, 1), gateway=GATEWAY, services=mapping_of("services", SERVICE))
SCENARIO: Fields[Scenario] = Fields(
    "scenario",
    {**table(name=TEXT, about=ABOUT, seed=Integer("a seed", 0, 2**63), slo=OBJECTIVES, limit=LIMIT), **DURATIONS, **PARTS},
    build_scenario,
    renamed={"policy": "gateway: {policy: …}", "client": "clients", "time": "duration"},
)
