"""The words under `identify:`: one kind each, and what an identity may not be built on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ...errors import ConfigurationError
from ..identity.client_ip import ClientIp
from ..identity.identify import Called, Captured, Certificate, Cookie, Header, Network, Query
from ..identity.jwt import Jwt, Verifier
from ..identity.jwt_keys import is_public
from ..model import Identity
from . import route_parser, value_parsers
from .fields import Fields, Pairs, Said, Word
from .import_string import Named
from .nodes import Node, Scalar, SourcePosition
from .parse_context import ParseContext, ParseError, bounded, did_you_mean
from .validators import BAD, Choice, DurationText, ListOf, Number, Ready, Text, Validator, only_configuration

#: Headers in which anybody can write any address.
ADDRESS_HEADERS = (
    *("x-forwarded-for", "forwarded", "x-real-ip", "x-client-ip", "x-cluster-client-ip", "true-client-ip", "cf-connecting-ip"),
    *("fly-client-ip", "fastly-client-ip", "x-original-forwarded-for", "x-envoy-external-address"),
)
ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES256K",
    "ES384",
    "ES512",
    "EdDSA",
    "HS256",
    "HS384",
    "HS512",
)
KINDS = ("header", "query", "cookie", "path", "jwt", "client_ip", "network", "certificate", "call")


class Draft:
    """An identity as it was said: made when all of them are known, since some need others."""

    def __init__(self, said: Said) -> None:
        self.said = said
        self.kind = next((kind for kind in KINDS if kind in said), "")
        self.default = said.get("default")

    def get(self) -> Any:
        return self.said.get(self.kind, BAD)


CALL = Text(
    "the name of something to call", lambda text: Named(value_parsers.call(text)), "package.module:attribute", ready=callable
)
NETWORKS = ListOf(Text("a network", route_parser.network, "10.0.0.0/8"), "networks")
NAME = Text("a name", lambda text: bounded(text), "api_key")
TEXT = Text("a text", bounded, loose=True)
VALUE = Text("a value", value_parsers.value, "free", loose=True)
SECRET = Text("a key", str, secret=True)


def _kept(said: Said, page: ParseContext) -> Said:
    return said


JWT = Fields(
    "jwt",
    {
        "claim": Word(Text("the name of a claim", bounded, "sub"), "The claim whose value is the identity.", required=True),
        "key_file": Word(
            Text("a file", str, "jwt.pub"),
            "A file with the public key (PEM, also several, or a key set) or the secret, relative to the policy.",
        ),
        "key": Word(SECRET, "The key itself; better key_file or key_env."),
        "key_env": Word(Text("the name of a variable", bounded, "JWT_KEY"), "The environment variable that holds the key."),
        "algorithms": Word(ListOf(Text("an algorithm", bounded, "RS256"), "algorithms"), "What tokens may be signed with."),
        "issuer": Word(Text("a text", bounded), "iss of every token that counts."),
        "audience": Word(Text("a text", bounded), "aud of every token that counts."),
        "leeway": Word(DurationText("0s", "1h"), "How far clocks may be apart."),
        "header": Word(
            Text("the name of a header", value_parsers.header_name, "Authorization"), "Where the token is; default Authorization."
        ),
    },
    _kept,
)
CLIENT_IP = Fields(
    "client_ip",
    {
        "trusted_proxies": Word(
            ListOf(
                Text("a network", lambda text: text if text == "unix" else route_parser.proxies(text), "10.0.0.0/8"),
                "networks",
                least=0,
            ),
            "Networks whose word about the client's address counts; unix for a socket.",
        ),
        "header": Word(
            Text("the name of a header", value_parsers.header_name, "X-Forwarded-For"),
            "Where they write it; default X-Forwarded-For.",
        ),
        "ipv6_prefix": Word(Number("a prefix", 1, 128), "An IPv6 client is counted by its network of this length; default 64."),
        "ipv4_prefix": Word(Number("a prefix", 1, 32), "The same for IPv4; default 32, each address for itself."),
    },
    _kept,
)
CLASSES = Pairs("classes of networks", NETWORKS, bounded, "{internal: [10.1.0.0/16]}")
IDENTITY = Fields(
    "an identity",
    {
        "header": Word(
            Text("the name of a header", value_parsers.header_name, "X-Tenant"), "A request header, as the client wrote it."
        ),
        "query": Word(NAME, "A query parameter."),
        "cookie": Word(NAME, "A cookie."),
        "path": Word(
            Text("a captured name", bounded, "order_id"),
            "A part of the path that a template captured: /orders/{order_id}.",
        ),
        "jwt": Word(JWT, "A claim of a verified token."),
        "client_ip": Word(CLIENT_IP, "The client's address, as trusted proxies tell it."),
        "network": Word(CLASSES, "The class of the client's address."),
        "certificate": Word(Choice("san", "subject"), "Who a verified client certificate names."),
        "call": Word(CALL, "A callable that takes the facts of a request and answers a text or None."),
        "default": Word(VALUE, "The value where there is none; the identity then counts as present."),
    },
    lambda said, page: Draft(said),
    one_of=KINDS,
)


def is_identity(value: object) -> bool:
    return callable(getattr(value, "of", None))


IDENTIFY: Validator = Fields(
    "identify",
    {},
    _kept,
    others=Ready(is_identity, IDENTITY),
    named=value_parsers.identity_name,
    example="{user: {header: X-User}}",
)


class Identities:
    """Makes all identities of a policy from what was said. `at` is where each stands, `defaults` what it is without a value."""

    def __init__(self, said: Said | None, page: ParseContext) -> None:
        self.page = page
        self.said = said
        self.drafts: dict[str, Any] = dict(said.values) if said is not None else {}
        self.made: dict[str, Identity] = {}
        self.files: list[Path] = []  # read for keys
        self.verifiers: list[Verifier | None] = [one.verifier for one in self.drafts.values() if isinstance(one, Jwt)]
        self.names = {*(said.node.entries if said is not None else ()), "ip"}
        self._make()

    def at(self, name: str) -> SourcePosition:
        return self.said.word(name) if self.said is not None else SourcePosition(path="identify")

    def default(self, name: str) -> str | None:
        """The value that an identity has where nothing says one."""
        value = getattr(self.made.get(name), "default", None)
        return value if isinstance(value, str) else None

    def _make(self) -> None:
        order = sorted(self.drafts, key=lambda name: (name != "ip", self._keyless(name)))
        if "ip" not in self.drafts:
            self.made["ip"] = ClientIp()
        for name in order:
            draft = self.drafts[name]
            found = self._identity(name, draft) if isinstance(draft, Draft) else draft
            if found is not BAD and found is not None:
                self.made[name] = found
        order = [*self.drafts] if "ip" in self.drafts else ["ip", *self.drafts]
        self.made = {name: self.made[name] for name in order if name in self.made}

    def _keyless(self, name: str) -> bool:
        draft = self.drafts[name]
        said = draft.get() if isinstance(draft, Draft) and draft.kind == "jwt" else None
        return isinstance(said, Said) and not any(word in said for word in ("key", "key_file", "key_env"))

    def _identity(self, name: str, draft: Draft) -> Any:
        value = draft.get()
        if value is BAD or ("default" in draft.said and draft.default is None):
            return BAD
        if name == "ip" and draft.kind not in ("client_ip", "call"):
            remedy = "write {client_ip: {trusted_proxies: […], header: …}}, or give it another name"
            self.page.wrong(self.at(name), name, f"'ip' is the client's address, not a {draft.kind}", remedy)
            return BAD
        make = getattr(self, f"_{draft.kind}")
        try:
            return make(draft, value)
        except ConfigurationError as error:
            message, remedy = only_configuration(error)
            self.page.wrong(draft.said.at(draft.kind).place, "", message, remedy)
            return BAD

    # One function for each kind ---------------------------------------------------------------------------------------

    def _header(self, draft: Draft, name: str) -> Any:
        if name.lower() in ADDRESS_HEADERS:
            node = draft.said.at("header")
            told = f"anybody can write any address into {name}"
            self.page.wrong(node.place, name, told, f"write client_ip: {{trusted_proxies: [10.0.0.0/8], header: {name}}}")
            return BAD
        return Header(name.lower(), draft.default)

    def _query(self, draft: Draft, name: str) -> Any:
        return Query(name, draft.default)

    def _cookie(self, draft: Draft, name: str) -> Any:
        return Cookie(name, draft.default)

    def _path(self, draft: Draft, name: str) -> Any:
        return Captured(name.strip("{}"), draft.default)

    def _certificate(self, draft: Draft, field: str) -> Any:
        return Certificate(field, draft.default)

    def _call(self, draft: Draft, call: Any) -> Any:
        return Called(call, draft.default)

    def _client_ip(self, draft: Draft, said: Said) -> Any:
        proxies = said.get("trusted_proxies", ())
        if "header" in said and not proxies and "trusted_proxies" not in said:
            told = f"{said.get('header')} is read from trusted proxies only, and none is named"
            self.page.wrong(
                said.word("header"),
                str(said.get("header")),
                told,
                "add trusted_proxies: [10.0.0.0/8], the networks of your proxies",
            )
            return BAD
        if "default" in draft.said:
            self.page.wrong(draft.said.word("default"), "default", "the client's address has no default", "take it out")
        given = {word: said.get(word) for word in ("header", "ipv6_prefix", "ipv4_prefix") if said.get(word) is not None}
        return ClientIp(tuple(proxies), **given)

    def _network(self, draft: Draft, classes: tuple[tuple[str, tuple[str, ...]], ...]) -> Any:
        ip: Any = self.made.get("ip", BAD)
        if ip is not BAD and not hasattr(ip, "address"):
            told = "the identity 'ip' tells no address, which networks are compared with"
            self.page.wrong(draft.said.word("network"), "network", told, "give it a method address(facts)")
            return BAD
        return BAD if ip is BAD else Network(ip, classes, draft.default)

    def _jwt(self, draft: Draft, said: Said) -> Any:
        claim, verifier = said.get("claim"), self._verifier(said)
        return BAD if claim is None or verifier is None else Jwt(claim, verifier, draft.default)

    def _verifier(self, said: Said) -> Verifier | None:
        sources = [word for word in ("key", "key_file", "key_env") if word in said]
        if not sources:
            return self._borrowed(said)
        if len(sources) > 1:
            self.page.wrong(
                said.word(sources[1]), sources[1], f"{sources[0]!r} and {sources[1]!r} stand together", "one key is enough"
            )
            return None
        made = self._own(said, sources[0])
        self.verifiers.append(made)
        return made

    def _own(self, said: Said, source: str) -> Verifier | None:
        key = self._key(said, source)
        if key is None or not self._algorithms_hold(said, key, source):
            return None
        given = {word: said.get(word) for word in ("header", "issuer", "audience") if said.get(word) is not None}
        try:
            return Verifier(key, said.get("algorithms"), leeway_us=said.get("leeway", 0), **given)
        except ConfigurationError as error:
            message, remedy = only_configuration(error)
            at = said.at("algorithms") if message.startswith("algorithms") else said.at(source)
            self.page.wrong(at.place, "", message.removeprefix("algorithms: "), remedy)
            return None

    def _borrowed(self, said: Said) -> Verifier | None:
        """The key of the other jwt identity, when there is one of them."""
        place = said.node.place
        known = list(dict.fromkeys(self.verifiers))
        for word in ("algorithms", "issuer", "audience", "leeway", "header"):
            if word in said and known:
                told = f"{word!r} belongs to the key, and this claim uses the key of another identity"
                self.page.wrong(said.word(word), word, told, "say it there, or give this one a key of its own")
                return None
        if not known:
            told = "a token that nobody verifies can be written by anybody: no jwt identity has a key"
            self.page.wrong(place, "", told, "add key_file: jwt.pub and algorithms: [RS256]")
        elif len(known) > 1:
            self.page.wrong(place, "", "several jwt identities have keys of their own, and this one has none", "give it one too")
        return known[0] if len(known) == 1 else None

    def _key(self, said: Said, source: str) -> str | bytes | None:
        value, node = said.get(source), said.at(source)
        if not isinstance(value, str):
            return None
        if source == "key":
            return value
        if source == "key_env":
            found = os.environ.get(value)
            if not found:
                self.page.wrong(node.place, value, f"the environment has no {value}", f"set {value}, or write key_file")
            return found or None
        return self._key_of_file(value, node)

    def _key_of_file(self, name: str, node: Node) -> bytes | None:
        try:
            path = Path(os.path.abspath(self.page.folder / name))  # a program may change its folder
            self.files.append(path)
            self.page.files.append(path)
            return path.read_bytes()[:100_000]
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            told = f"{name!r} can't be read: {self.page.folder / name}: {reason.lower()}"
            self.page.wrong(node.place, name, told, "write the path of the key's file, relative to the policy")
            return None

    def _algorithms_hold(self, said: Said, key: str | bytes, source: str) -> bool:
        """Algorithms that verify, and that suit the key."""
        if "algorithms" not in said:
            told = "nothing says what tokens are signed with"
            self.page.wrong(said.word(source), "", told, "add algorithms: [RS256], or whichever your tokens use")
            return False
        node, found = said.at("algorithms"), said.get("algorithms")
        if found is None:
            return False
        data = key.encode("utf-8", "replace") if isinstance(key, str) else key
        for name in found:
            wrong = algorithm_mistake(name, is_public(data))
            if wrong is not None:
                self.page.wrong(place_of(node, name), name, wrong.message, wrong.suggestion)
                return False
        if found[0].startswith("HS") and data[-1:] == b"\n" and source != "key":
            told = "the secret ends with a line break, which counts: tokens that are signed without it do not hold"
            self.page.warn(said.at(source).place, "", told, "write the file with printf rather than echo")
        if b"PRIVATE KEY" in data:
            told = "a private key verifies tokens, but whoever reads it can write them"
            self.page.warn(said.at(source).place, "", told, "use the public key")
        return True


def algorithm_mistake(name: str, public: bool) -> ParseError | None:
    if name.lower() == "none":
        return ParseError(
            "'none' lets anybody write a token", "name the algorithm that your tokens are signed with, such as RS256"
        )
    if name not in ALGORITHMS:
        return ParseError(f"no algorithm is called {name!r}", did_you_mean(name, ALGORITHMS))
    if name.startswith("HS") and public:
        told = f"{name} takes the key as a shared secret, and this one is public: anybody could sign with it"
        return ParseError(told, "write RS256 or ES256 for a public key")
    return None


def place_of(node: Node, text: str) -> SourcePosition:
    """Where a text stands in a list, or alone."""
    for item in getattr(node, "items", ()):
        if isinstance(item, Scalar) and item.text == text:
            return item.place
    return node.place
