"""The policy that `limitkeeper policy init` writes: a few rules that most services want, with comments."""

from __future__ import annotations

from pathlib import Path

from ..errors import ConfigurationError

STARTER_POLICY = """\
# A policy of limitkeeper: who is limited by what. Next steps:
#   limitkeeper policy check limitkeeper.yaml
#   limitkeeper policy explain limitkeeper.yaml --request "POST /login ip=203.0.113.9"
name: my-service                        # prefix of the state in the store
store: memory://                        # one process. Several workers: shared:///dev/shm/my-service
                                        # several machines: redis://localhost:6379, or ${REDIS_URL}
# on_failure: open                      # with a remote store that fails: open, closed, or local 1/4

identify:                               # properties of a request that rules count by; `ip` is always defined
  user: {header: X-User}                # a client can forge a header: let a proxy set it, or verify a token:
  # user: {jwt: {claim: sub, key_file: jwt.pub, algorithms: [RS256]}}
  # ip: {client_ip: {trusted_proxies: [10.0.0.0/8]}}      # behind a proxy or load balancer

exempt:                                 # requests that no rule limits
  - path: /healthz

limits:                                 # all rules that apply are charged together, or none
  - name: client                        # every request, by user, or by address where there is no user
    key: user | ip
    limit: token bucket 20/s burst 40   # 40 at once, then 20 a second

  - name: login                         # guessing passwords
    match: [POST /login, POST /password-reset]
    key: ip
    limit: sliding window log 5/min     # never more than 5 in any minute

  - name: capacity                      # what the service can handle, of all clients together
    key: everyone
    limit: token bucket 200/s burst 200
    status: 503
    on_refusal: shadow                  # counts what it would refuse, and refuses nothing: remove it when the number is right
"""


def write_starter_policy(path: str, overwrite: bool = False) -> None:
    """Writes it; ConfigurationError where the file exists, unless `overwrite`, or can't be written."""
    try:
        with Path(path).open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(STARTER_POLICY.replace("limitkeeper.yaml", path))
    except FileExistsError:
        raise ConfigurationError(f"{path} exists already; write another name, or --force to overwrite it") from None
    except OSError as error:
        raise ConfigurationError(f"{path}: can't write the policy: {str(error.strerror).lower()}") from None
