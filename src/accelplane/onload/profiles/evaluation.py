"""Evaluates the commands of profiles to settings, without a shell.

    Evaluation(search, strict=…)    the settings of one ConfigMap
        .run(name, fragments=…)     evaluates a profile and its imports
        .settings                   the values, the last one of each key
        .notes                      output of the profiles, and skipped commands

As in Onload itself, a setting is a variable for the lines that follow. A variable that the profile does not set is not
taken from the environment: the result does not depend on who converts the profile. A command that cannot be evaluated
is skipped with a note if its end is certain and it cannot affect other commands. Otherwise, and with `strict`, it is an
error.
"""

import re
from collections.abc import Iterator, Sequence

from accelplane.onload.profiles import files
from accelplane.onload.profiles.arithmetic import ArithmeticProblem, evaluate
from accelplane.onload.profiles.configmap import key_error
from accelplane.onload.profiles.errors import ProfileError
from accelplane.onload.profiles.lexer import Arithmetic, Command, Literal, Part, Word, commands

MAX_DEPTH = 16
MAX_IMPORTS = 64
MAX_VALUE = 32 * 1024
# Characters of all expanded variables: commands of a few characters can multiply them.
MAX_EXPANDED = 8 << 20
_MAX_NOTES = 100

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?)=")
_GLOB = re.compile(r"[*?\[\\]")
# Commands that print, or do nothing.
_SILENT = frozenset(("vlog", "rawecho", "prefix", "echo", "printf", ":", "true"))
# Commands that can change how the following ones are read or executed.
_CONTROL = frozenset(
    {
        *(".", "alias", "break", "builtin", "cd", "command", "continue", "declare", "enable", "eval", "exec", "exit"),
        *("getopts", "let", "local", "mapfile", "popd", "pushd", "read", "readarray", "readonly", "return", "set"),
        *("shift", "shopt", "source", "trap", "typeset", "unalias", "unset"),
    }
)


class _Unsupported(Exception):
    """A command cannot be evaluated."""

    def __init__(self, text: str, *, fatal: bool = False) -> None:
        super().__init__(text)
        self.fatal = fatal


class Evaluation:
    """The settings of one ConfigMap."""

    def __init__(self, search: files.Search, *, strict: bool) -> None:
        self.settings: dict[str, str] = {}
        self.notes: list[str] = []
        self._search = search
        self._strict = strict
        self._variables: dict[str, str] = {"HOME": search.home}
        self._imports = 0
        self._expanded = 0

    def run(self, name: str, *, fragments: bool, depth: int = 0) -> None:
        """Evaluates a profile. Raises `ProfileError`."""
        path = self._search.find(name, fragments=fragments)
        for command in commands(files.read(path)):
            where = f"{path}: line {command.line}"
            try:
                self._execute(command, where, depth)
            except _Unsupported as error:
                if error.fatal or self._strict:
                    raise ProfileError(f"{where}: {error}; use --exec to run the profile with bash") from None
                self._forget(command)
                self._note(f"{where}: {error}; the command is skipped")

    def _note(self, text: str) -> None:
        if len(self.notes) < _MAX_NOTES:
            self.notes.append(text)

    def _execute(self, command: Command, where: str, depth: int) -> None:
        if command.problem:
            raise _Unsupported(command.problem.text, fatal=command.problem.fatal)
        assigned = [_assigned_name(word) for word in command.words]
        if command.words and all(assigned):
            for name, word in zip(assigned, command.words, strict=True):
                self._variables[name] = self._text(_value_of(word))
            return
        if any(assigned[:1]):
            raise _Unsupported("variables for one command are not supported")
        words = [field for word in command.words for field in self._fields(word)]
        if not words:
            return
        match words[0]:
            case "onload_set":
                self._set(words[1:])
            case "onload_import":
                self._import(words[1:], where, depth)
            case "export":
                self._export(command.words[1:])
            case "fail":
                raise ProfileError(f"{where}: the profile fails: {' '.join(words[1:])}")
            case "log" | "err":
                self._note(f"{where}: {' '.join(words[1:])}")
            case name if name in _SILENT:
                return
            case name:
                raise _Unsupported(f"the command {name[:80]!a} is not supported", fatal=name in _CONTROL)

    def _set(self, words: Sequence[str]) -> None:
        """`onload_set KEY VALUE` or `onload_set KEY=VALUE`. Further words are ignored."""
        key, value = words[0] if words else "", words[1] if len(words) > 1 else ""
        if not value and "=" in key:
            key, _, value = key.partition("=")
        elif len(words) < 2:
            raise _Unsupported("onload_set has no value, expected KEY VALUE or KEY=VALUE")
        if error := key_error(key):
            raise _Unsupported(error)
        self.settings[key] = self._variables[key] = value

    def _import(self, words: Sequence[str], where: str, depth: int) -> None:
        if not words or not words[0]:
            raise _Unsupported("onload_import has no name, expected the name of a profile")
        self._imports += 1
        if depth >= MAX_DEPTH or self._imports > MAX_IMPORTS:
            raise ProfileError(
                f"{where}: found more than {MAX_DEPTH} nested or {MAX_IMPORTS} imports; check whether a profile "
                "imports itself"
            )
        self.run(words[0], fragments=True, depth=depth + 1)

    def _export(self, words: Sequence[Word]) -> None:
        for word in words:
            if name := _assigned_name(word):
                self._variables[name] = self._text(_value_of(word))
            elif not all(isinstance(part, Literal) for part in word) or self._text(word).startswith("-"):
                raise _Unsupported("export of anything but NAME and NAME=VALUE is not supported")

    def _forget(self, command: Command) -> None:
        """The values of variables that a skipped command may set are unknown."""
        previous = ""
        for word in command.words:
            text = "".join(part.text if isinstance(part, Literal) else "" for part in word)
            if found := _ASSIGNMENT.match(text):
                self._variables.pop(found[1], None)
            elif previous in ("onload_set", "read", "export"):
                self._variables.pop(text, None)
            previous = text

    # Expansion

    def _fields(self, word: Word) -> Iterator[str]:
        """The words that a word expands to. Values without quotes are split at white space."""
        current: str | None = None
        for part in word:
            text = self._value(part)
            if isinstance(part, Literal) or part.quoted:
                current = (current or "") + text
                continue
            if _GLOB.search(text):
                raise _Unsupported("a variable with *, ?, [ or \\ without quotes is not supported")
            pieces = re.split("[ \t\n]+", text)
            for place, piece in enumerate(pieces):
                if place and current is not None:
                    yield _limited(current)
                    current = None
                if piece:
                    current = (current or "") + piece
        if current is not None:
            yield _limited(current)

    def _text(self, word: Word) -> str:
        """The value of an assignment, which is not split."""
        return _limited("".join(self._value(part) for part in word))

    def _value(self, part: Part) -> str:
        if isinstance(part, Literal):
            return part.text
        if isinstance(part, Arithmetic):
            expression = _limited("".join(self._value(each) for each in part.parts))
            try:
                return str(evaluate(expression, self._variables))
            except ArithmeticProblem as problem:
                raise _Unsupported(str(problem)) from None
        value = self._variables.get(part.name)
        if value is None:
            raise _Unsupported(f"the value of ${part.name} is not known, expected that the profile sets it before")
        self._expanded += len(value)
        if self._expanded > MAX_EXPANDED:
            raise _Unsupported(f"variables expand to more than {MAX_EXPANDED} characters", fatal=True)
        return value


def _limited(text: str) -> str:
    if len(text) > MAX_VALUE:
        raise _Unsupported(f"a value has {len(text)} characters, expected at most {MAX_VALUE}", fatal=True)
    return text


def _assigned_name(word: Word) -> str:
    """The name of the variable that a word assigns to, or an empty string."""
    first = word[0] if word else None
    found = _ASSIGNMENT.match(first.text) if isinstance(first, Literal) and not first.quoted else None
    if found and found[2]:
        raise _Unsupported("+= is not supported")
    return found[1] if found else ""


def _value_of(word: Word) -> Word:
    """What an assignment assigns."""
    first = word[0]
    if not isinstance(first, Literal):
        raise TypeError(f"found {first!a}, expected an assignment")
    return (Literal(first.text.partition("=")[2], quoted=False), *word[1:])
