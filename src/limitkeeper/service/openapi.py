"""The OpenAPI 3.1 document of the HTTP port. The tests send what it describes, and check that the answers are as it says."""

from __future__ import annotations

from typing import Any

from .app import MAX_CHECKS

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
SECONDS: Schema = {"type": "number", "minimum": 0}
UNITS: Schema = {"type": "integer", "minimum": 0}
LIMIT: Schema = {"type": "string", "description": "the name of a rule of the policy", "examples": ["checkout"]}
KEY: Schema = {"type": "string", "description": "whose state it is, as the policy writes it", "examples": ["user:42"]}


def obj(properties: dict[str, Schema], required: tuple[str, ...] = (), closed: bool = True) -> Schema:
    found: Schema = {"type": "object", "properties": properties, "required": list(required)}
    return {**found, "additionalProperties": False} if closed else found


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


HIT = {"limit": LIMIT, "key": KEY, "cost": {**UNITS, "default": 1}, "tier": STRING}
DECISION = {
    "allowed": BOOLEAN,
    "limit": {"type": ["integer", "null"], "description": "the largest cost that could pass at once; null: unlimited"},
    "remaining": {"type": ["integer", "null"], "minimum": 0},
    "retry_after": {"type": ["number", "null"], "minimum": 0, "description": "seconds; null: never"},
    "reset_after": SECONDS,
}
REQUEST = {
    "method": {**STRING, "minLength": 1, "examples": ["GET"]},
    "path": {**STRING, "pattern": "^/", "description": "with its query"},
    "headers": {"type": "object", "additionalProperties": STRING},
    "client": {
        "anyOf": [{**STRING, "format": "ipv4"}, {**STRING, "format": "ipv6"}, {"type": "null"}],
        "description": "the client's IP address; without it, rules keyed by ip do not apply",
    },
}
SCHEMAS: dict[str, Schema] = {
    "Check": obj(HIT, ("limit", "key")),
    "Checks": obj({"checks": {"type": "array", "items": ref("Check"), "maxItems": MAX_CHECKS}}, ("checks",)),
    "Match": obj({"request": obj(REQUEST, ("method", "path"))}, ("request",)),
    "Decision": obj(DECISION, tuple(DECISION), closed=False),
    "Decisions": obj({"decisions": {"type": "array", "items": ref("Decision")}}, ("decisions",)),
    "Settle": obj({"token": STRING, "used": UNITS}, ("token", "used")),
    "Cancel": obj({"token": STRING}, ("token",)),
    "Reset": obj({"limit": LIMIT, "key": KEY}, ("limit", "key")),
    "Error": obj({"error": obj({"code": STRING, "message": STRING}, ("code", "message"))}, ("error",)),
}


def content(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def answers(schema: Schema, refused: bool = False) -> dict[str, Any]:
    found = {"200": {"description": "the result", "content": content(schema)}}
    if refused:
        refusal = {"description": "refused; Retry-After says when to try again", "content": content(ref("Decision"))}
        found |= {"429": refusal}
    errors = {
        "400": "an invalid body",
        "401": "no valid token",
        "403": "a request of a web page",
        "404": "an unknown limit or reservation",
    }
    errors |= {"413": "too large", "503": "the store can't be asked, or the rule fails closed"}
    # A rule that fails closed answers 503 with a decision, everything else with an error.
    either = {"anyOf": [ref("Error"), ref("Decision")]}
    return found | {
        status: {"description": text, "content": content(either if status == "503" else ref("Error"))}
        for status, text in errors.items()
    }


def post(summary: str, body: Schema, schema: Schema, refused: bool = False) -> Schema:
    sent = {"required": True, "content": content(body)}
    return {"post": {"summary": summary, "requestBody": sent, "responses": answers(schema, refused)}}


def get(summary: str, schema: Schema, parameters: tuple[str, ...] = ()) -> Schema:
    where = [{"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}} for name in parameters]
    return {"get": {"summary": summary, "parameters": where, "responses": answers(schema)}}


def document(version: str, max_wait: float) -> Schema:
    """The whole document. `max_wait`: the longest wait for the start of a reservation, in seconds."""
    reserve = obj({**HIT, "max_wait": {**SECONDS, "maximum": max_wait, "default": 0}}, ("limit", "key"))
    done = {name: obj({name: BOOLEAN}, (name,)) for name in ("settled", "refunded", "reset")}
    anything: Schema = {"type": "object"}
    paths = {
        "/v1/check": post(
            "Hit a limit, many limits, or have a request matched by the policy",
            {"anyOf": [ref("Check"), ref("Checks"), ref("Match")]},
            {"anyOf": [ref("Decision"), ref("Decisions")]},
            refused=True,
        ),
        "/v1/reserve": post("Charge an estimate; the token settles it", reserve, ref("Decision"), refused=True),
        "/v1/settle": post("Set the actual cost of a reservation, once", ref("Settle"), done["settled"]),
        "/v1/refund": post("Give units back, or a whole reservation", {"anyOf": [ref("Cancel"), ref("Check")]}, done["refunded"]),
        "/v1/reset": post("Forget a key", ref("Reset"), done["reset"]),
        "/v1/limits": get("The limits of the policy in force", anything),
        "/v1/limits/{limit}": get("One limit", anything, ("limit",)),
        "/v1/limits/{limit}/{key}": get("The state of a key", anything, ("limit", "key")),
        "/healthz": {"get": {"summary": "Liveness", "responses": {"200": {"description": "alive"}}}},
        "/readyz": {
            "get": {"summary": "Readiness", "responses": {"200": {"description": "ready"}, "503": {"description": "draining"}}}
        },
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "limitkeeper", "version": version or "0", "description": "Decisions of a rate limit policy."},
        "paths": paths,
        "components": {"schemas": SCHEMAS, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }
