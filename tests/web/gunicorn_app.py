"""The suite's app as gunicorn's workers import it: the environment sets the app, its policy and its store."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parent / "django")]

from wsgi_apps import BUILDERS  # noqa: E402

from limitkeeper.policy.gate import Gate  # noqa: E402
from limitkeeper.stores import RedisStore  # noqa: E402


class Written(list[str]):
    """Calls that are written to a file, a line each, so that the test can read every worker's."""

    def append(self, call: str) -> None:
        with open(os.environ["SUITE_CALLS"], "a") as file:
            file.write(call + "\n")


def made() -> Any:
    build, handler = BUILDERS[os.environ["SUITE_APP"]]
    policy = pickle.loads(Path(os.environ["SUITE_POLICY"]).read_bytes())
    return build(
        Gate(policy, store=RedisStore(os.environ["SUITE_STORE"], timeout="60s"), handlers={"cached": handler}), Written()
    )


app = made()
