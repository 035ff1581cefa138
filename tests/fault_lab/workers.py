"""The worker processes of a soak and their reports: started, begun, stopped, killed, and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from servers.faketime import Skew

from .modes import Mode
from .traffic import COUNTED, Tally

TESTS = Path(__file__).resolve().parents[1]


class Worker:
    """A process that makes traffic in one mode. `skew` is its clock's offset, `log` its log file."""

    def __init__(self, mode: Mode, places: dict[str, Any], skew: Skew | None, log: Any = None, pause: float = 0.06) -> None:
        self.mode, self.places, self.skew, self.log, self.pause = mode, places, skew, log, pause
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "fault_lab.worker", self.mode.name, json.dumps(self.places), str(self.pause)]
        paths = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, **(self.skew.env if self.skew is not None else {}), "PYTHONPATH": paths}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log or None}
        self.process = subprocess.Popen(command, **pipes, env=env, text=True)
        self.said: dict[str, Any] = {}
        self.heard = threading.Condition()
        self.listening = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
        self.listening.start()
        if not self.wait_for("ready", "", 90):
            raise RuntimeError(f"a worker in mode {self.mode.name} did not start")

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self.heard:
                self.said = json.loads(line)
                self.heard.notify_all()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it was killed, and its pipe is closed; its last report is known

    def wait_for(self, kind: str, name: str, seconds: float) -> bool:
        """Whether it reported this within so many seconds; a dead one reports nothing more."""
        with self.heard:
            return self.heard.wait_for(lambda: (self.said.get("kind"), self.said.get("round")) == (kind, name), seconds)

    def tally(self, name: str) -> Tally:
        """Its last report of a round; empty when there was none."""
        with self.heard:
            said = dict(self.said)
        if said.pop("round", None) != name:
            return Tally()
        said.pop("kind")
        for field in COUNTED:
            said[field] = Counter({int(name) if field.endswith("_at") else name: count for name, count in said[field].items()})
        return Tally(**said)

    def kill(self) -> None:
        """kill -9, in the middle of whatever it does."""
        self.process.kill()
        self.process.wait()
        self.listening.join(5)
        self.close()

    def close(self) -> bool:
        """Lets it end; False when it had to be killed because it did not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        try:
            self.process.wait(40)
            return True
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return False
        finally:
            self.listening.join(5)
            self.process.stdout.close()
