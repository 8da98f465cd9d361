"""The fleet page over real sockets: routes, header fields, live updates."""

import asyncio
import gzip
import re
from collections.abc import AsyncIterator
from typing import Self

import msgspec
import pytest
from fleetpages import Caller, head_of
from waiting import until

from accelplane.fleet.model import Node, Waiting
from accelplane.fleet.serve import listen, open_gate
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.access import Viewer
from accelplane.fleet.web.html import element
from accelplane.fleet.web.live import RELOAD, Content, Live, LiveLimits, Subject
from accelplane.fleet.web.query import NodesQuery, PlaceQuery
from accelplane.fleet.web.site import Screens, SiteOptions
from accelplane.fleet.web.summaries import Summaries, totals
from accelplane.http.listening import is_own_host
from accelplane.http.messages import HttpError

LIMITS = LiveLimits(rows=0.01, overview=0.01, keepalive=0.05, share=1)


class Setup:
    """A simulated fleet, its screens, and a client."""

    def __init__(self, limits: LiveLimits = LIMITS, nodes: int = 30) -> None:
        self.view = SimulatedFleet(nodes, now=1764000000)
        self.screens = Screens(self.view, SiteOptions(limits=limits))
        self.caller = Caller(0)

    async def __aenter__(self) -> Self:
        self._listening = listen(self.screens, open_gate("127.0.0.1:0"), "127.0.0.1:0", metrics=lambda: b"up 1\n")
        self.caller = Caller(await self._listening.__aenter__())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.screens.live.close()
        await self._listening.__aexit__(None, None, None)

    def fail(self, number: int = 0) -> Node:
        """Makes a device of a node unhealthy."""
        node = [each for each in self.view.cluster().nodes.values() if each.units][number]
        unit = msgspec.structs.replace(node.units[0], phase="unhealthy", reason="bus")
        node = msgspec.structs.replace(node, units=(unit, *node.units[1:]))
        self.view.replace(node)
        return node


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    async with Setup() as instance:
        yield instance


@pytest.mark.parametrize("path", ["/", "/nodes", "/nodes?sort=free&start=20", "/waiting", "/namespaces"])
async def test_pages_are_complete_and_protected(setup: Setup, path: str) -> None:
    found = await setup.caller.get(path)
    assert found.status == 200
    assert found.text.startswith("<!DOCTYPE html>")
    assert found.text.endswith("</html>\n")
    assert found.fields["content-type"] == "text/html; charset=utf-8"
    assert found.fields["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )
    assert found.fields["x-content-type-options"] == "nosniff"
    assert found.fields["referrer-policy"] == "same-origin"
    assert found.fields["cache-control"] == "no-store"


async def test_pages_are_compressed_if_the_client_accepts_it(setup: Setup) -> None:
    packed = await setup.caller.get("/nodes", accept_encoding="br, gzip;q=0.5")
    assert packed.fields["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == (await setup.caller.get("/nodes", accept_encoding="gzip;q=0")).body
    assert "content-encoding" not in (await setup.caller.get("/missing", accept_encoding="gzip")).fields


async def test_assets_have_a_hash_in_their_names_and_are_cached(setup: Setup) -> None:
    links = setup.screens.assets.links
    for name, kind, limit in ((links.style, "text/css", 15_000), (links.script, "text/javascript", 40_000)):
        assert f'"{name}"' in (await setup.caller.get("/")).text
        found = await setup.caller.get(f"/{name}")
        assert (found.status, found.fields["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert "immutable" in found.fields["cache-control"]
        assert 1000 < len(found.body) <= limit
        packed = await setup.caller.get(f"/{name}", accept_encoding="gzip")
        assert gzip.decompress(packed.body) == found.body
    assert (await setup.caller.get("/assets/fleet.js")).status == 404
    assert (await setup.caller.get("/assets/../site.py")).status == 404


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/missing", 404), ("GET", "/node?node=none", 404), ("GET", "/device?node=none", 404),
        ("POST", "/nodes", 405), ("PUT", "/", 405), ("HEAD", "/", 200), ("GET", "/metrics", 200),
        ("GET", "/api/v1/events?screen=none", 400), ("GET", "/login", 303), ("POST", "/logout", 303),
    ],
)  # fmt: skip
async def test_other_requests_get_their_error_status(setup: Setup, method: str, path: str, status: int) -> None:
    found = await setup.caller.send(method, path)
    assert found.status == status
    assert ("allow" in found.fields) is (status == 405)


@pytest.mark.parametrize(("path", "root"), [("/missing", ""), ("/nodes/", "../"), ("/a/b/c", "../../")])
async def test_an_unknown_page_leads_to_the_overview(setup: Setup, path: str, root: str) -> None:
    found = await setup.caller.get(path)
    assert (found.status, found.fields["content-type"]) == (404, "text/html; charset=utf-8")
    assert f'href="{root or "./"}"' in found.text
    assert re.search(f'href="{root}assets/fleet[.a-f0-9]*.css"', found.text)


async def test_an_unknown_path_for_programs_has_a_text(setup: Setup) -> None:
    found = await setup.caller.get("/api/v1/missing")
    assert (found.status, found.text) == (404, "no such page\n")


async def test_a_name_that_resolves_to_the_loopback_interface_is_rejected(setup: Setup) -> None:
    for path in ("/", "/api/v1/events?screen=nodes", "/metrics"):
        found = await setup.caller.get(path, host="attacker.example.com:8080")
        assert found.status == 421
    assert (await setup.caller.get("/", host="localhost:9")).status == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost:1", True), ("127.0.0.1:8080", True), ("[::1]:8080", True), ("[::1]", True),
        ("10.0.0.1:8080", False), ("localhost.example.com", False), ("", False), ("[::1", False),
    ],
)  # fmt: skip
def test_the_names_of_this_machine_are_found(host: str, expected: bool) -> None:
    assert is_own_host(host) is expected


# Updates


async def test_a_change_of_a_device_is_sent_as_its_row(setup: Setup) -> None:
    generation = setup.view.cluster().generation
    async with setup.caller.events(f"screen=nodes&sort=name&generation={generation}") as events:
        assert events.fields["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in events.fields
        await until(lambda: setup.screens.live.viewers == 1)
        node = setup.fail()
        rows = await events.of_kind("rows")
        assert list(rows.data["blocks"]) == ["rows"]
        assert list(rows.data["blocks"]["rows"]["set"]) == [node.name]
        assert "order" not in rows.data["blocks"]["rows"]
        assert rows.id == str(setup.view.cluster().generation)
        overview = await events.of_kind("overview")
        assert list(overview.data["blocks"]["summary"]["set"]) == ["unhealthy"]
        assert overview.data["announcement"].endswith("before.")
    await until(lambda: setup.screens.live.viewers == 0)


async def test_the_overview_is_updated_by_overview_events(setup: Setup) -> None:
    generation = setup.view.cluster().generation
    async with setup.caller.events(f"screen=overview&generation={generation}") as events:
        await until(lambda: setup.screens.live.viewers == 1)
        await events.of_kind("comment")
        setup.fail()
        changed = await events.of_kind("overview")
        assert {"problems", "resources"} <= set(changed.data["blocks"])


async def test_pending_pods_and_the_problem_of_the_api_server_are_updated(setup: Setup) -> None:
    async with setup.caller.events(f"screen=waiting&generation={setup.view.cluster().generation}") as events:
        await events.of_kind("comment")
        setup.view.replace(waiting=(Waiting("team", "new", 5, {"gpu.intel.com/i915": 1}),), problem="no answer")
        rows = await events.of_kind("rows")
        assert rows.data["blocks"]["rows"]["order"] == ["team/new"]
        overview = await events.of_kind("overview")
        assert list(overview.data["blocks"]["notices"]["set"]) == ["problem"]


async def test_current_values_of_a_device_are_updated_without_a_change_of_the_cluster() -> None:
    async with Setup() as setup:
        node = next(each for each in setup.view.cluster().nodes.values() if each.units and each.units[0].holders)
        unit = node.units[0]
        query = f"node={node.name}&plugin={unit.plugin}&unit={unit.unit}"
        page = await setup.caller.get(f"/device?{query}")
        assert "temperature" in page.text
        async with setup.caller.events(f"screen=device&{query}") as events:
            while True:
                found = await events.of_kind("rows")
                if "readings" in found.data["blocks"] and "order" not in found.data["blocks"]["readings"]:
                    break


async def test_a_reconnected_client_gets_the_changes_since_its_last_event(setup: Setup) -> None:
    page = await setup.caller.get("/nodes?sort=name")
    generation = page.text.partition('data-generation="')[2].partition('"')[0]
    node = setup.fail()
    async with setup.caller.events("screen=nodes&sort=name", last_event_id=generation) as events:
        rows = await events.of_kind("rows")
    assert list(rows.data["blocks"]["rows"]["set"]) == [node.name]
    async with setup.caller.events("screen=nodes&sort=name", last_event_id=rows.id) as events:
        assert (await events.next()).kind == "comment"


async def test_a_client_with_a_newer_page_than_the_channel_gets_no_older_rows() -> None:
    async with Setup(msgspec.structs.replace(LIMITS, rows=3600)) as setup:
        query, live = "screen=nodes&sort=name", setup.screens.live
        generation = setup.view.cluster().generation
        async with setup.caller.events(f"{query}&generation={generation}") as first:
            while (await first.next()).kind != "comment":  # the channel has content, and waits for the next update
                pass
            setup.fail()
            page = await setup.caller.get("/nodes?sort=name")
            generation = page.text.partition('data-generation="')[2].partition('"')[0]
            async with setup.caller.events(f"{query}&generation={generation}") as second:
                await until(lambda: live.viewers == 2)
                kinds = [(await second.next()).kind for _ in range(3)]
                assert "rows" not in kinds
        await until(lambda: not live._channels)


async def test_values_that_changed_within_a_generation_are_sent_to_new_viewers() -> None:
    view = SimulatedFleet(2)
    live = Live(view, msgspec.structs.replace(LIMITS, keepalive=3600))
    subject = Subject("device", PlaceQuery(), "", refresh=0.01)
    numbers = totals(view.cluster(), Summaries().of(view.cluster()))
    values = {"temperature": "41", "power": "9"}

    def content() -> Content:
        rows = {name: element("p", text) for name, text in values.items()}
        return Content(view.cluster().generation, {"readings": rows}, numbers)

    async def make() -> Content:
        return content()

    async def is_admitted() -> bool:
        return True

    seen = view.cluster().generation
    page = content()
    live.remember(subject, page)
    values["temperature"] = "43"
    first = live.subscribe(Viewer(), subject, make, None, is_admitted)
    while b"43" not in await anext(first):
        pass
    second = live.subscribe(Viewer(), subject, make, seen, is_admitted)
    async with asyncio.timeout(60):
        while b"43" not in (found := await anext(second)):
            pass
    assert b'"9"' not in found, "equal values are not sent"
    await first.aclose()
    await second.aclose()


@pytest.mark.parametrize("generation", ["1", "9" * 18])
async def test_a_client_of_another_server_has_to_reload(setup: Setup, generation: str) -> None:
    async with setup.caller.events(f"screen=nodes&generation={generation}") as events:
        assert (await events.next()).kind == "reload"


async def test_viewers_above_the_limit_are_rejected_and_slots_are_freed() -> None:
    async with Setup(msgspec.structs.replace(LIMITS, viewers=2)) as setup:
        async with setup.caller.events("screen=waiting"), setup.caller.events("screen=nodes"):
            await until(lambda: setup.screens.live.viewers == 2)
            async with setup.caller.events("screen=overview") as third:
                assert third.status == 503
            assert (await setup.caller.get("/")).status == 200
        await until(lambda: setup.screens.live.viewers == 0)
        async with setup.caller.events("screen=overview") as again:
            assert again.status == 200


async def test_an_address_without_users_has_a_part_of_the_streams() -> None:
    async with Setup(msgspec.structs.replace(LIMITS, viewers=3, account=2)) as setup:
        async with setup.caller.events("screen=waiting"), setup.caller.events("screen=nodes"):
            await until(lambda: setup.screens.live.viewers == 2)
            refused = await setup.caller.get("/api/v1/events?screen=overview")
            assert refused.status == 503
            assert "found 2 pages with live updates of this address, expected fewer" in refused.text
            assert (await setup.caller.get("/nodes")).status == 200
        await until(lambda: setup.screens.live.viewers == 0)
        async with setup.caller.events("screen=overview") as again:
            assert again.status == 200


async def test_a_client_that_disconnects_during_authorization_uses_no_stream(setup: Setup) -> None:
    for _ in range(5):
        _, writer = await setup.caller.open("GET", "/api/v1/events?screen=nodes")
        writer.close()
    async with setup.caller.events("screen=nodes") as events:
        assert events.status == 200
        await until(lambda: setup.screens.live.viewers == 1)


async def test_a_viewer_that_does_not_read_gets_reload_and_holds_little_memory() -> None:
    async with Setup(msgspec.structs.replace(LIMITS, queued=4096), nodes=60) as setup:
        generation = setup.view.cluster().generation
        async with setup.caller.events(f"screen=nodes&sort=name&generation={generation}") as slow:
            await until(lambda: setup.screens.live.viewers == 1)
            # More than the socket's buffers take.
            kinds = set[str]()
            (channel,) = setup.screens.live._channels.values()
            (subscriber,) = channel._subscribers
            async with asyncio.timeout(60):
                while RELOAD not in subscriber._events:
                    setup.view.change(60)
                    await asyncio.sleep(0.002)
                    assert subscriber._size <= 4096
            while "reload" not in kinds:
                kinds.add((await slow.next()).kind)


async def test_open_streams_end_when_the_server_stops() -> None:
    async with Setup() as setup:
        reader, writer = await setup.caller.open("GET", "/api/v1/events?screen=nodes")
        assert (await head_of(reader))[0] == 200
    async with asyncio.timeout(60):
        await reader.read()
    writer.close()


@pytest.mark.parametrize("error", [HttpError(503, "no answer"), ValueError("a fault")])
async def test_a_page_that_fails_to_render_is_fetched_again(error: Exception) -> None:
    view = SimulatedFleet(5, now=1764000000)
    live = Live(view, LIMITS)

    async def make() -> Content:
        raise error

    async def admitted() -> bool:
        return True

    stream = live.subscribe(Viewer(), Subject("nodes", NodesQuery(), ""), make, None, admitted)
    received = [await anext(stream) for _ in range(2)]
    assert received[1].startswith(b"event: reload")
    await stream.aclose()
    await live.close()
