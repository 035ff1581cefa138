"""Reads the section `identify:`: the fields of each kind of identity, and the identities that they define."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..identity.client_ip import ClientIp
from ..identity.identify import Called, Captured, Certificate, Cookie, Header, Network, Query
from ..identity.jwt import Jwt, Verifier
from ..identity.jwt_keys import is_public
from ..model import Identity
from .fields import Fields, FieldSpec, ParsedFields, pairs_of
from .import_string import ImportString
from .match_parsers import parse_network, parse_trusted_proxy
from .nodes import Node, SourcePosition, find_position
from .parse_context import ParseContext, ParseError, bounded_text, did_you_mean
from .phrase_parsers import parse_header_name, parse_identity_name, parse_import_string, parse_value
from .validators import INVALID, AnyOf, Choice, DurationText, Integer, Invalid, ListOf, Text, split_remedy

#: Headers in which any client can write any address.
ADDRESS_HEADERS = (
    *("x-forwarded-for", "forwarded", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip", "cf-connecting-ip"),
    *("fly-client-ip", "fastly-client-ip", "x-original-forwarded-for", "x-envoy-external-address"),
)
JWT_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES256K", "ES384", "ES512", "EdDSA"),
    *("HS256", "HS384", "HS512"),
)
KINDS = ("header", "query", "cookie", "path", "jwt", "client_ip", "network", "certificate", "call")
SIMPLE: dict[str, Callable[[Any, str | None], Identity]] = {
    "query": Query,
    "cookie": Cookie,
    "path": Captured,
    "certificate": Certificate,
    "call": Called,
}
KEY_SOURCES = ("key", "key_file", "key_env")

CALLABLE: Text[Callable[..., object]] = Text(
    "the import string of a callable",
    lambda text: ImportString(parse_import_string(text)),
    "package.module:attribute",
    accepts=callable,
)
NETWORKS = ListOf(Text("a network", parse_network, "10.0.0.0/8"), "networks")
PROXIES = ListOf(Text("a network", parse_trusted_proxy, "10.0.0.0/8"), "networks", minimum=0)
CLASSES = pairs_of("network", NETWORKS, bounded_text, "{internal: [10.1.0.0/16]}")
VALUE = Text("a value", parse_value, "free", loose=True)
NAME = Text("a name", bounded_text, "api_key")
STRING = Text("a string", bounded_text)


def header_field(description: str, example: str) -> FieldSpec:
    return FieldSpec(Text("the name of a header", parse_header_name, example), description)


JWT = Fields(
    "jwt",
    {
        "claim": FieldSpec(Text("the name of a claim", bounded_text, "sub"), "The claim that identifies.", required=True),
        "key_file": FieldSpec(
            Text("a file", str, "jwt.pub"), "A file with PEM keys, a key set or the secret, next to the policy."
        ),
        "key": FieldSpec(Text("a key", str, secret=True), "The key itself; prefer key_file or key_env."),
        "key_env": FieldSpec(Text("the name of a variable", bounded_text, "JWT_KEY"), "The environment variable of the key."),
        "algorithms": FieldSpec(ListOf(Text("an algorithm", bounded_text, "RS256"), "algorithms"), "How tokens may be signed."),
        "issuer": FieldSpec(STRING, "The required iss of a token."),
        "audience": FieldSpec(STRING, "The required aud of a token."),
        "leeway": FieldSpec(DurationText("0s", "1h"), "Tolerated difference between clocks."),
        "header": header_field("The header with the token; default Authorization.", "Authorization"),
    },
    lambda fields, context: fields,
)
CLIENT_IP = Fields(
    "client_ip",
    {
        "trusted_proxies": FieldSpec(PROXIES, "Networks of proxies whose header is trusted; unix for a UNIX socket."),
        "header": header_field("The header of the proxies; default X-Forwarded-For.", "X-Forwarded-For"),
        "ipv6_prefix": FieldSpec(Integer("a prefix", 1, 128), "IPv6 clients are counted by network of this length; default 64."),
        "ipv4_prefix": FieldSpec(Integer("a prefix", 1, 32), "The same for IPv4; default 32, each address on its own."),
    },
    lambda fields, context: fields,
)
IDENTITY = Fields(
    "identity",
    {
        "header": header_field("A request header, as the client wrote it.", "X-Tenant"),
        "query": FieldSpec(NAME, "A query parameter."),
        "cookie": FieldSpec(NAME, "A cookie."),
        "path": FieldSpec(
            Text("a captured name", lambda text: bounded_text(text).strip("{}"), "order_id"),
            "A captured path segment: /orders/{order_id}.",
        ),
        "jwt": FieldSpec(JWT, "A claim of a verified token."),
        "client_ip": FieldSpec(CLIENT_IP, "The client's address, as reported by trusted proxies."),
        "network": FieldSpec(CLASSES, "The class of the client's address."),
        "certificate": FieldSpec(Choice("san", "subject"), "The name in a verified client certificate."),
        "call": FieldSpec(CALLABLE, "A callable that takes the request context and returns a string or None."),
        "default": FieldSpec(VALUE, "The value when there is none; the identity then counts as present."),
    },
    lambda fields, context: fields,
    one_of=KINDS,
)
IDENTIFY = Fields(
    "identify",
    {},
    lambda fields, context: fields,
    others=AnyOf("an identity", mapping=IDENTITY, accepts=lambda value: callable(getattr(value, "of", None))),
    check_key=parse_identity_name,
    example="{user: {header: X-User}}",
)


class Identities:
    """Creates all identities of a policy, `ip` included. `names` are all that are written, valid or not."""

    def __init__(self, fields: ParsedFields | None, context: ParseContext) -> None:
        self.context = context
        self.fields = fields
        self.drafts: dict[str, ParsedFields | Identity] = dict(fields.values) if fields is not None else {}
        self.by_name: dict[str, Identity] = {}
        self.files: list[Path] = []  # key files
        self.verifiers: list[Verifier | None] = [one.verifier for one in self.drafts.values() if isinstance(one, Jwt)]
        self.names = {*(fields.node.entries if fields is not None else ()), "ip"}
        self._create_all()

    def position(self, name: str) -> SourcePosition:
        return self.fields.key(name) if self.fields is not None else SourcePosition(path="identify")

    def default(self, name: str) -> str | None:
        """The default of an identity."""
        value = getattr(self.by_name.get(name), "default", None)
        return value if isinstance(value, str) else None

    def _create_all(self) -> None:
        created: dict[str, Identity] = {} if "ip" in self.drafts else {"ip": ClientIp()}
        self.by_name = created
        for name in sorted(self.drafts, key=lambda name: (name != "ip", self._borrows_key(name))):
            draft = self.drafts[name]
            identity = self._create(name, draft) if isinstance(draft, ParsedFields) else draft
            if identity is not INVALID:
                created[name] = identity
        order = [*self.drafts] if "ip" in self.drafts else ["ip", *self.drafts]
        self.by_name = {name: created[name] for name in order if name in created}

    def _borrows_key(self, name: str) -> bool:
        draft = self.drafts[name]
        jwt = draft.get("jwt") if isinstance(draft, ParsedFields) else None
        return isinstance(jwt, ParsedFields) and not any(source in jwt for source in KEY_SOURCES)

    def _create(self, name: str, draft: ParsedFields) -> Identity | Invalid:
        kind = next((kind for kind in KINDS if kind in draft), "")
        if not kind or not draft.valid(kind, "default"):
            return INVALID
        if name == "ip" and kind not in ("client_ip", "call"):
            remedy = "write {client_ip: {trusted_proxies: […], header: …}}, or choose another name"
            self.context.error(self.position(name), f"'ip' is the client's address and can't be a {kind}", remedy, name)
            return INVALID
        value, default = draft.get(kind), draft.get("default")
        try:
            if kind in SIMPLE:
                return SIMPLE[kind](value, default)
            if kind == "header":
                return self._header(draft, value, default)
            if kind == "client_ip":
                return self._client_ip(draft, value)
            if kind == "network":
                return self._network(draft, value, default)
            claim, verifier = value.get("claim"), self._verifier(value)
            return INVALID if claim is None or verifier is None else Jwt(claim, verifier, default)
        except ConfigurationError as error:
            self.context.error(draft.at(kind).position, *split_remedy(error))
            return INVALID

    def _header(self, draft: ParsedFields, name: str, default: str | None) -> Identity | Invalid:
        if name.lower() in ADDRESS_HEADERS:
            remedy = f"write client_ip: {{trusted_proxies: [10.0.0.0/8], header: {name}}}"
            self.context.error(draft.at("header").position, f"any client can write any address into {name}", remedy, name)
            return INVALID
        return Header(name.lower(), default)

    def _client_ip(self, draft: ParsedFields, fields: ParsedFields) -> Identity | Invalid:
        if "header" in fields and "trusted_proxies" not in fields:
            header = str(fields.get("header"))
            message = f"{header} is read only from trusted proxies, and none is listed"
            remedy = "add trusted_proxies: [10.0.0.0/8], the networks of your proxies"
            self.context.error(fields.key("header"), message, remedy, header)
            return INVALID
        if "default" in draft:
            self.context.error(draft.key("default"), "client_ip can't have a default", "remove it", "default")
        options = {name: fields.get(name) for name in ("header", "ipv6_prefix", "ipv4_prefix") if fields.get(name) is not None}
        return ClientIp(tuple(fields.get("trusted_proxies", ())), **options)

    def _network(self, draft: ParsedFields, classes: Any, default: str | None) -> Identity | Invalid:
        ip: Any = self.by_name.get("ip")
        if ip is None:
            return INVALID
        if not hasattr(ip, "address"):
            message = "the identity 'ip' has no method address, which network classes need"
            self.context.error(draft.key("network"), message, "give it a method address(request)", "network")
            return INVALID
        return Network(ip, classes, default)

    # Keys of tokens -----------------------------------------------------------------------------------------------------

    def _verifier(self, fields: ParsedFields) -> Verifier | None:
        sources = [source for source in KEY_SOURCES if source in fields]
        if not sources:
            return self._borrowed_verifier(fields)
        if len(sources) > 1:
            message = f"jwt can't have both {sources[0]!r} and {sources[1]!r}"
            self.context.error(fields.key(sources[1]), message, "keep one of them", sources[1])
            return None
        verifier = self._own_verifier(fields, sources[0])
        self.verifiers.append(verifier)
        return verifier

    def _own_verifier(self, fields: ParsedFields, source: str) -> Verifier | None:
        key = self._read_key(fields, source)
        if key is None or not self._check_algorithms(fields, key, source):
            return None
        options = {name: fields.get(name) for name in ("header", "issuer", "audience") if fields.get(name) is not None}
        try:
            return Verifier(key, fields.get("algorithms"), leeway_us=fields.get("leeway", 0), **options)
        except ConfigurationError as error:
            message, remedy = split_remedy(error)
            at = fields.at("algorithms" if message.startswith("algorithms") else source)
            self.context.error(at.position, message.removeprefix("algorithms: "), remedy)
            return None

    def _borrowed_verifier(self, fields: ParsedFields) -> Verifier | None:
        """The verifier of the only other jwt identity that has a key."""
        known = list(dict.fromkeys(self.verifiers))
        for name in ("algorithms", "issuer", "audience", "leeway", "header"):
            if name in fields and known:
                message = f"{name!r} belongs to the key, and this claim uses the key of another identity"
                self.context.error(fields.key(name), message, "move it there, or give this identity its own key", name)
                return None
        position = fields.node.position
        if not known:
            message = "no jwt identity has a key, and anyone can write an unverified token"
            self.context.error(position, message, "add key_file: jwt.pub and algorithms: [RS256]")
        elif len(known) > 1:
            self.context.error(position, "several jwt identities have their own key, and this one has none", "add a key")
        return known[0] if len(known) == 1 else None

    def _read_key(self, fields: ParsedFields, source: str) -> str | bytes | None:
        value, node = fields.get(source), fields.at(source)
        if not isinstance(value, str):
            return None
        if source == "key":
            return value
        if source == "key_env":
            key = os.environ.get(value)
            if not key:
                message = f"the environment variable {value} is not set"
                self.context.error(node.position, message, f"set {value}, or write key_file", value)
            return key or None
        return self._read_key_file(value, node)

    def _read_key_file(self, name: str, node: Node) -> bytes | None:
        try:
            path = Path(os.path.abspath(self.context.folder / name))  # the working directory may change later
            self.files.append(path)
            self.context.files.append(path)
            return path.read_bytes()[:100_000]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"can't read {name!r}: {self.context.folder / name}: {reason.lower()}"
            self.context.error(node.position, message, "write the path of the key file, relative to the policy", name)
            return None

    def _check_algorithms(self, fields: ParsedFields, key: str | bytes, source: str) -> bool:
        """Whether the algorithms are known and fit the key."""
        if "algorithms" not in fields:
            remedy = "add algorithms: [RS256], or those that your tokens use"
            self.context.error(fields.key(source), "missing field 'algorithms' in jwt", remedy)
            return False
        algorithms, node = fields.get("algorithms"), fields.at(source)
        if algorithms is None:
            return False
        data = key.encode("utf-8", "replace") if isinstance(key, str) else key
        for name in algorithms:
            error = check_algorithm(name, is_public(data))
            if error is not None:
                self.context.error(find_position(fields.at("algorithms"), name), error.message, error.suggestion, name)
                return False
        if algorithms[0].startswith("HS") and data[-1:] == b"\n" and source != "key":
            message = "the secret ends with a line break, which is part of it: tokens that are signed without it are rejected"
            self.context.warning(node.position, message, "write the file with printf instead of echo")
        if b"PRIVATE KEY" in data:
            message = "this is a private key: it verifies tokens, and can also sign them"
            self.context.warning(node.position, message, "use the public key")
        return True


def check_algorithm(name: str, public: bool) -> ParseError | None:
    """The error of an algorithm that is unknown or unsafe with a public key."""
    if name.lower() == "none":
        return ParseError("the algorithm 'none' accepts unsigned tokens", "name the algorithm of your tokens, such as RS256")
    if name not in JWT_ALGORITHMS:
        return ParseError(f"unknown algorithm {name!r}", did_you_mean(name, JWT_ALGORITHMS))
    if name.startswith("HS") and public:
        message = f"{name} uses the key as a shared secret, and this key is public: anyone could sign with it"
        return ParseError(message, "write RS256 or ES256 for a public key")
    return None
