"""Messages for options that do not have the expected form: the path of the option, the found and the expected value.

msgspec's own messages use the words of its schemas and have the path at the end:
"Expected `int`, got `str` - at `$.plugins[0].count`".
"""

import re

import msgspec

_PATH = re.compile(r"(.*) - at `\$(.*)`", re.DOTALL)
_TYPE = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_RANGE = re.compile(r"Expected `([^`]+)` (.+)", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "an integer",
    "null": "nothing",
    "object": "a mapping",
    "str": "a string",
}


def option_message(source: str, error: Exception, options: type[msgspec.Struct] | None = None) -> str:
    """Returns the message of an error with `source`, the path of the mapping that was decoded.

    `options` is its type: for an unknown name at the top of the mapping the message lists the known ones.
    """
    text, path = str(error), ""
    if isinstance(error, msgspec.ValidationError) and (match := _PATH.fullmatch(text)):
        text, path = match[1], match[2].removeprefix(".")
    separator = "." if source and path and path[0] != "[" and not source.endswith((" ", "-")) else ""
    where = f"{source}{separator}{path}".rstrip(": ")
    problem = _problem(text, None if path else options)
    return f"{where}: {problem}" if where else problem


def _problem(text: str, options: type[msgspec.Struct] | None) -> str:
    if match := _TYPE.fullmatch(text):
        return f"found {_describe(match[2])}, expected {_describe(match[1])}"
    if match := _UNKNOWN.fullmatch(text):
        known = ", ".join(field.encode_name for field in msgspec.structs.fields(options)) if options else ""
        return f"found the unknown option {match[1][:80]!a}" + (f", expected one of {known}" if known else "")
    if match := _RANGE.fullmatch(text):
        return f"expected {_describe(match[1])} {match[2]}"
    return text


def _describe(types: str) -> str:
    """Returns words for the types of a message, which are separated by |."""
    return " or ".join(_WORDS.get(name, name) for name in types.split(" | "))
