"""Changes rules in the text of a policy file; comments and layout stay. The caller checks the result by parsing it again."""

from __future__ import annotations

from ..errors import ConfigurationError
from ..policy.reading.nodes import ListNode, MappingNode, Scalar
from ..policy.reading.yaml import parse_yaml

#: The name of a rule's next version, which runs in shadow beside it.
NEXT = "-next"


def rule_nodes(text: str) -> dict[str, MappingNode]:
    tree, _ = parse_yaml(text)
    limits = tree.child("limits")
    items = limits.items if isinstance(limits, ListNode) else []
    found = {item.child("name").text: item for item in items if isinstance(item, MappingNode)}
    if len({item.position.line for item in found.values()}) < len(found):
        raise ConfigurationError("the rules share a line; write limits as a list with a line per rule, so that it can be changed")
    return found


def span_of(text: str, name: str) -> tuple[int, int]:
    """The lines of a rule, counted from 0, without blank lines and comments before the next one."""
    lines, nodes = text.splitlines(), rule_nodes(text)
    start = nodes[name].position.line - 1
    indent = len(lines[start]) - len(lines[start].lstrip())
    end = start + 1
    while end < len(lines):
        line = lines[end]
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        end += 1
    while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
        end -= 1
    return start, end


def replace_scalar(text: str, name: str, field: str, value: str) -> str:
    """Replaces a field's text. ConfigurationError where it is no single text (a list, or limits by tier)."""
    node = rule_nodes(text)[name].child(field)
    if not isinstance(node, Scalar):
        raise ConfigurationError(f"{field} of rule {name!r} is {node.noun}; change it by hand")
    lines = text.splitlines(keepends=True)
    at = node.position
    line = lines[at.line - 1]
    lines[at.line - 1] = line[: at.column - 1] + value + line[at.column - 1 + at.length :]
    return "".join(lines)


def set_field(text: str, name: str, field: str, value: str) -> str:
    """Replaces a field, or adds it behind the rule's name."""
    node = rule_nodes(text)[name]
    if field in node.entries:
        return replace_scalar(text, name, field, value)
    lines = text.splitlines(keepends=True)
    at = node.child("name").position
    line, end = lines[at.line - 1], at.column - 1 + at.length
    flow = line[: at.column].rstrip().find("{") >= 0
    indent = " " * (node.key_position("name").column - 1)
    lines[at.line - 1] = f"{line[:end]}, {field}: {value}{line[end:]}" if flow else f"{line}{indent}{field}: {value}\n"
    return "".join(lines)


def remove_rule(text: str, name: str) -> str:
    start, end = span_of(text, name)
    lines = text.splitlines(keepends=True)
    return "".join(lines[:start] + lines[end:])


def add_next(text: str, name: str, limit: str) -> str:
    """Adds a copy of a rule with another limit, in shadow, behind it; an older copy is replaced."""
    text = remove_rule(text, name + NEXT) if name + NEXT in rule_nodes(text) else text
    text = text if text.endswith("\n") else text + "\n"
    start, end = span_of(text, name)
    lines = text.splitlines(keepends=True)
    # The copy is changed as the only rule of a file, where its name is unambiguous.
    alone = "limits:\n" + "".join(lines[start:end])
    alone = replace_scalar(alone, name, "limit", limit)
    alone = set_field(alone, name, "on_refusal", "shadow")
    alone = replace_scalar(alone, name, "name", name + NEXT)
    return "".join([*lines[:end], alone.removeprefix("limits:\n"), *lines[end:]])
