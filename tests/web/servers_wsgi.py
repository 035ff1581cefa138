"""Real WSGI servers on loopback: waitress in a thread of this process, gunicorn in processes of its own."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import waitress
from servers_asgi import Wire
from waitress import wasyncore
from wsgi_apps import BUILDERS

import limitkeeper


class Waitress(Wire):
    """waitress, with a few threads."""

    def __init__(self, app: Any, calls: list[str]) -> None:
        super().__init__()
        self.calls = calls
        logging.getLogger("waitress").disabled = True
        self.server = waitress.create_server(app, host="127.0.0.1", port=0, threads=4)
        self.port = int(self.server.effective_port)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.hang_up()
        self.server.task_dispatcher.shutdown()
        with suppress(OSError):  # the loop may run the function, and close the trigger, before it is pulled
            self.server.trigger.pull_trigger(lambda: wasyncore.close_all(self.server._map))  # its loop ends with its last socket
        self.thread.join(60)
        assert not self.thread.is_alive()


class Gunicorn(Wire):
    """gunicorn with two workers, which share their limits through the store."""

    def __init__(self, framework: str, gate: Any, url: str, folder: Path) -> None:
        super().__init__()
        self.written = folder / "calls"
        self.written.touch()
        (folder / "policy").write_bytes(pickle.dumps(gate.policy))
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(listener.getsockname()[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(Path(limitkeeper.__path__[0]).parent), str(Path(__file__).parent)]),
            "SUITE_APP": framework,
            "SUITE_POLICY": str(folder / "policy"),
            "SUITE_STORE": url,
            "SUITE_CALLS": str(self.written),
        }
        command = [sys.executable, "-m", "gunicorn", "--workers", "2", "--bind", f"fd://{listener.fileno()}"]
        self.log = (folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, "--log-level", "warning", "gunicorn_app:app"],
            env=environment,
            pass_fds=[listener.fileno()],
            stdout=self.log,
            stderr=self.log,
        )
        listener.close()

    @property
    def calls(self) -> list[str]:  # type: ignore[override]
        return self.written.read_text().splitlines()

    def close(self) -> None:
        self.hang_up()
        self.process.terminate()
        self.process.wait(60)
        self.log.close()


class GunicornApp:
    """The app for the suite: one framework behind gunicorn."""

    kinds = frozenset({"http", "wsgi"})

    def __init__(self, framework: str, url: str, folder: Path) -> None:
        self.framework, self.url, self.folder = framework, url, folder
        self.handlers = {"cached": BUILDERS[framework][1]}

    def make(self, gate: Any) -> Gunicorn:
        return Gunicorn(self.framework, gate, self.url, self.folder)
