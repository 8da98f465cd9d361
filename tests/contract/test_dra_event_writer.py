"""Events of the DRA driver at a double of the API server."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from sliceservers import NODE, SliceServer
from waiting import until

from accelplane.apiserver import ApiServer, RateLimit
from accelplane.dra.events import QUEUE, EventWriter
from accelplane.dra.model import ClaimRef

GPU = "gpu.intel.com"
CLAIM = ClaimRef("team", "3b9c", "gpus")
Make = Callable[..., EventWriter]


@pytest.fixture
async def server() -> AsyncIterator[SliceServer]:
    async with SliceServer() as server:
        yield server


@pytest.fixture
async def make(server: SliceServer) -> AsyncIterator[Make]:
    writers: list[EventWriter] = []
    api = ApiServer(server.config)

    def make(rate: RateLimit | None = None) -> EventWriter:
        writers.append(EventWriter(api, NODE, rate_limit=rate or RateLimit(1000, 1000), first_retry=0.01))
        return writers[-1]

    yield make
    for writer in writers:
        await writer.close()
    api.close()


def notes(server: SliceServer) -> list[str]:
    return [each["note"] for each in server.all("events")]


async def written(server: SliceServer, count: int = 1) -> list[dict[str, Any]]:
    await until(lambda: len(server.all("events")) >= count)
    return server.all("events")


async def test_an_event_of_the_node_is_found_by_the_name_of_the_node(server: SliceServer, make: Make) -> None:
    make().record(GPU, "DeviceNotPublished", "device a is not published")
    (event,) = await written(server)
    assert event["metadata"]["namespace"] == "default"
    assert event["regarding"] == {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": NODE}
    assert (event["reportingController"], event["reportingInstance"]) == (GPU, NODE)
    assert (event["type"], event["reason"], event["action"]) == ("Warning", "DeviceNotPublished", "Publish")
    assert event["note"] == "device a is not published"


async def test_an_event_of_a_claim_is_in_its_namespace(server: SliceServer, make: Make) -> None:
    make().record(GPU, "UnprepareFailed", "text", CLAIM)
    (event,) = await written(server)
    assert event["metadata"]["namespace"] == "team"
    assert event["regarding"] == {
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "namespace": "team", "name": "gpus", "uid": "3b9c",
    }  # fmt: skip


async def test_a_note_is_one_line_of_at_most_1024_bytes(server: SliceServer, make: Make) -> None:
    writer = make()
    writer.record(GPU, "PrepareFailed", "two\nlines \x1b[31m red \u202e right to left", CLAIM)
    writer.record(GPU, "PrepareFailed", "ä" * 2000, CLAIM)
    await written(server, 2)
    short, long = sorted(notes(server), key=len)
    assert short == "two lines \\x1b[31m red \\u202e right to left"
    assert long == "ä" * 510 + "…"
    assert len(long.encode()) <= 1024


async def test_events_wait_for_the_api_server_and_the_newest_are_dropped(server: SliceServer, make: Make) -> None:
    writer = make()
    fault = server.fault("POST", 503, times=-1)
    for number in range(QUEUE + 5):
        writer.record(GPU, "PrepareFailed", "text", ClaimRef("team", f"uid-{number}", f"claim-{number}"))
    await until(lambda: len(server.requests) > 2)
    server.faults.remove(fault)
    await written(server, QUEUE)
    await writer.close()
    assert {each["regarding"]["uid"] for each in server.all("events")} == {f"uid-{number}" for number in range(QUEUE)}


async def test_an_event_that_the_api_server_rejects_is_dropped_and_the_next_is_written(
    server: SliceServer, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    writer = make()
    server.fault("POST .*/team/", 403, times=-1)
    writer.record(GPU, "PrepareFailed", "text", CLAIM)
    writer.record(GPU, "UnprepareFailed", "text", CLAIM)
    writer.record(GPU, "OtherAgent", "text")
    await written(server)
    assert [each["reason"] for each in server.all("events")] == ["OtherAgent"]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert [line.partition(":")[0] for line in warnings] == ["event PrepareFailed not written"]
    assert len([each for each in server.requests if each.method == "POST"]) == 3


async def test_a_lost_response_makes_no_second_event(server: SliceServer, make: Make) -> None:
    server.fault("POST", times=1, after=True)
    make().record(GPU, "OtherAgent", "text")
    await until(lambda: len([each for each in server.requests if each.method == "POST"]) == 2)
    assert len(server.all("events")) == 1


@pytest.mark.virtual_time
async def test_a_node_writes_five_events_per_minute_after_a_burst_of_ten() -> None:
    posted: list[str] = []

    class Api:
        async def post(self, _path: str, body: Any, _kind: object) -> None:
            posted.append(body["note"])

    writer = EventWriter(Api(), NODE)  # type: ignore[arg-type]
    for number in range(40):
        writer.record(GPU, "PrepareFailed", "text", ClaimRef("team", f"uid-{number}", "claim"))
    await asyncio.sleep(1)
    assert len(posted) == 10
    await asyncio.sleep(120)
    assert len(posted) == 20
    await writer.close()
    assert len(posted) == 20
