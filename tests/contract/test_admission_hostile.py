"""Hostile input of the admission server."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import msgspec
from admissionservers import Setup, post, review, setup
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples
from waiting import until

from accelplane.admission.sgx import PATH, SgxOptions, mutator
from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.kube.admission import AdmissionServer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
RESOURCES = st.dictionaries(
    st.sampled_from(["sgx.intel.com/epc", "sgx.intel.com/enclave", "cpu"]), VALUES | st.just("1")
)
CONTAINERS = st.lists(
    VALUES
    | st.fixed_dictionaries(
        {},
        optional={
            "name": VALUES,
            "env": VALUES,
            "resources": VALUES | st.fixed_dictionaries({"limits": RESOURCES, "requests": RESOURCES}),
        },
    ),
    max_size=3,
)
PODS = VALUES | st.fixed_dictionaries(
    {"metadata": VALUES | st.just({}), "spec": VALUES | st.fixed_dictionaries({"containers": CONTAINERS})}
)


@given(PODS)
@settings(deadline=None)
def test_any_object_is_allowed_or_denied(found: Any) -> None:
    server = AdmissionServer([mutator(SgxOptions())])
    body = msgspec.json.encode(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u", "object": found}}
    )
    response = server.handle(Request("POST", PATH, "application/json", body))
    assert isinstance(response, Response)
    answered = json.loads(response.body)["response"]
    assert answered["allowed"] or answered["status"]["code"] in (400, 403)


@given(st.binary() | st.text().map(str.encode) | VALUES.map(msgspec.json.encode))
def test_any_body_is_rejected_or_reviewed(body: bytes) -> None:
    server = AdmissionServer([mutator(SgxOptions())])
    with contextlib.suppress(HttpError):
        server.handle(Request("POST", PATH, "application/json", body))


PIECES = st.lists(
    st.binary(max_size=20)
    | st.sampled_from([post(review()), b"GET /healthz HTTP/1.1\r\n\r\n", b"\r\n", b"\r\n\r\n",
                       b"POST / HTTP/1.1\r\n",
                       b"Content-Length: 5\r\n", b"Host: x\r\n", b"Expect: 100-continue\r\n",
                       b"Connection: close\r\n"]),
    max_size=8,
)  # fmt: skip


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=examples(30))
def test_bytes_that_are_not_tls_end_the_connection(data: bytes) -> None:
    async def send_requests() -> None:
        async with setup(limits=HttpLimits(handshake=0.05)) as one:
            reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
            writer.write(data)
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    await reader.read()
            writer.close()
            await until(lambda: serves(one))

    async def serves(one: Setup) -> bool:
        try:
            return (await one.ask(post(review()))).status == 200
        except OSError:  # on a loaded computer this handshake can exceed the limit, too
            return False

    asyncio.run(send_requests())


@given(PIECES)
@settings(deadline=None, max_examples=examples(60))
def test_any_bytes_get_http_responses_and_a_closed_connection(pieces: Sequence[bytes]) -> None:
    async def send_requests() -> bytes:
        async with setup(secure=False, limits=HttpLimits(linger=0.01)) as one:
            caller = await one.caller()
            caller.writer.write(b"".join(pieces))
            caller.writer.write_eof()
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionResetError):
                    return await caller.reader.read()
            return b""

    answers = asyncio.run(send_requests())
    assert not answers or answers.startswith(b"HTTP/1.1 ")
