"""What the tests of the API client share."""

import asyncio

import msgspec
from tls_peer import Answer, Request


class Thing(msgspec.Struct):
    name: str


NODE = "/api/v1/nodes/one"
EVENTS = [
    b'{"type":"ADDED","object":{"name":"a"}}\n',
    b'{"type":"MODIFIED","object":{"name":"b","more":1}}\n',
    b'{"type":"DELETED","object":{"name":"c"}}\n',
]


def sequence(*answers: Answer) -> Answer:
    """Sends one response after the other; the last one repeatedly."""
    left = list(answers)

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(request, writer)

    return answer
