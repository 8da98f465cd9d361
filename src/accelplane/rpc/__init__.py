"""gRPC on Unix sockets for the node's processes: HTTP/2 and gRPC's framing in one thread, with nothing periodic.

What a node needs, no more: one request a call, one response or a stream of them, no compression, no metadata. Facts:
RFC 9113, RFC 7541 and gRPC's "gRPC over HTTP2". Modules, from the bottom: `errors`, `frames`, `headers`, `messages`
and `patience` are values and rules; `stream`, `outbox` and `connection` what both ends share; `methods`, `call` and
`server` one end, `channel` the other.
"""

from accelplane.rpc.channel import Channel
from accelplane.rpc.errors import RpcError
from accelplane.rpc.messages import MAX_MESSAGE
from accelplane.rpc.methods import Method, Request, Response, streaming, unary
from accelplane.rpc.server import RpcServer

__all__ = ["MAX_MESSAGE", "Channel", "Method", "Request", "Response", "RpcError", "RpcServer", "streaming", "unary"]
