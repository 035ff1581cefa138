"""What a server has to know about a gate's current policy: whether it limits single messages, and whether requests may wait."""

from __future__ import annotations

from ..policy.gate import Gate
from ..policy.model import WAIT, Policy

#: The method of one message of a websocket or stream.
MESSAGE = "MESSAGE"


class PolicyFlags:
    """A gate and the flags of its policy, computed again after a reload."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._policy: Policy | None = None
        self._limits_messages = self._waits = False

    def _update(self) -> None:
        policy = self.gate.policy
        if policy is not self._policy:
            self._limits_messages = any(MESSAGE in match.methods for rule in policy.rules for match in rule.match)
            self._waits = any(rule.on_refusal.action == WAIT for rule in policy.rules)
            self._policy = policy

    @property
    def limits_messages(self) -> bool:
        """Whether any rule applies to single messages; otherwise streams are not touched."""
        self._update()
        return self._limits_messages

    @property
    def waits(self) -> bool:
        """Whether any rule lets requests wait."""
        self._update()
        return self._waits
