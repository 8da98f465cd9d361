"""Kubernetes events that controllers write."""

import asyncio
import re
from collections.abc import AsyncIterator

import pytest
from kubeapi import kube_api
from kubecontrollers import Setup, thing
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.events import Recorder


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with kube_api() as api:
        client = Client(api.config, field_manager="test", timeout=1)
        yield Setup(api, client)
        await client.close()


async def test_repeated_events_are_aggregated_into_a_series(setup: Setup) -> None:
    recorder = Recorder(setup.client, "tests", "here", every=0.05)
    running = asyncio.create_task(recorder.run())
    regarding = await thing(setup)
    for _ in range(20):
        recorder.record(regarding, "Warning", "Failed", "it did not work")
        await asyncio.sleep(0.005)
    await until(lambda: [one.get("series", {}).get("count") for one in setup.api.all("events")] == [20])
    assert setup.api.count("POST .*/namespaces/default/events") == 1
    assert 1 <= setup.api.count("PATCH .*/namespaces/default/events") < 10
    event = setup.api.all("events")[0]
    assert event["regarding"]["uid"] == regarding.metadata.uid
    assert event["regarding"]["apiVersion"] == "example.com/v1"
    assert (event["reason"], event["type"], event["note"]) == ("Failed", "Warning", "it did not work")
    running.cancel()


async def test_events_with_another_object_or_note_are_separate(setup: Setup) -> None:
    recorder = Recorder(setup.client, "tests", "here")
    a, b = await thing(setup, "a"), await thing(setup, "b")
    recorder.record(a, "Normal", "Created", "one")
    recorder.record(a, "Normal", "Created", "two")
    recorder.record(b, "Normal", "Created", "one")
    recorder.record(b, "Normal", "Created", "x" * 5000 + "ä")
    await recorder.flush()
    notes = [one["note"] for one in setup.api.all("events")]
    assert len(notes) == 4
    assert max(len(note.encode()) for note in notes) <= 1024


async def test_an_event_with_once_is_written_once_by_all_replicas(setup: Setup) -> None:
    regarding = await thing(setup, f"{'w' * 235}.{'x' * 17}")
    for instance in ("here", "there"):
        recorder = Recorder(setup.client, "tests", instance)
        for _ in range(2):
            recorder.record(regarding, "Warning", "Waits", "for ever", once=True)
            await recorder.flush()
        recorder.record(regarding, "Warning", "Waits", "for me", once=True)
        await recorder.flush()
    assert sorted(one["note"] for one in setup.api.all("events")) == ["for ever", "for me"]
    assert not [one for one in setup.api.all("events") if "series" in one]
    assert all(re.fullmatch(r"w{235}\.[0-9a-f]{16}", one["metadata"]["name"]) for one in setup.api.all("events"))


async def test_events_that_cannot_be_written_are_logged(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(setup.client, "tests", "here")
    regarding = await thing(setup)
    setup.api.fault("POST .*/events", 500, times=3)
    for number in range(3):
        recorder.record(regarding, "Normal", "Created", f"number {number}")
    await recorder.flush()
    assert setup.api.all("events") == []
    assert "event Created of Widget/w: not written" in caplog.text
    await recorder.flush()
    assert setup.api.count("POST .*/events") == 3


async def test_an_event_whose_name_exists_is_logged(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(setup.client, "tests", "here")
    setup.api.fault("POST .*/events", 409, times=1)
    recorder.record(await thing(setup), "Normal", "Created", "x")
    await recorder.flush()
    assert "event Created of Widget/w: not written" in caplog.text


async def test_a_missing_right_to_write_events_is_logged_once(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    recorder = Recorder(setup.client, "tests", "here")
    regarding = await thing(setup)
    forbidden = setup.api.fault("POST .*/events", 403, times=1_000_000)
    for number in range(3):
        recorder.record(regarding, "Normal", "Created", f"number {number}")
    await recorder.flush()
    warnings = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith("no events are written in namespace default, they are in this log only: POST ")
    assert all(f"event Created of Widget/w: number {number}" in caplog.text for number in range(3))
    forbidden.times = 0
    recorder.record(regarding, "Normal", "Created", "number 3")
    await recorder.flush()
    assert [one["note"] for one in setup.api.all("events")] == ["number 3"]


async def test_flush_writes_no_event_twice(setup: Setup) -> None:
    recorder = Recorder(setup.client, "tests", "here")
    regarding = await thing(setup)
    setup.api.fault("POST .*/events", hang=True)
    recorder.record(regarding, "Normal", "Created", "x")
    running = asyncio.create_task(recorder.run())
    await until(lambda: setup.api.count("POST .*/events") == 1)
    await recorder.flush()
    assert setup.api.count("POST .*/events") == 1
    running.cancel()


async def test_an_expired_event_is_created_again(setup: Setup) -> None:
    recorder = Recorder(setup.client, "tests", "here")
    regarding = await thing(setup)
    recorder.record(regarding, "Normal", "Created", "x")
    await recorder.flush()
    event = setup.api.all("events")[0]
    setup.api.remove("events", event["metadata"]["name"], "default")
    recorder.record(regarding, "Normal", "Created", "x")
    await recorder.flush()
    assert [one["series"]["count"] for one in setup.api.all("events")] == [2]


async def test_the_number_of_events_in_memory_is_bounded(setup: Setup) -> None:
    recorder = Recorder(setup.client, "tests", "here")
    regarding = await thing(setup)
    for number in range(10_000):
        recorder.record(regarding, "Normal", "Created", str(number))
    assert len(recorder) <= 512
