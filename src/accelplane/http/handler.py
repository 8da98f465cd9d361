"""The handler of an HTTP server's requests, and the error responses to its exceptions."""

import logging
from collections.abc import Callable, Coroutine

from accelplane.http.messages import HttpError, Request, Response

log = logging.getLogger(__name__)

_INTERNAL_ERROR = "internal error; see the log"

PendingResponse = Coroutine[object, object, Response]
Handler = Callable[[Request], Response | PendingResponse]


def call_handler(handler: Handler, request: Request) -> Response | PendingResponse:
    """Raises `HttpError`."""
    try:
        return handler(request)
    except HttpError:
        raise
    except Exception:
        log.exception("%s %s: internal error", request.method, request.path)
        raise HttpError(500, _INTERNAL_ERROR) from None


async def await_response(pending: PendingResponse, request: Request) -> Response | HttpError:
    """The response of a handler that returned a coroutine, or its error."""
    try:
        return await pending
    except HttpError as error:
        return error
    except Exception:
        log.exception("%s %s: internal error", request.method, request.path)
        return HttpError(500, _INTERNAL_ERROR)
