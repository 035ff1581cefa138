"""Real WSGI servers on loopback: waitress in a thread of this process, gunicorn in processes of its own."""

from __future__ import annotations

import logging
import threading
from typing import Any

import waitress
from servers_asgi import Wire
from waitress import wasyncore


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
        self.server.trigger.pull_trigger(lambda: wasyncore.close_all(self.server._map))  # its loop ends with its last socket
        self.thread.join(10)
        assert not self.thread.is_alive()
