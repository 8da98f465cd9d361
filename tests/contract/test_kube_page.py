"""The controller in docs/kube.md, unchanged."""

import asyncio
import re
from pathlib import Path
from typing import Any

from kubeapi import kube_api
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.manager import OFF, Manager

PAGE = Path(__file__).parents[2] / "docs" / "kube.md"


def shown() -> str:
    found = re.search(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found[1]


def test_the_example_has_40_lines_without_imports() -> None:
    code = [line for line in shown().splitlines() if line.strip()]
    assert len([line for line in code if not line.startswith(("import", "from"))]) <= 40


async def test_the_example_plugin_behaves_as_documented() -> None:
    names: dict[str, Any] = {"__name__": "greeter"}
    exec(compile(shown(), str(PAGE), "exec"), names)  # noqa: S102 our own page
    async with kube_api() as api:
        client = Client(api.config, field_manager="greeter")
        manager = Manager(client, health_address=OFF, metrics_address=OFF)
        names["greeter"](manager)
        running = asyncio.create_task(manager.run())

        def text() -> str | None:
            found = api.get("configmaps", "g", "n")
            return found and found["data"]["text"]

        greeting = {"metadata": {"name": "g", "namespace": "n"}, "spec": {"recipient": "you"}}
        api.put("greetings", greeting)
        await until(lambda: text() == "Hello, you!")
        api.put("greetings", {**greeting, "spec": {"recipient": "all"}})
        await until(lambda: text() == "Hello, all!")
        api.remove("configmaps", "g", "n")
        await until(lambda: text() == "Hello, all!")
        api.put("configmaps", {**api.objects["configmaps", "n", "g"], "data": {"text": "Go away!"}})
        await until(lambda: text() == "Hello, all!")
        foreign = {"metadata": {"name": "foreign", "namespace": "n"}, "data": {"text": "Keep me!"}}
        api.put("configmaps", foreign)
        api.put("greetings", {**greeting, "metadata": {"name": "foreign", "namespace": "n"}})
        await until(lambda: "NameConflict" in {event["reason"] for event in api.all("events")})
        assert api.objects["configmaps", "n", "foreign"]["data"] == {"text": "Keep me!"}
        api.remove("greetings", "g", "n")
        manager.stop()
        async with asyncio.timeout(5):
            await running
        assert {event["reason"] for event in api.all("events")} == {"Greeted", "NameConflict"}
        await client.close()


async def test_the_page_s_test_passes() -> None:
    controller, test = ({"__name__": "greeter"}, {"__name__": "test"})
    exec(compile(shown(), str(PAGE), "exec"), controller)  # noqa: S102 our own page
    (text,) = re.findall(r"^```python\n([^`]*FakeApiServer.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile(text, str(PAGE), "exec"), test)  # noqa: S102 our own page
    async with asyncio.timeout(30):
        await test["test_greeting_gets_its_text"](controller["greeter"])  # type: ignore[operator]
