"""The commands `limitkeeper keys …`: the keys of a rule in a store, and the overrides of single keys."""

from __future__ import annotations

import argparse
import json
import os
from getpass import getuser
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from .cli import ERRORS, OK, open_gate, to_json
from .clock import SYSTEM
from .errors import LimitkeeperError
from .policy.gate import Gate
from .policy.key_inspection import StoredKeys, keys_text, open_shared_store
from .policy.model import Policy
from .policy.reading.load import load
from .rate import duration_us
from .service.audit_log import AuditLog
from .stores import store_from_url


def operator_name() -> str:
    """Who runs the command, for the audit log; the user of a container may have no name."""
    try:
        return getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


def run_keys(args: argparse.Namespace) -> int:
    policy = load_policy_with_rule(args.policy, args.limit)
    with open_shared_store(args.store or policy.store) as store, open_gate(policy, store) as gate:
        keys = StoredKeys(gate.compiled.rules_by_name[args.limit], store)
        if args.action == "reset":
            keys.reset(args.key)
            log = store.open_hash(f"audit:{policy.name}")
            if log is not None:
                AuditLog(log, SYSTEM.now_us).record(operator_name(), "reset", limit=args.limit, key=args.key)
            print(f"{args.limit}: {args.key} starts as new")
            return OK
        found = keys.show(args.key) if args.action == "show" else keys.list(args.match)
    shown = found if args.action == "show" else found[: args.first]
    empty = f"{args.limit}: no key has state"
    print(to_json([one._asdict() for one in shown]) if args.json else keys_text(shown, len(found) - len(shown)) or empty)
    return OK


def run_override(args: argparse.Namespace) -> int:
    answer = override_in_store(args) if args.policy else override_by_service(args)
    print(to_json(answer))
    return ERRORS if "error" in answer else OK


def override_by_service(args: argparse.Namespace) -> dict[str, Any]:
    try:
        path = f"/v1/overrides/{quote(args.limit, safe='')}/{quote(args.key, safe='')}"
    except UnicodeEncodeError:
        raise LimitkeeperError("a limit or key that is not UTF-8 can't be sent; write to the store with --policy FILE") from None
    body = {"limit": args.to, "for": args.duration, "reason": args.reason}
    method = "DELETE" if args.remove else "PUT" if args.to else "GET"
    remedy = "name its admin port with --admin, or write to the store with --policy FILE"
    return ask_service(args.admin, path, method, json.dumps(body).encode() if method == "PUT" else None, remedy)


def ask_service(
    admin: str | None, path: str, method: str = "GET", data: bytes | None = None, remedy: str = "name its admin port with --admin"
) -> dict[str, Any]:
    """The answer of a service's admin port, as a mapping; the token is that of LIMITKEEPER_TOKEN."""
    url, token = (admin or "http://127.0.0.1:7073").rstrip("/") + path, os.environ.get("LIMITKEEPER_TOKEN")
    if token and not (token.isascii() and token.isprintable()):  # an error of the HTTP client would show it
        raise LimitkeeperError("LIMITKEEPER_TOKEN has a line end, or another character that no token has")
    try:
        request = Request(url, data, {"Authorization": f"Bearer {token}"} if token else {}, method=method)
        try:
            with urlopen(request, timeout=10) as response:
                answer = json.load(response)
        except HTTPError as error:
            answer = json.load(error)
        if not isinstance(answer, dict) or not isinstance(answer.get("error", {}), dict):
            raise ValueError("this is not the answer of a service")
        return answer
    except (OSError, ValueError, HTTPException, RecursionError) as error:
        raise LimitkeeperError(f"{url}: the service does not answer ({error}); {remedy}") from None


def override_in_store(args: argparse.Namespace) -> dict[str, Any]:
    policy = load_policy_with_rule(args.policy, args.limit)
    with store_from_url(args.store or policy.store) as store, Gate(policy, store=store, imports=False) as gate:
        shared, overrides = store.open_hash(f"audit:{policy.name}"), gate.operator_overrides
        if shared is None or not shared.polled:
            raise LimitkeeperError("other processes can't read this store; name the service's admin port with --admin URL")
        if not args.remove and not args.to:
            found = overrides.find(args.limit, args.key)
            return found.to_dict() if found else {"error": {"code": "not_found", "message": "there is no such override"}}
        log = AuditLog(shared, SYSTEM.now_us)
        if args.remove:
            log.record(operator_name(), "remove override", limit=args.limit, key=args.key)
            return {"removed": overrides.remove(args.limit, args.key)}
        for_us = duration_us(args.duration) if args.duration else None
        made = overrides.put(args.limit, args.key, args.to, for_us=for_us, reason=args.reason, by=operator_name())
        log.record(operator_name(), "override", limit=args.limit, key=args.key, to=args.to, reason=args.reason)
        return made.to_dict()


def load_policy_with_rule(path: str, rule: str) -> Policy:
    if not os.path.exists(path):
        raise LimitkeeperError(f"{path}: no such file; name the policy with --policy FILE")
    policy = load(path, keys_needed=False)
    names = [one.name for one in policy.rules]
    if rule not in names:
        raise LimitkeeperError(f"the policy {policy.name!r} has no rule {rule!r}; it has: {', '.join(names)}")
    return policy
