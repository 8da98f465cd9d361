"""Characters that control a terminal or the order of text, escaped in output with text of others.

These are the control characters of ISO 646 and ISO 6429 (C0, DEL, C1), the line and paragraph separators, and the
bidirectional formatting characters of Unicode (UAX 9), which display a text in another order than it has.
"""

from collections.abc import Mapping

_LINES = {9: "\\t", 10: "\\n", 13: "\\r"}
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_FORMATS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_TEXT: Mapping[int, str] = (
    {code: f"\\x{code:02x}" for code in _CONTROLS} | {code: f"\\u{code:04x}" for code in _FORMATS} | _LINES
)
_TEXT_WITH_LINES: Mapping[int, str] = {code: escape for code, escape in _TEXT.items() if code not in _LINES}
# A serializer escapes those below 0x20 in strings itself, and may write them between values.
_JSON: Mapping[int, str] = {code: f"\\u{code:04x}" for code in (*_CONTROLS, *_FORMATS) if code >= 0x20}


def escape_text(text: str, *, keep_lines: bool = False) -> str:
    """The text in one line, or in its lines with `keep_lines`, with escape sequences as in Python."""
    return text.translate(_TEXT_WITH_LINES if keep_lines else _TEXT)


def escape_json(document: str) -> str:
    """The same JSON document with escape sequences in its strings."""
    return document.translate(_JSON)
