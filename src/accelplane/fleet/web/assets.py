"""Style sheet and script, under names with a hash of their content."""

import gzip
import hashlib
from collections.abc import Mapping
from importlib import resources

from accelplane.http.messages import Response

from .page import Assets

_TYPES = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
_FIELDS = {"X-Content-Type-Options": "nosniff", "Cache-Control": "public, max-age=31536000, immutable"}


class AssetFiles:
    """The files of the package `assets`."""

    def __init__(self) -> None:
        self._responses: dict[str, tuple[Response, Response]] = {}
        self.links = Assets(self._add("fleet", "css"), self._add("fleet", "js"))

    def response(self, path: str, *, compressed: bool) -> Response | None:
        """The file of a path such as `/assets/fleet.0123456789abcdef.js`; None if there is none."""
        found = self._responses.get(path)
        return found[compressed] if found is not None else None

    def _add(self, name: str, kind: str) -> str:
        content = resources.files("accelplane.fleet.web").joinpath("assets", f"{name}.{kind}").read_bytes()
        path = f"assets/{name}.{hashlib.sha256(content).hexdigest()[:16]}.{kind}"
        plain = Response(200, content, _TYPES[kind], _FIELDS)
        packed = gzip.compress(content, 9, mtime=0)
        fields: Mapping[str, str] = {**_FIELDS, "Content-Encoding": "gzip"}
        self._responses[f"/{path}"] = plain, Response(200, packed, _TYPES[kind], fields)
        return path
