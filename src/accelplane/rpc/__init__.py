"""gRPC on Unix sockets for the node's processes: HTTP/2 and gRPC's framing in one thread, without periodic work.

Supports the calls of a node: one request per call, one response or a stream of them; neither compression nor metadata.
Specifications: RFC 9113, RFC 7541 and gRPC's "gRPC over HTTP2". Modules, from the bottom: `errors`, `frames`,
`headers`, `messages` and `flood_limit` are values and rules; `stream`, `outbox` and `connection` are shared by client
and server; `methods`, `call` and `server` are the server, `channel` is the client.
"""

from accelplane.rpc.channel import Channel
from accelplane.rpc.errors import RpcError
from accelplane.rpc.messages import MAX_MESSAGE
from accelplane.rpc.methods import Method, Request, Response, streaming, unary
from accelplane.rpc.server import RpcServer

__all__ = ["MAX_MESSAGE", "Channel", "Method", "Request", "Response", "RpcError", "RpcServer", "streaming", "unary"]
