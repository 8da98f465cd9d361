"""Splits the text of a profile into commands, by the rules of bash for quotes, comments and line ends.

    commands(text)    the commands, in order

A command that is outside the supported part of the language has a `problem`. A problem is `fatal` if the text that it
concerns may not end with the command, as with `if`, or if the command may change what follows: such a command cannot be
skipped. Supported are words, comments, quotes, backslashes, `;`, `$NAME`, `${NAME}` and `$(( ))`.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BRACED = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_PLAIN = re.compile(r"[^\s\\'\"$`;&|<>()*?\[\]{}~#!]+")
_BLANKS = " \t"
_GLOB = "*?["
_MAX_NESTED = 8
# Reserved words, which are recognized where a command begins.
_RESERVED = frozenset(
    {
        *("if", "then", "else", "elif", "fi", "case", "esac", "for", "select", "while", "until", "do", "done"),
        *("function", "time", "coproc", "{", "}", "!", "[["),
    }
)


class Literal(NamedTuple):
    text: str
    quoted: bool


class Variable(NamedTuple):
    name: str
    quoted: bool


class Arithmetic(NamedTuple):
    """`$((…))`. The parts are literals and variables, which are substituted before the expression is evaluated."""

    parts: "tuple[Literal | Variable | Arithmetic, ...]"
    quoted: bool


Part: TypeAlias = Literal | Variable | Arithmetic
Word: TypeAlias = tuple[Part, ...]


class Problem(NamedTuple):
    text: str
    fatal: bool = False


class Command(NamedTuple):
    """`line` is the number of its first line."""

    line: int
    words: tuple[Word, ...]
    problem: Problem | None


def commands(text: str) -> Iterator[Command]:
    """Yields the commands of a text. A command with a fatal problem is the last one."""
    lexer = _Lexer(text)
    while True:
        command = lexer.command()
        if command is None:
            return
        yield command
        if command.problem and command.problem.fatal:
            return


class _Lexer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._line = 1
        self._nested = 0
        self._problem: Problem | None = None

    def command(self) -> Command | None:
        """The next command, or None at the end of the text."""
        self._skip_line_ends()
        if self._at >= len(self._text):
            return None
        line, self._problem = self._line, None
        words: list[Word] = []
        first = True
        while self._problem is None or not self._problem.fatal:
            self._skip_blanks()
            if self._ends_command():
                break
            if self._operator():
                first = True
                continue
            word = self._word()
            if first and _bare_text(word) in _RESERVED:
                self._found(f"{_bare_text(word)} is not supported", fatal=True)
            words.append(word)
            first = False
        if self._text.startswith(";", self._at):
            if not words or self._text.startswith(";;", self._at):
                self._found("; without a command is not supported", fatal=True)
            self._advance(1)
        return Command(line, tuple(words), self._problem)

    def _found(self, text: str, *, fatal: bool = False) -> None:
        """Records a problem. The first one counts, but a fatal one replaces others."""
        if self._problem is None or (fatal and not self._problem.fatal):
            self._problem = Problem(text, fatal)

    def _advance(self, count: int) -> None:
        self._line += self._text.count("\n", self._at, self._at + count)
        self._at += count

    def _skip_blanks(self) -> None:
        """Skips blanks, continued lines and a comment."""
        text = self._text
        while self._at < len(text):
            if text[self._at] in _BLANKS:
                self._at += 1
            elif text.startswith("\\\n", self._at):
                self._advance(2)
            elif text[self._at] == "#":
                end = text.find("\n", self._at)
                self._at = len(text) if end < 0 else end
            else:
                return

    def _ends_command(self) -> bool:
        return self._at >= len(self._text) or self._text[self._at] in "\n;"

    def _operator(self) -> bool:
        """Skips an operator between words and records it as a problem."""
        text, at = self._text, self._at
        symbol = text[at]
        if symbol in "()":
            self._found(f"{symbol} is not supported", fatal=True)
        elif text.startswith("<<", at):
            self._found("<< is not supported", fatal=True)
        elif symbol in "&|<>":
            length = 2 if text[at : at + 2] in ("&&", "||", ">>", ">&", "<&", ">|", "<>", "&>") else 1
            self._found(f"{text[at : at + length]} is not supported")
            self._advance(length)
            # A command continues on the next line after these.
            if symbol in "&|":
                self._skip_line_ends()
            return True
        else:
            return False
        return True

    def _skip_line_ends(self) -> None:
        self._skip_blanks()
        while self._at < len(self._text) and self._text[self._at] == "\n":
            self._advance(1)
            self._skip_blanks()

    def _word(self) -> Word:
        parts: list[Part] = []
        text = self._text
        while self._at < len(text):
            symbol = text[self._at]
            if symbol in " \t\n;&|<>()":
                break
            if plain := _PLAIN.match(text, self._at):
                parts.append(Literal(plain[0], quoted=False))
                self._at = plain.end()
            elif symbol == "\\":
                if text.startswith("\\\n", self._at):
                    self._advance(2)
                    continue
                parts.append(Literal(text[self._at + 1 : self._at + 2] or "\\", quoted=True))
                self._advance(2)
            elif symbol == "'":
                parts.append(self._single_quoted())
            elif symbol == '"':
                parts += self._double_quoted()
            elif symbol == "$":
                parts.append(self._expansion(quoted=False))
            elif symbol == "`":
                self._found("` is not supported", fatal=True)
                break
            else:
                parts.append(self._special(symbol, first=not parts, last=parts[-1] if parts else None))
            if self._problem and self._problem.fatal:
                break
        return tuple(parts)

    def _special(self, symbol: str, *, first: bool, last: Part | None) -> Part:
        """A character that has a meaning in some places of a word."""
        if symbol in _GLOB:
            self._found(f"{symbol} without quotes is not supported")
        elif symbol == "{" and not (first and self._text[self._at + 1 : self._at + 2] in ("", " ", "\t", "\n")):
            self._found("{ without quotes is not supported")
        elif symbol == "~" and (first or (isinstance(last, Literal) and last.text.endswith(("=", ":")))):
            self._found("~ without quotes is not supported")
        self._advance(1)
        return Literal(symbol, quoted=False)

    def _single_quoted(self) -> Literal:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            self._found("' has no matching '", fatal=True)
            return Literal("", quoted=True)
        found = Literal(self._text[self._at + 1 : end], quoted=True)
        self._advance(end + 1 - self._at)
        return found

    def _double_quoted(self) -> Iterator[Part]:
        yield Literal("", quoted=True)  # "" is a word
        self._advance(1)
        text, begin = self._text, self._at
        while self._at < len(text):
            symbol = text[self._at]
            if symbol not in '"\\$`':
                self._advance(1)
                continue
            yield Literal(text[begin : self._at], quoted=True)
            if symbol == '"':
                self._advance(1)
                return
            if symbol == "`":
                self._found("` is not supported", fatal=True)
                return
            if symbol == "$":
                yield self._expansion(quoted=True)
                if self._problem and self._problem.fatal:
                    return
                begin = self._at
                continue
            escaped = text[self._at + 1 : self._at + 2]
            self._advance(2)
            if escaped and escaped in '$`"\\':
                yield Literal(escaped, quoted=True)
                begin = self._at
            elif escaped == "\n":
                begin = self._at
            else:
                begin = self._at - 2
        self._found('" has no matching "', fatal=True)

    def _expansion(self, *, quoted: bool) -> Part:
        """An expansion, which begins with `$`."""
        text, at = self._text, self._at
        if text.startswith("$((", at) and self._nested < _MAX_NESTED:
            self._nested += 1
            found = self._arithmetic(quoted=quoted)
            self._nested -= 1
            return found
        if text.startswith("$(", at):
            self._found("$( is not supported", fatal=True)
        elif braced := _BRACED.match(text, at + 1):
            self._at = braced.end()
            return Variable(braced[1], quoted)
        elif text.startswith("${", at):
            self._found("${ with anything but a name is not supported", fatal=True)
        elif name := _NAME.match(text, at + 1):
            self._at = name.end()
            return Variable(name[0], quoted)
        elif text[at + 1 : at + 2] in ("'", '"') and not quoted:
            self._found(f"{text[at : at + 2]} is not supported", fatal=True)
        elif text[at + 1 : at + 2] and text[at + 1] in "0123456789@*#?$!-[":
            self._found(f"{text[at : at + 2]} is not supported", fatal=text[at + 1] == "[")
            self._advance(2)
            return Literal("", quoted=True)
        self._advance(1)
        return Literal("$", quoted=True)

    def _arithmetic(self, *, quoted: bool) -> Part:
        text, depth, begin = self._text, 0, self._at + 3
        parts: list[Part] = []
        self._at = begin
        while self._at < len(text):
            symbol = text[self._at]
            if symbol == "$":
                parts.append(Literal(text[begin : self._at], quoted=True))
                parts.append(self._expansion(quoted=True))
                if self._problem and self._problem.fatal:
                    break
                begin = self._at
                continue
            if symbol in "\n'\"\\`;{":
                break
            if symbol == ")" and not depth:
                if not text.startswith("))", self._at):
                    break
                parts.append(Literal(text[begin : self._at], quoted=True))
                self._at += 2
                return Arithmetic(tuple(parts), quoted)
            depth += {"(": 1, ")": -1}.get(symbol, 0)
            self._at += 1
        self._found("$(( without a plain expression and )) on the same line is not supported", fatal=True)
        return Literal("", quoted=True)


def _bare_text(word: Word) -> str:
    """The text of a word without quotes and expansions; otherwise an empty string."""
    texts = [part.text for part in word if isinstance(part, Literal) and not part.quoted]
    return "".join(texts) if len(texts) == len(word) else ""
