"""A primary, a replica, and three sentinels that watch them: a failover takes a second or two."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from urllib.parse import quote

import redis

from servers.valkey import Valkey, server_binary

#: How long a server is silent until sentinels consider it down: longer than a machine may stall, and short when one was killed.
PATIENT_MS, HASTY_MS = 10_000, 500


class Sentinel(Valkey):
    """One sentinel; its configuration is a file that it rewrites itself."""

    def __init__(self, primary: int, quorum: int, service: str, extra: str = "") -> None:
        super().__init__(start=False)
        self.config = os.path.join(self.folder, "sentinel.conf")
        with open(self.config, "w") as file:
            file.write(
                f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}\n"
                f"sentinel monitor {service} 127.0.0.1 {primary} {quorum}\n"
                f"sentinel down-after-milliseconds {service} {PATIENT_MS}\n"
                f"sentinel failover-timeout {service} 1000\n{extra}"
            )
        self.start()

    def start(self, *more: str) -> None:
        with open(os.path.join(self.folder, "log"), "ab") as log:
            self.process = subprocess.Popen([server_binary(), self.config, "--sentinel"], stdout=log, stderr=log)
        end = time.monotonic() + 60
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.RedisError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise RuntimeError(f"the sentinel did not start: {self.log()[-2000:]}") from None
                time.sleep(0.02)


class Watched:
    """The whole topology. `failover()` makes another primary; `kill_primary()` makes one necessary."""

    def __init__(self, service: str = "mymaster", sentinels: int = 3, password: str = "") -> None:
        self.service = service
        lock = ("--repl-diskless-sync-delay", "0", *(("--requirepass", password, "--masterauth", password) if password else ()))
        self.password = password
        self.servers = [Valkey(*lock)]
        self.sentinels: list[Sentinel] = []
        try:
            self._build(lock, sentinels)
        except BaseException:
            self.close()
            raise

    def _build(self, lock: tuple[str, ...], sentinels: int) -> None:
        primary = self.servers[0].port
        self.servers.append(Valkey("--replicaof", "127.0.0.1", str(primary), *lock))
        extra = f'sentinel auth-pass {self.service} "{self.password}"\n' if self.password else ""
        self.sentinels = [Sentinel(primary, sentinels // 2 + 1, self.service, extra) for _ in range(sentinels)]
        end = time.monotonic() + 60
        while not (self.in_step() and all(self._knows_all(sentinel) for sentinel in self.sentinels)):
            if time.monotonic() > end:
                raise RuntimeError("the sentinels did not find one another")
            time.sleep(0.05)

    def _knows_all(self, sentinel: Sentinel) -> bool:
        with sentinel.client(decode_responses=True) as client:
            received = client.sentinel_master(self.service)
        return int(received["num-slaves"]) == 1 and int(received["num-other-sentinels"]) == len(self.sentinels) - 1

    def in_step(self) -> bool:
        """Whether every replica has all that its primary has, and follows."""
        for server in self.servers:
            with server.client(password=self.password or None) as client:
                received = client.info("replication")
            if received["role"] == "slave" and received["master_link_status"] != "up":
                return False
        return True

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{f':{quote(self.password)}@' if self.password else ''}{hosts}/{self.service}"

    def primary(self) -> Valkey:
        """The primary's address according to the sentinels."""
        with self.sentinels[0].client() as client:
            _, port = client.sentinel_get_master_addr_by_name(self.service)
        return next(server for server in self.servers if server.port == int(port))

    def failover(self) -> None:
        """Requests one until there is another primary: on a busy machine sentinels may abort it."""
        old, asked, end = self.primary(), 0.0, time.monotonic() + 60
        while self.primary() is old:
            if time.monotonic() > end:
                raise RuntimeError("the sentinels made no other primary")
            if time.monotonic() > asked + 5:
                asked = time.monotonic()
                with contextlib.suppress(redis.ResponseError), self.sentinels[0].client() as client:  # it may be under way
                    client.execute_command("SENTINEL", "FAILOVER", self.service)
            time.sleep(0.02)

    def down_after(self, milliseconds: int) -> None:
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                client.execute_command("SENTINEL", "SET", self.service, "down-after-milliseconds", milliseconds)

    def kill_primary(self) -> Valkey:
        """Kills the primary at once, and configures the sentinels to notice soon; returns the dead one."""
        dead = self.primary()
        self.down_after(HASTY_MS)
        dead.kill()
        return dead

    def close(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.close()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
