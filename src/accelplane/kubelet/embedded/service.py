"""Services of grpcio with unary methods."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import Message

Method = Callable[[Any, Any], Awaitable[Message]]


def service(name: str, methods: Mapping[str, tuple[Method, type[Message]]]) -> grpc.GenericRpcHandler:
    """The service of that name. Each method has a function of the request and its context, and the request's type."""
    return grpc.method_handlers_generic_handler(
        name,
        {
            method: grpc.unary_unary_rpc_method_handler(
                function,
                request_deserializer=request.FromString,
                response_serializer=lambda message: message.SerializeToString(),
            )
            for method, (function, request) in methods.items()
        },
    )
