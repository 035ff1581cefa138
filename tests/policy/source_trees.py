"""The plain Python value of a parsed policy, as JSON would hold it."""

from __future__ import annotations

from limitkeeper.policy.reading.nodes import ListNode, MappingNode, Node, Scalar


def to_python(node: Node) -> object:
    if isinstance(node, MappingNode):
        return {key: to_python(item) for key, (_, item) in node.entries.items()}
    if isinstance(node, ListNode):
        return [to_python(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.value
