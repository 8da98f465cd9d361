"""Sharing of equal strings between objects in caches."""


class StringPool:
    """Returns one object for equal strings, as `sys.intern`, but forgets strings that are not seen again.

    Strings that `sys.intern` was given stay in memory until the process ends (Python 3.12). The pool has at most
    2 * `limit` strings; a string that it forgets is only not shared any more.
    """

    def __init__(self, limit: int = 10_000) -> None:
        self._limit = limit
        self._recent: dict[str, str] = {}
        self._older: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._recent.keys() | self._older.keys())

    def __call__(self, text: str) -> str:
        """Returns the shared object that equals `text`."""
        known = self._recent.get(text)
        if known is not None:
            return known
        known = self._older.get(text, text)
        if len(self._recent) >= self._limit:
            self._older, self._recent = self._recent, {}
        self._recent[known] = known
        return known
