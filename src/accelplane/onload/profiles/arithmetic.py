"""The expressions of `$(( ))`: 64-bit integers, the operators of C without assignment, and names of variables.

evaluate(expression, variables)    the value, as bash computes it; raises `ArithmeticProblem`
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

_LONGEST = 4096
# Each level is 14 calls deep here.
_DEEPEST = 24
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|[0-9]+)|([A-Za-z_][A-Za-z0-9_]*)|"
    r"(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&^|!~?:()]))"
)
_INTEGER = re.compile(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|[0-9]+)\s*")
_BITS = 64


class ArithmeticProblem(Exception):
    """The expression has no value, or is not supported."""


class _Token(NamedTuple):
    number: str
    name: str
    symbol: str


def evaluate(expression: str, variables: Mapping[str, str]) -> int:
    """The value of an expression. An empty variable is 0. Raises `ArithmeticProblem`."""
    if len(expression) > _LONGEST:
        raise ArithmeticProblem(f"the expression has {len(expression)} characters, expected at most {_LONGEST}")
    if "++" in expression or "--" in expression:
        raise ArithmeticProblem("++ and -- are not supported in $(( ))")
    tokens: list[_Token] = []
    at, end = 0, len(expression.rstrip())
    while at < end:
        found = _TOKEN.match(expression, at)
        if not found:
            raise ArithmeticProblem(f"{expression[at:].strip()[:20]!a} is not supported in $(( ))")
        tokens.append(_Token(*(text or "" for text in found.groups())))
        at = found.end()
    return _Parser(tokens, variables).value() if tokens else 0


def _wrapped(value: int) -> int:
    """The value in 64 bits with a sign."""
    value &= (1 << _BITS) - 1
    return value - (1 << _BITS) if value >> (_BITS - 1) else value


def _divided(left: int, right: int) -> int:
    """Rounds towards 0."""
    if right == 0:
        raise ArithmeticProblem("division by 0")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _remainder(left: int, right: int) -> int:
    return left - _divided(left, right) * right


def _power(base: int, exponent: int) -> int:
    if exponent < 0:
        raise ArithmeticProblem("exponent below 0")
    return pow(base, exponent, 1 << _BITS)


# As the processor shifts: by the lowest six bits.
def _left_shift(left: int, right: int) -> int:
    return left << (right % _BITS)


def _right_shift(left: int, right: int) -> int:
    return left >> (right % _BITS)


_Operator = Callable[[int, int], int]
# The operators with two operands, from the lowest precedence, except && || ?: and **.
_LEVELS: tuple[Mapping[str, _Operator], ...] = (
    {"|": int.__or__},
    {"^": int.__xor__},
    {"&": int.__and__},
    {"==": operator.eq, "!=": operator.ne},
    {"<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge},
    {"<<": _left_shift, ">>": _right_shift},
    {"+": operator.add, "-": operator.sub},
    {"*": operator.mul, "/": _divided, "%": _remainder},
)
_UNARY: Mapping[str, Callable[[int], int]] = {
    "+": operator.pos, "-": operator.neg, "!": operator.not_, "~": operator.invert,
}  # fmt: skip


class _Parser:
    """A recursive descent. `live` is false in operands whose value is not used: they cause no errors in bash either."""

    def __init__(self, tokens: list[_Token], variables: Mapping[str, str]) -> None:
        self._tokens = tokens
        self._variables = variables
        self._at = 0
        self._depth = 0

    def value(self) -> int:
        found = self._conditional(live=True)
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            raise ArithmeticProblem(f"{''.join(token)!a} is not expected in $(( ))")
        return found

    def _takes(self, symbols: Mapping[str, object] | tuple[str, ...]) -> str:
        """Consumes the next symbol if it is one of these, and returns it."""
        if self._at < len(self._tokens) and self._tokens[self._at].symbol in symbols:
            self._at += 1
            return self._tokens[self._at - 1].symbol
        return ""

    def _conditional(self, *, live: bool) -> int:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ArithmeticProblem(f"more than {_DEEPEST} nested operations in $(( ))")
        condition = self._or(live=live)
        if self._takes(("?",)):
            first = self._conditional(live=live and bool(condition))
            if not self._takes((":",)):
                raise ArithmeticProblem("? without : in $(( ))")
            second = self._conditional(live=live and not condition)
            condition = first if condition else second
        self._depth -= 1
        return condition

    def _or(self, *, live: bool) -> int:
        left = self._and(live=live)
        while self._takes(("||",)):
            right = self._and(live=live and not left)
            left = int(bool(left or right))
        return left

    def _and(self, *, live: bool) -> int:
        left = self._binary(0, live=live)
        while self._takes(("&&",)):
            right = self._binary(0, live=live and bool(left))
            left = int(bool(left and right))
        return left

    def _binary(self, level: int, *, live: bool) -> int:
        if level == len(_LEVELS):
            return self._exponentiation(live=live)
        left = self._binary(level + 1, live=live)
        while symbol := self._takes(_LEVELS[level]):
            right = self._binary(level + 1, live=live)
            left = _wrapped(int(_LEVELS[level][symbol](left, right))) if live else 0
        return left

    def _exponentiation(self, *, live: bool) -> int:
        base = self._unary(live=live)
        if not self._takes(("**",)):
            return base
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ArithmeticProblem(f"more than {_DEEPEST} nested operations in $(( ))")
        exponent = self._exponentiation(live=live)
        self._depth -= 1
        return _wrapped(_power(base, exponent)) if live else 0

    def _unary(self, *, live: bool) -> int:
        signs: list[str] = []
        while symbol := self._takes(_UNARY):
            signs.append(symbol)
        value = self._operand(live=live)
        for symbol in reversed(signs):
            value = _wrapped(int(_UNARY[symbol](value)))
        return value

    def _operand(self, *, live: bool) -> int:
        if self._takes(("(",)):
            value = self._conditional(live=live)
            if not self._takes((")",)):
                raise ArithmeticProblem("( without ) in $(( ))")
            return value
        if self._at >= len(self._tokens) or self._tokens[self._at].symbol:
            raise ArithmeticProblem("an operand is missing in $(( ))")
        token = self._tokens[self._at]
        self._at += 1
        return _number(token.number) if token.number else self._variable(token.name, live=live)

    def _variable(self, name: str, *, live: bool) -> int:
        text = self._variables.get(name)
        if text is None:
            raise ArithmeticProblem(f"{name} is not set before")
        if not text.strip() or not live:
            return 0
        found = _INTEGER.fullmatch(text)
        if not found:
            raise ArithmeticProblem(f"{name} is {text[:40]!a}, expected an integer in $(( ))")
        return _wrapped(-_number(found[2])) if found[1] == "-" else _number(found[2])


def _number(text: str) -> int:
    """A decimal, hexadecimal or octal constant."""
    try:
        if text[:2] in ("0x", "0X"):
            return _wrapped(int(text, 16))
        return _wrapped(int(text, 8 if text.startswith("0") else 10))
    except ValueError:
        raise ArithmeticProblem(f"{text[:40]!a} is no octal number in $(( ))") from None
