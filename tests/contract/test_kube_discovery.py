"""Which kinds the API server serves."""

import asyncio

import pytest
from kubeapi import KubeApi
from kubekinds import Config, Widget
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.discovery import served_kinds, stop_when_served


async def test_a_kind_without_definition_is_omitted_and_logged(
    api: KubeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    api.fault("GET .*/widgets", 404)
    assert await served_kinds(client, [Widget, Config]) == [Config]
    assert "Widget: there is no definition of this kind" in caplog.text


async def test_a_kind_that_may_not_be_listed_counts_as_served(
    api: KubeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    api.fault("GET .*/widgets", 403)
    assert await served_kinds(client, [Config, Widget]) == [Config, Widget]
    assert "Widget: " in caplog.text


async def test_a_program_stops_when_a_kind_is_defined(api: KubeApi, client: Client) -> None:
    fault = api.fault("GET .*/widgets", 404, times=3)
    stopped = asyncio.Event()
    waiting = asyncio.create_task(stop_when_served(client, [Widget], stopped.set, interval=0.01))
    await until(stopped.is_set)
    assert not fault.times
    assert not waiting.done(), "a part of a program that ends is an error"
    lists = api.count("GET .*/widgets")
    await asyncio.sleep(0.1)
    assert api.count("GET .*/widgets") == lists
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_all_kinds_are_served_and_no_object_is_read(api: KubeApi, client: Client) -> None:
    api.put("widgets", {"metadata": {"name": "w"}})
    assert await served_kinds(client, [Widget]) == [Widget]
    assert [each.parameters.get("fieldSelector") for each in api.requests] == ["metadata.name=none"]


async def test_kinds_that_are_not_served_are_listed_once_per_interval(api: KubeApi, client: Client) -> None:
    waiting = asyncio.create_task(stop_when_served(client, [Widget], lambda: None, interval=60))
    await asyncio.sleep(0.1)
    assert api.count("GET") == 0
    waiting.cancel()
