"""Channels to services on Unix sockets beside the plugin, which may come later, go, and come back."""

from urllib.parse import quote

import grpc.aio

# A socket that nobody listens on refuses at once; trying costs little, but nobody pays for it at idle.
_OPTIONS = (
    ("grpc.default_authority", "localhost"),
    ("grpc.initial_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 30_000),
    ("grpc.max_receive_message_length", 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


def open_channel(socket: str) -> grpc.aio.Channel:
    """A channel to the service that listens on `socket`; it connects when it is first used."""
    return grpc.aio.insecure_channel(f"unix:{quote(socket)}", options=_OPTIONS)


def explained(error: grpc.aio.AioRpcError) -> str:
    """What went wrong, as `unavailable: …`, in one short line."""
    code = error.code().name.lower().replace("_", " ")
    details = " ".join((error.details() or "").split())[:300]
    return f"{code}: {details}" if details else code
