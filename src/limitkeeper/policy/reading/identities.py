"""Reads the section `identify:`: the fields of each kind of identity, and the identities that they define."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..identity.body import BodyField
from ..identity.client_ip import ClientIp
from ..identity.identify import Called, Captured, Certificate, Cookie, Header, Network, Query, RequestPart
from ..identity.jwt import Jwt, MissingVerifier, Verifier, is_public
from ..model import Identity
from . import value_parsers as parsers
from .diagnostics import INVALID, Invalid, ParseContext, bounded_text, did_you_mean, split_remedy
from .import_string import ImportString
from .nodes import MappingNode, SourcePosition, find_position
from .validators import AnyOf, Choice, Duration, Field, Fields, Integer, ListOf, ParsedFields, Text, as_pairs

#: Headers in which any client can write any address.
ADDRESS_HEADERS = (
    *("x-forwarded-for", "forwarded", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip", "cf-connecting-ip"),
    *("fly-client-ip", "fastly-client-ip", "x-original-forwarded-for", "x-envoy-external-address"),
)
JWT_ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES256K", "ES384", "ES512", "EdDSA"),
    *("HS256", "HS384", "HS512"),
)
KINDS = ("header", "query", "cookie", "path", "body", "request", "jwt", "client_ip", "network", "certificate", "call")
SIMPLE: dict[str, Any] = {
    "query": Query,
    "cookie": Cookie,
    "path": Captured,
    "body": BodyField,
    "request": RequestPart,
    "certificate": Certificate,
    "call": Called,
}
KEY_SOURCES = ("key", "key_file", "key_env")

CALLABLE: Text[Callable[..., object]] = Text(
    "the import string of a callable",
    lambda text: ImportString(parsers.parse_import_string(text)),
    "package.module:attribute",
    accepts=callable,
)
STRING = Text("a string", bounded_text)
NETWORKS = ListOf(Text("a network", parsers.parse_network, "10.0.0.0/8"), "networks")
PROXIES = ListOf(Text("a network", parsers.parse_trusted_proxy, "10.0.0.0/8"), "networks", minimum=0)
CLASSES = Fields("network", {}, as_pairs, others=NETWORKS, key=STRING, minimum=1, example="{internal: [10.1.0.0/16]}")
ALGORITHMS = ListOf(Text("an algorithm", bounded_text, "RS256"), "algorithms")
VALUE = Text("a value", parsers.parse_value, "free", loose=True)
NAME = Text("a name", bounded_text, "api_key")
CAPTURE = Text("a captured name", lambda text: bounded_text(text).strip("{}"), "order_id")
HEADER_NAME = Text("the name of a header", parsers.parse_header_name, texts=parsers.HEADER_NAMES)
IDENTITY_NAME = Text("an identity", parsers.parse_identity_name, "user", texts=parsers.IDENTITY_NAMES)


def header_field(description: str, example: str) -> Field:
    return Field(replace(HEADER_NAME, example=example), description)


JWT: Fields[ParsedFields] = Fields(
    "jwt",
    {
        "claim": Field(Text("the name of a claim", bounded_text, "sub"), "The claim that identifies.", True),
        "key_file": Field(Text("a file", str, "jwt.pub"), "A file with PEM keys, a key set or the secret, next to the policy."),
        "key": Field(Text("a key", str, secret=True), "The key itself; prefer key_file or key_env."),
        "key_env": Field(Text("the name of a variable", bounded_text, "JWT_KEY"), "The environment variable of the key."),
        "algorithms": Field(ALGORITHMS, "How tokens may be signed."),
        "issuer": Field(STRING, "The required iss of a token."),
        "audience": Field(STRING, "The required aud of a token."),
        "leeway": Field(Duration("0s", "1h"), "Tolerated difference between clocks."),
        "header": header_field("The header with the token; default Authorization, unless cookie is given.", "Authorization"),
        "cookie": Field(NAME, "The cookie with the token; read after the header where both are given."),
    },
)
CLIENT_IP: Fields[ParsedFields] = Fields(
    "client_ip",
    {
        "trusted_proxies": Field(PROXIES, "Networks of proxies whose header is trusted; unix for a UNIX socket."),
        "header": header_field("The header of the proxies; default X-Forwarded-For.", "X-Forwarded-For"),
        "ipv6_prefix": Field(Integer("a prefix", 1, 128), "IPv6 clients are counted by network of this length; default 64."),
        "ipv4_prefix": Field(Integer("a prefix", 1, 32), "The same for IPv4; default 32, each address on its own."),
    },
)
IDENTITY: Fields[ParsedFields] = Fields(
    "identity",
    {
        "header": header_field("A request header, as the client wrote it.", "X-Tenant"),
        "query": Field(NAME, "A query parameter."),
        "cookie": Field(NAME, "A cookie."),
        "path": Field(CAPTURE, "A captured path segment: /orders/{order_id}."),
        "body": Field(replace(NAME, example="email"), "A field of a JSON or form body of at most 64 KiB."),
        "request": Field(
            Choice("host", "method", "route"), "The requested host, the method, or the route that the framework has found."
        ),
        "jwt": Field(JWT, "A claim of a verified token."),
        "client_ip": Field(CLIENT_IP, "The client's address, as reported by trusted proxies."),
        "network": Field(CLASSES, "The class of the client's address."),
        "certificate": Field(Choice("san", "subject"), "The name in a verified client certificate."),
        "call": Field(CALLABLE, "A callable that takes the request context and returns a string or None."),
        "default": Field(VALUE, "The value when there is none; the identity then counts as present."),
    },
    one_of=KINDS,
    example="{header: X-User}",
)
IDENTIFY: Fields[ParsedFields] = Fields(
    "identify",
    {},
    others=AnyOf("an identity", mapping=IDENTITY, accepts=lambda value: callable(getattr(value, "of", None))),
    key=IDENTITY_NAME,
    example="{user: {header: X-User}}",
)


class Identities:
    """Creates all identities of a policy, `ip` included. `names` are all that are written, valid or not."""

    def __init__(self, fields: ParsedFields | None, context: ParseContext) -> None:
        self.context = context
        self.fields = fields or ParsedFields(MappingNode(SourcePosition(path="identify")))
        self.drafts: dict[str, ParsedFields | Identity] = self.fields.values
        self.verifiers: list[Verifier | Invalid] = [one.verifier for one in self.drafts.values() if isinstance(one, Jwt)]
        self.names = {*self.fields.node.entries, "ip"}
        self.by_name: dict[str, Identity] = {} if "ip" in self.drafts else {"ip": ClientIp()}
        order = [*self.by_name, *self.drafts]
        for name in sorted(self.drafts, key=lambda name: (name != "ip", self._borrows_key(name))):
            draft = self.drafts[name]
            identity = self._create(name, draft) if isinstance(draft, ParsedFields) else draft
            if identity is not INVALID:
                self.by_name[name] = identity
        self.by_name = {name: self.by_name[name] for name in order if name in self.by_name}

    def default(self, name: str) -> str | None:
        """The default of an identity."""
        value = getattr(self.by_name.get(name), "default", None)
        return value if isinstance(value, str) else None

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
            return self.context.error(self.fields.key(name), f"'ip' is the client's address and can't be a {kind}", remedy, name)
        value, default = draft.get(kind), draft.get("default")
        try:
            if kind in SIMPLE:
                return SIMPLE[kind](value, default)  # type: ignore[no-any-return]
            create: dict[str, Callable[[ParsedFields, Any, str | None], Identity | Invalid]]
            create = {"header": self._header, "client_ip": self._client_ip, "network": self._network, "jwt": self._jwt}
            return create[kind](draft, value, default)
        except ConfigurationError as error:
            return self.context.error(draft.at(kind).position, *split_remedy(error))

    def _header(self, draft: ParsedFields, name: str, default: str | None) -> Identity | Invalid:
        if name.lower() in ADDRESS_HEADERS:
            message = f"any client can write any address into {name}"
            remedy = f"write client_ip: {{trusted_proxies: [10.0.0.0/8], header: {name}}}"
            return self.context.error(draft.at("header").position, message, remedy, name)
        return Header(name.lower(), default)

    def _client_ip(self, draft: ParsedFields, fields: ParsedFields, default: str | None) -> Identity | Invalid:
        if "header" in fields and "trusted_proxies" not in fields:
            header = str(fields.get("header"))
            message = f"{header} is read only from trusted proxies, and none is listed"
            remedy = "add trusted_proxies: [10.0.0.0/8], the networks of your proxies"
            return self.context.error(fields.key("header"), message, remedy, header)
        if "default" in draft:
            self.context.error(draft.key("default"), "client_ip can't have a default", "remove it", "default")
        return ClientIp(**fields.values)

    def _network(self, draft: ParsedFields, classes: Any, default: str | None) -> Identity | Invalid:
        ip: Any = self.by_name.get("ip")
        if ip is None:
            return INVALID
        if not hasattr(ip, "address"):
            message = "the identity 'ip' has no method address, which network classes need"
            return self.context.error(draft.key("network"), message, "give it a method address(request)", "network")
        return Network(ip, classes, default)

    def _jwt(self, draft: ParsedFields, fields: ParsedFields, default: str | None) -> Identity | Invalid:
        claim, verifier = fields.get("claim"), self._verifier(fields)
        return INVALID if claim is None or verifier is INVALID else Jwt(claim, verifier, default)

    def _verifier(self, fields: ParsedFields) -> Verifier | Invalid:
        sources = [source for source in KEY_SOURCES if source in fields]
        if not sources:
            return self._borrowed_verifier(fields)
        if len(sources) > 1:
            message = f"jwt can't have both {sources[0]!r} and {sources[1]!r}"
            return self.context.error(fields.key(sources[1]), message, "keep one of them", sources[1])
        verifier = self._own_verifier(fields, sources[0])
        self.verifiers.append(verifier)
        return verifier

    def _borrowed_verifier(self, fields: ParsedFields) -> Verifier | Invalid:
        """The verifier of the only other jwt identity that has a key."""
        known = list(dict.fromkeys(self.verifiers))
        for name in ("algorithms", "issuer", "audience", "leeway", "header", "cookie"):
            if name in fields and known:
                message = f"{name!r} belongs to the key, and this claim uses the key of another identity"
                return self.context.error(fields.key(name), message, "move it there, or give this identity its own key", name)
        if len(known) == 1:
            return known[0]
        message, remedy = "several jwt identities have their own key, and this one has none", "add a key"
        if not known:
            message = "no jwt identity has a key, and anyone can write an unverified token"
            remedy = "add key_file: jwt.pub and algorithms: [RS256]"
        return self.context.error(fields.node.position, message, remedy)

    def _own_verifier(self, fields: ParsedFields, source: str) -> Verifier | Invalid:
        key = self._read_key(fields, source)
        if key is None:
            return MissingVerifier(str(fields[source]), ())
        if key is INVALID or not self._check_algorithms(fields, key, source):
            return INVALID
        options = {name: fields[name] for name in ("header", "cookie", "issuer", "audience") if fields.get(name) is not None}
        if "cookie" in options:
            options.setdefault("header", None)
        try:
            return Verifier(key, fields.get("algorithms"), leeway_us=fields.get("leeway", 0), **options)
        except ConfigurationError as error:
            message, remedy = split_remedy(error)
            at = fields.at("algorithms" if message.startswith("algorithms") else source)
            return self.context.error(at.position, message.removeprefix("algorithms: "), remedy)

    def _read_key(self, fields: ParsedFields, source: str) -> str | bytes | Invalid | None:
        """None: it is missing, and was warned about."""
        value, at = fields.get(source, INVALID), fields.at(source).position
        if source == "key" or value is INVALID:
            return value  # type: ignore[no-any-return]
        if source == "key_env":
            message, remedy = f"the environment variable {value} is not set", f"set {value}, or write key_file"
            return os.environ.get(value) or self._missing_key(at, message, remedy, value)
        try:
            path = Path(os.path.abspath(self.context.folder / value))  # the working directory may change later
            self.context.files.append(path)
            with path.open("rb") as file:
                return file.read(100_000)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            message = f"can't read {value!r}: {self.context.folder / value}: {reason.lower()}"
            return self._missing_key(at, message, "write the path of the key file, relative to the policy", value)

    def _missing_key(self, at: SourcePosition, message: str, remedy: str, text: str) -> Invalid | None:
        if self.context.keys_needed:
            return self.context.error(at, message, remedy, text)
        self.context.warning(at, message, remedy, text)
        return None

    def _check_algorithms(self, fields: ParsedFields, key: str | bytes, source: str) -> bool:
        """Whether the algorithms are known and fit the key."""
        if "algorithms" not in fields:
            remedy = "add algorithms: [RS256], or those that your tokens use"
            self.context.error(fields.key(source), "missing field 'algorithms' in jwt", remedy)
        algorithms, position = fields.get("algorithms"), fields.at(source).position
        if algorithms is None:
            return False
        data = key.encode("utf-8", "replace") if isinstance(key, str) else key
        for name in algorithms:
            if name.lower() == "none":
                message, remedy = (
                    "the algorithm 'none' accepts unsigned tokens",
                    "name the algorithm of your tokens, such as RS256",
                )
            elif name not in JWT_ALGORITHMS:
                message, remedy = f"unknown algorithm {name!r}", did_you_mean(name, JWT_ALGORITHMS)
            elif name.startswith("HS") and is_public(data):
                message = f"{name} uses the key as a shared secret, and this key is public: anyone could sign with it"
                remedy = "write RS256 or ES256 for a public key"
            else:
                continue
            self.context.error(find_position(fields.at("algorithms"), name), message, remedy, name)
            return False
        if algorithms[0].startswith("HS") and data[-1:] == b"\n" and source != "key":
            message = "the secret ends with a line break, which is part of it: tokens that are signed without it are rejected"
            self.context.warning(position, message, "write the file with printf instead of echo")
        if b"PRIVATE KEY" in data:
            message = "this is a private key: it verifies tokens, and can also sign them"
            self.context.warning(position, message, "use the public key")
        return True
