"""Settings as the YAML document of a ConfigMap.

document(name, settings)    the text, in the form of the shell script that this replaces
object_name(path)           the name of the ConfigMap of a profile
key_error(key)              why a ConfigMap cannot have a key
"""

import re
from collections.abc import Mapping

from accelplane.onload.profiles.errors import ProfileError

_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_MAX_NAME = 253
# A ConfigMap has at most 1 MiB.
_MAX_DATA = 1 << 20
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ASCII_END = 0x7F


def document(name: str, settings: Mapping[str, str]) -> str:
    """A YAML document, without the separator. Raises `ProfileError` if the ConfigMap would be too large."""
    size = sum(len(key) + len(value.encode()) for key, value in settings.items())
    if size > _MAX_DATA:
        raise ProfileError(f"ConfigMap {name}: found {size} bytes of settings, expected at most {_MAX_DATA}")
    lines = [
        "apiVersion: v1",
        "kind: ConfigMap",
        "metadata:",
        f"  name: {name}",
        "  labels:",
        "    app.kubernetes.io/part-of: onload",
        "data:" if settings else "data: {}",
        *(f"  {_scalar(key)}: {_quoted(value)}" for key, value in settings.items()),
    ]
    return "\n".join(lines) + "\n"


def object_name(path: str) -> str:
    """`onload-NAME-profile` with the base name of the profile, in characters that Kubernetes admits."""
    base = path.rstrip("/").rpartition("/")[2].removesuffix(".opf")
    usable = re.sub(r"[^a-z0-9.]+", "-", base.lower())
    # Each part between dots begins and ends with a letter or a digit.
    parts = (part.strip("-") for part in usable.split("."))
    usable = ".".join(part for part in parts if part)
    if not usable:
        raise ProfileError(f"profile {path!a}: found no letter or digit in its name; rename the file")
    name = f"onload-{usable}-profile"
    if len(name) > _MAX_NAME:
        raise ProfileError(f"profile {path!a}: the name is too long for a ConfigMap; rename the file")
    return name


def key_error(key: str) -> str:
    """Empty if a ConfigMap can have the key."""
    if _KEY.fullmatch(key) and key not in (".", "..") and not key.startswith(".."):
        return ""
    return f"the key is {key[:80]!a}, expected at most 253 characters of A-Z, a-z, 0-9, -, _ and ."


def _scalar(key: str) -> str:
    """A key that YAML reads as a string. Names of variables are such keys, except words such as `yes` and `null`."""
    plain = re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*", key)
    return key if plain else _quoted(key)


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if " " <= character < chr(_ASCII_END):
        return character
    code = ord(character)
    return f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
