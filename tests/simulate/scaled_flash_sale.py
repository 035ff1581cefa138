"""The flash sale of the examples at a twentieth of its size and a third of its time, for `make test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from limitkeeper.policy import Policy
from limitkeeper.simulate import Result, Scenario, Simulation

FOLDER = Path(__file__).parents[2] / "examples" / "flash_sale"
SIZE = 20


def scaled_policy() -> Policy:
    """The policy with a twentieth of the partner's limit; limits of single users stay."""
    fields = yaml.safe_load((FOLDER / "limitkeeper.yaml").read_text())
    fields["limits"][0]["limit"] = "token bucket 10/s burst 20"
    return Policy.of(**fields)


def scale_calls(calls: list[dict[str, Any]], pods: int) -> None:
    """One pod has the pools of `pods` pods, scaled; caps on rates are scaled, too."""
    for call in calls:
        if "bulkhead" in call:
            for name in ("concurrent", "max_waiting"):
                if name in call["bulkhead"]:
                    call["bulkhead"][name] = max(1, call["bulkhead"][name] * pods // SIZE)
        if "cap" in call:
            call["cap"] = f"{int(call['cap'].partition('/')[0]) // SIZE}/s"


def scaled(name: str, **changes: Any) -> Scenario:
    fields = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    fields |= {"duration": "40s", **changes}
    fields["clients"]["public"]["arrivals"] = "25/s"
    fields["clients"]["partner"]["arrivals"] = {"profile": {"0s": "0/s", "10s": "0/s", "30s": f"{19_500 // SIZE}/s"}}
    gateway = fields["gateway"]
    gateway |= {"nodes": 1, "concurrency": 10 * 1000 // SIZE, "queue": 50}
    if "policy" in gateway:
        gateway["policy"] = scaled_policy()
    scale_calls(gateway["calls"], 10)
    for service in fields["services"].values():
        pods = service.get("pods", 1)
        service |= {"pods": 1, "concurrency": max(2, service["concurrency"] * pods // SIZE)}
        scale_calls(service.get("calls", []), pods)
        if "slows" in service:
            slows = service["slows"]
            service["slows"] = {"contention": slows["contention"] * SIZE, "coherency": slows["coherency"] * SIZE**2}
    return Scenario.of(**fields)


def play(name: str, **changes: Any) -> Result:
    return Simulation(scaled(name, **changes)).run()
