"""Connections of the admission server: order, timeouts, limits and shutdown."""

import asyncio
import contextlib
from collections.abc import Sequence

import pytest
from admissionservers import POD, post, review, setup
from virtualtime import in_virtual_time
from waiting import until

from accelplane.admission.sgx import PATH
from accelplane.http import progress as http_progress
from accelplane.http import server as http_server
from accelplane.http.messages import HttpLimits


async def test_a_body_over_the_limit_is_rejected_before_it_is_complete() -> None:
    async with setup() as one:
        caller = await one.caller()
        caller.writer.write(f"POST {PATH} HTTP/1.1\r\nContent-Length: 50000000\r\n\r\n".encode() + b"x" * 1_000_000)
        reply = await caller.reply()
        assert reply.status == 413
        assert reply.fields["connection"] == "close"
        assert await caller.ended()


async def test_an_object_of_the_maximum_size_is_reviewed() -> None:
    big = {**POD, "metadata": {"annotations": {"x": "y" * 2_900_000}}}
    async with setup() as one:
        assert (await one.ask(post(review(big)))).response["allowed"]


async def test_requests_on_one_connection_are_answered_in_their_order() -> None:
    async with setup() as one:
        caller = await one.caller()
        many = [review(uid=f"u-{number}") for number in range(20)]
        caller.writer.write(b"".join(post(body) for body in many))
        assert [(await caller.reply()).response["uid"] for _ in many] == [f"u-{number}" for number in range(20)]


async def test_a_request_may_arrive_byte_by_byte() -> None:
    async with setup(secure=False) as one:
        caller = await one.caller()
        for byte in post(review({"metadata": {}, "spec": {}})):
            caller.writer.write(bytes([byte]))
            await caller.writer.drain()
            await asyncio.sleep(0)
        assert (await caller.reply()).response["allowed"]


async def test_expect_100_continue_gets_a_continue_response() -> None:
    message = post(review(), PATH, "Expect: 100-continue")
    head, _, body = message.partition(b"\r\n\r\n")
    async with setup() as one:
        caller = await one.caller()
        caller.writer.write(head + b"\r\n\r\n")
        assert await caller.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await caller.ask(body)).response["allowed"]


@pytest.mark.parametrize("fields", [("Connection: close",), ("Connection: keep-alive, Close",)])
async def test_a_caller_can_close_its_connection(fields: Sequence[str]) -> None:
    async with setup() as one:
        caller = await one.caller()
        assert (await caller.ask(post(review(), PATH, *fields))).fields["connection"] == "close"
        assert await caller.ended()


QUICK = HttpLimits(request=0.2, idle=0.2, handshake=0.2, linger=0.1)


@pytest.mark.parametrize("head", [b"POST", post(review())[:-1], post(review()).partition(b"\r\n\r\n")[0]])
@in_virtual_time(http_server, http_progress)
async def test_an_incomplete_request_times_out_with_408(head: bytes) -> None:
    async with setup(limits=QUICK) as one:
        caller = await one.caller()
        assert (await caller.ask(head)).status == 408
        assert await caller.ended()


@in_virtual_time(http_server, http_progress)
async def test_single_bytes_do_not_extend_the_timeout() -> None:
    async with setup(limits=QUICK, secure=False) as one:
        caller = await one.caller()

        async def send_bytes() -> None:
            with contextlib.suppress(OSError):
                for byte in post(review()) * 10:
                    caller.writer.write(bytes([byte]))
                    await caller.writer.drain()
                    await asyncio.sleep(0.02)

        task = asyncio.create_task(send_bytes())
        assert (await caller.reply()).status == 408
        task.cancel()


@in_virtual_time(http_server, http_progress)
async def test_an_idle_connection_is_closed_without_a_response() -> None:
    async with setup(limits=QUICK) as one:
        fresh, used = await one.caller(), await one.caller()
        assert (await used.ask(post(review()))).status == 200
        assert await fresh.ended()
        assert await used.ended()


async def test_a_connection_without_handshake_is_closed() -> None:
    async with setup(limits=QUICK) as one:
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_idle_connections_and_unfinished_handshakes_at_the_limit_do_not_block_reviews() -> None:
    async with setup(limits=HttpLimits(connections=2, stall=0.1)) as one:
        idle = await one.caller()
        assert (await idle.ask(post(review()))).status == 200
        silent = [await asyncio.open_connection("127.0.0.1", one.port) for _ in range(2)]
        assert (await one.ask(post(review()))).status == 200
        assert one.server.connections <= 2
        for _reader, writer in silent:
            writer.close()


async def test_a_close_notify_alert_is_answered() -> None:
    async with setup() as one:
        caller = await one.caller()
        assert (await caller.ask(post(review()))).status == 200
        await caller.close()  # asyncio waits for the close_notify of the server
        await until(lambda: not one.server.connections)


@in_virtual_time(http_server, http_progress)
async def test_a_client_that_reads_no_responses_is_disconnected() -> None:
    async with setup(limits=QUICK, secure=False) as one:
        caller = await one.caller()
        caller.writer.transport.pause_reading()  # type: ignore[attr-defined]
        message = post(review()) * 200

        async def flood() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller.writer.write(message)
                    await caller.writer.drain()

        async with asyncio.timeout(10):
            await flood()
        other = await one.caller()
        assert (await other.ask(post(review()))).status == 200


async def test_shutdown_completes_running_requests_and_closes_idle_connections() -> None:
    async with setup() as one:
        head, idle = await one.caller(), await one.caller()
        assert (await head.ask(post(review()))).status == 200
        assert (await idle.ask(post(review()))).status == 200
        message = post(review(uid="last"))
        head.writer.write(message[:100])
        await head.writer.drain()
        await asyncio.sleep(0.05)
        stopping = asyncio.create_task(one.server.stop(5))
        assert await idle.ended()
        reply = await head.ask(message[100:])
        assert (reply.response["uid"], reply.fields["connection"]) == ("last", "close")
        await stopping
        with pytest.raises(OSError):  # noqa: PT011 - the kernel refuses or resets the connection
            await one.caller()


async def test_draining_closes_each_connection_after_its_next_review() -> None:
    async with setup(secure=False) as instance:
        caller = await instance.caller()
        assert (await caller.ask(post(review()))).status == 200
        instance.server.drain()
        assert (await caller.ask(post(review()))).status == 200
        assert await caller.ended()
        assert (await instance.ask(post(review()))).status == 200
