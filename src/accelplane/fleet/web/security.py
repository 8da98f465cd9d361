"""Responses with the header fields that protect a page, compressed if the client accepts it."""

import gzip
from collections.abc import Mapping

import msgspec

from accelplane.http.messages import Request, Response, accepts_gzip

HTML = "text/html; charset=utf-8"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
FIELDS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, browsers send `Origin: null` with forms, which sign-in and sign-out reject.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_MIN_COMPRESSED = 1024
KEPT_FIELDS = (
    "accept-encoding", "cookie", "host", "if-none-match", "last-event-id", "origin",
    "x-remote-group", "x-remote-user",
)  # fmt: skip
"""The header fields that the pages use, for `HttpServer`."""


def page_response(status: int, text: str) -> Response:
    """An HTML page."""
    return Response(status, text.encode("utf-8", "replace"), HTML, FIELDS)


def redirect(target: str, fields: Mapping[str, str] | None = None) -> Response:
    """Leads a browser to a relative address with GET."""
    return Response(303, b"", "text/plain; charset=utf-8", {**FIELDS, "Location": target, **(fields or {})})


def compressed(response: Response, request: Request) -> Response:
    """The response, compressed if that is worth it and accepted."""
    if len(response.body) < _MIN_COMPRESSED or response.stream is not None or not accepts_gzip(request):
        return response
    fields = {**response.fields, "Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return msgspec.structs.replace(response, body=gzip.compress(response.body, 1, mtime=0), fields=fields)
