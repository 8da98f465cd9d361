"""Evaluates the CEL of device selectors: comparisons, logic, attributes and the functions of quantities that we use.

The API server compiles the shipped expressions in cluster tests; this evaluates them in unit tests. A missing
key is an error, and `&&` and `||` ignore an error if the other operand decides, as CEL specifies.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from accelplane.kube import quantities

_OPERATORS = {"&&": " and ", "||": " or ", "true": "True", "false": "False"}
_TOKENS = re.compile(r'"[^"]*"|&&|\|\||!(?!=)|\b(?:true|false)\b')
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: lambda left, right: left == right,
    ast.NotEq: lambda left, right: left != right,
    ast.Lt: lambda left, right: left < right,
    ast.LtE: lambda left, right: left <= right,
    ast.Gt: lambda left, right: left > right,
    ast.GtE: lambda left, right: left >= right,
    ast.In: lambda left, right: left in right,
}


class Domains(dict[str, Mapping[str, object]]):
    """Attributes or capacities by domain. An unknown domain is empty."""

    def __missing__(self, _domain: str) -> Mapping[str, object]:
        return {}


def device(
    driver: str, attributes: Mapping[str, object], capacities: Mapping[str, int] | None = None
) -> Mapping[str, Any]:
    """The variable `device` of a selector. Names without a domain are those of the driver."""
    return {
        "driver": driver,
        "attributes": _by_domain(driver, attributes),
        "capacity": _by_domain(driver, capacities or {}),
    }


def _by_domain(driver: str, values: Mapping[str, object]) -> Domains:
    found: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        domain, _, identifier = name.rpartition("/")
        found.setdefault(domain or driver, {})[identifier] = value
    return Domains(found)


def matches(expression: str, device: Mapping[str, Any]) -> bool:
    """Whether a device matches. Raises `KeyError` for a missing key, and `TypeError` if the result is no bool."""
    python = _TOKENS.sub(lambda token: " not " if token[0] == "!" else _OPERATORS.get(token[0], token[0]), expression)
    result = _value(ast.parse(" ".join(python.split()), mode="eval").body, {"device": device})
    if not isinstance(result, bool):
        raise TypeError(f"{expression}: found {result!r}, expected a bool")
    return result


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return names[name]
        case ast.Attribute(value=owner, attr=name):
            return _value(owner, names)[name]
        case ast.Subscript(value=owner, slice=key):
            return _value(owner, names)[_value(key, names)]
        case ast.List(elts=items):
            return [_value(each, names) for each in items]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names)
        case ast.BoolOp(op=operator, values=operands):
            return _decided(operands, names, by=isinstance(operator, ast.Or))
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            return _COMPARISONS[type(operator)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Attribute(value=owner, attr="compareTo"), args=[other]):
            left, right = _value(owner, names), _value(other, names)
            return (left > right) - (left < right)
        case ast.Call(func=ast.Name(id="quantity"), args=[ast.Constant(value=str(text))]):
            return quantities.parse(text)
        case _:
            raise NotImplementedError(ast.unparse(node))


def _decided(operands: list[ast.expr], names: Mapping[str, Any], *, by: bool) -> bool:
    """The result of `&&` (decided by False) or `||` (by True)."""
    error: KeyError | None = None
    for each in operands:
        try:
            if _value(each, names) is by:
                return by
        except KeyError as found:
            error = found
    if error is not None:
        raise error
    return not by
