"""HTTP/1.1 servers for untrusted clients, with or without TLS."""

from accelplane.http.connection import Handler, PendingResponse
from accelplane.http.messages import PAGE_LIMITS, HttpError, HttpLimits, Request, Response
from accelplane.http.server import HttpServer, split_address

__all__ = [
    "PAGE_LIMITS",
    "Handler",
    "HttpError",
    "HttpLimits",
    "HttpServer",
    "PendingResponse",
    "Request",
    "Response",
    "split_address",
]
