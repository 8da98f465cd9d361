"""HTTP/1.1 servers for untrusted clients, with or without TLS."""

from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.http.server import Handler, HttpServer, PendingResponse

__all__ = ["Handler", "HttpError", "HttpLimits", "HttpServer", "PendingResponse", "Request", "Response"]
