"""The fleet page over real sockets: routes, header fields, live updates."""

import asyncio
import gzip
import re
from collections.abc import AsyncIterator
from typing import Self

import msgspec
import pytest
from fleetpages import Caller, head_of
from virtualtime import VirtualTimeLoop
from waiting import until

from accelplane.fleet.model import Node
from accelplane.fleet.serve import listen, open_gate
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.access import Viewer
from accelplane.fleet.web.live import Live, LiveLimits
from accelplane.fleet.web.query import Query
from accelplane.fleet.web.screens import SCREENS
from accelplane.fleet.web.site import Screens
from accelplane.http.listening import is_own_host

LIMITS = LiveLimits(interval=0.01, keepalive=0.05, share=10)


class Setup:
    """A simulated fleet, its screens, and a client."""

    def __init__(self, limits: LiveLimits = LIMITS, nodes: int = 30) -> None:
        self.view = SimulatedFleet(nodes, now=1764000000)
        self.screens = Screens(self.view, limits=limits)
        self.caller = Caller(0)

    async def __aenter__(self) -> Self:
        self._listening = listen(self.screens, open_gate("127.0.0.1:0"), "127.0.0.1:0", metrics=lambda: b"up 1\n")
        self.caller = Caller(await self._listening.__aenter__())
        return self

    async def __aexit__(self, *error: object) -> None:
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


@pytest.mark.parametrize(
    "path",
    ["/", "/nodes?sort=free&start=20", *(f"/{name}" for name in SCREENS if name not in ("overview", "node", "device"))],
)
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
        ("GET", "/node.csv", 404), ("GET", "/nodes.xml", 404), ("GET", "/nodes.", 404), ("GET", "/pods.csv", 200),
        ("GET", "/api/v1/devices?labels=a+b", 400), ("POST", "/nodes", 405), ("PUT", "/", 405), ("HEAD", "/", 200),
        ("GET", "/metrics", 200),
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


async def test_a_proxy_in_the_pod_passes_other_names_if_that_is_permitted() -> None:
    gate = open_gate("127.0.0.1:0", any_host=True)
    async with listen(Screens(SimulatedFleet(2)), gate, "127.0.0.1:0") as port:
        assert (await Caller(port).get("/", host="fleet.example.com")).status == 200


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost:1", True), ("127.0.0.1:8080", True), ("[::1]:8080", True), ("[::1]", True),
        ("10.0.0.1:8080", False), ("localhost.example.com", False), ("", False), ("[::1", False),
    ],
)  # fmt: skip
def test_the_names_of_this_machine_are_found(host: str, expected: bool) -> None:
    assert is_own_host(host) is expected


# Downloads


async def test_a_table_is_downloaded_with_its_filters(setup: Setup) -> None:
    found = await setup.caller.get("/devices.csv?family=qat&sort=-node")
    assert found.fields["content-type"] == "text/csv; charset=utf-8"
    assert found.fields["content-disposition"] == 'attachment; filename="devices.csv"'
    header, *rows = found.text.splitlines()
    plugin = header.split(",").index("plugin")
    assert {row.split(",")[plugin] for row in rows} == {"qat"}
    items = msgspec.json.decode((await setup.caller.get("/devices.json?family=qat&sort=-node")).body)["items"]
    assert len(items) == len(rows)
    assert [each["node"] for each in items] == sorted((each["node"] for each in items), reverse=True)
    listed = msgspec.json.decode((await setup.caller.get("/api/v1/devices?family=qat")).body)
    assert (listed["kind"], len(listed["devices"])) == ("FleetDeviceList", len(rows))


# Updates


async def test_a_change_is_announced_and_the_page_is_requested_with_its_tag(setup: Setup) -> None:
    page = await setup.caller.get("/nodes?sort=name")
    tag = page.fields["etag"]
    assert (await setup.caller.get("/nodes?sort=name", if_none_match=tag)).status == 304
    async with setup.caller.events(f"screen=nodes&generation={generation_in(page.text)}") as events:
        assert events.fields["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in events.fields
        assert (await events.next()).kind == "comment"
        node = setup.fail()
        changed = await events.of_kind("changed")
        assert (changed.id, changed.data) == (str(setup.view.cluster().generation), {})
        again = await setup.caller.get("/nodes?sort=name", if_none_match=tag)
        assert again.status == 200
        assert again.fields["etag"] != tag
        assert f"{node.units[0].unit}: unhealthy" in again.text
    await until(lambda: setup.screens.live.viewers == 0)


async def test_a_change_elsewhere_leaves_the_tag_of_a_page(setup: Setup) -> None:
    page = await setup.caller.get("/waiting")
    setup.view.replace(next(iter(setup.view.cluster().nodes.values())))
    again = await setup.caller.get("/waiting", if_none_match=page.fields["etag"])
    assert (again.status, again.body) == (304, b"")


@pytest.mark.parametrize("seen", ["", "1", "9" * 18])
async def test_a_client_without_a_generation_of_this_server_requests_its_page(setup: Setup, seen: str) -> None:
    async with setup.caller.events(f"screen=nodes&generation={seen}") as events:
        assert (await events.next()).kind == "changed"


async def test_a_reconnected_client_gets_an_event_only_after_a_change(setup: Setup) -> None:
    generation = str(setup.view.cluster().generation)
    async with setup.caller.events("screen=nodes", last_event_id=generation) as events:
        assert (await events.next()).kind == "comment"
    setup.fail()
    async with setup.caller.events("screen=nodes", last_event_id=generation) as events:
        assert (await events.next()).kind == "changed"


async def test_current_values_are_announced_without_a_change_of_the_cluster() -> None:
    live = Live(SimulatedFleet(2), LIMITS)
    generation = live._view.cluster().generation
    stream = live.subscribe(Viewer(), "device", generation, is_admitted, refresh=0.01)
    async with asyncio.timeout(60):
        while b"changed" not in await anext(stream):
            pass
    await stream.aclose()


async def test_viewers_of_the_same_screen_share_it(setup: Setup) -> None:
    gate = open_gate("127.0.0.1:0")
    first, second = [await setup.screens.render("nodes", Query(), gate, Viewer()) for _ in range(2)]
    assert second is first
    setup.fail()
    assert await setup.screens.render("nodes", Query(), gate, Viewer()) is not first


def test_all_viewers_share_one_budget_of_processor_time() -> None:
    """50 viewers of screens that take 1 s, of a share of 1/4, get one event each in 200 s, in the order of waiting."""
    live = Live(SimulatedFleet(2), msgspec.structs.replace(LIMITS, share=0.25, keepalive=3600))
    live.spent("nodes", 1.0)
    loop, times = VirtualTimeLoop(), dict[int, float]()

    async def follow(number: int) -> None:
        stream = live.subscribe(Viewer(source=bytes([number])), "nodes", -1, is_admitted)
        while b"changed" not in await anext(stream):
            pass
        times[number] = loop.time()
        await stream.aclose()

    async def follow_all() -> None:
        await asyncio.gather(*map(follow, range(50)))

    start = loop.time()
    loop.run(follow_all())
    loop.close()
    assert list(times) == list(range(50))
    assert [round(time - start) for time in times.values()] == [number * 4 for number in range(50)]


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


async def test_open_streams_end_when_the_server_stops() -> None:
    async with Setup() as setup:
        reader, writer = await setup.caller.open("GET", "/api/v1/events?screen=nodes")
        assert (await head_of(reader))[0] == 200
    async with asyncio.timeout(60):
        await reader.read()
    writer.close()


def generation_in(text: str) -> str:
    return text.partition('data-generation="')[2].partition('"')[0]


async def is_admitted() -> bool:
    return True
