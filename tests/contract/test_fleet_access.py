"""Access to the fleet page: tokens, rights, hidden names, streams of a viewer, users that a proxy forwards."""

import asyncio
import re
import ssl
from contextlib import AsyncExitStack

import msgspec
import pytest
from cluster.pki import Authority
from securepages import LIMITS, Setup, cookie_in, secure_page, sign_in
from waiting import until

from accelplane.fleet.devicelist import decode
from accelplane.fleet.model import Waiting

setup = pytest.fixture(secure_page)


async def test_a_bearer_token_with_the_right_opens_the_page(setup: Setup) -> None:
    caller = setup.caller(authorization=f"Bearer {setup.user('ann', 'list pods')}")
    assert (await caller.get("/nodes")).status == 200
    assert setup.reviews.reviewed == ["token accelplane-fleet", "ann get /fleet", "ann list pods"]
    for _ in range(20):
        assert (await caller.get("/namespaces")).status == 200
    assert len(setup.reviews.reviewed) == 3


@pytest.mark.parametrize(
    ("field", "status"),
    [("Bearer unknown", 401), ("Bearer ", 401), ("Basic YTpi", 401), ("Bearer token-of-eve", 403)],
)
async def test_other_credentials_open_nothing(setup: Setup, field: str, status: int) -> None:
    setup.reviews.users["token-of-eve"] = "eve"
    caller = setup.caller(authorization=field)
    for path in ("/", "/api/v1/events?screen=nodes", "/metrics"):
        found = await caller.get(path)
        assert found.status == status
        assert b"example.com" not in found.body
    assert ("www-authenticate" in (await caller.get("/")).fields) is (status == 401)


async def test_without_the_api_server_nothing_is_shown(setup: Setup) -> None:
    caller = setup.caller(authorization=f"Bearer {setup.user('ann')}")
    setup.reviews.fails = True
    found = await caller.get("/")
    assert found.status == 503
    setup.reviews.fails = False
    assert (await caller.get("/")).status == 200


async def test_metrics_need_their_own_right(setup: Setup) -> None:
    ann, scraper = setup.user("ann"), setup.user("scraper", "get /metrics")
    assert (await setup.caller(authorization=f"Bearer {ann}").get("/metrics")).status == 403
    found = await setup.caller(authorization=f"Bearer {scraper}").get("/metrics")
    assert "accelplane_fleet_viewers 0.0" in found.text


async def test_a_token_for_the_api_server_reads_the_metrics_but_opens_no_page(setup: Setup) -> None:
    token = setup.user("prometheus", "get /metrics", "list pods")
    setup.reviews.own.add(token)
    caller = setup.caller(authorization=f"Bearer {token}")
    assert "accelplane_fleet_viewers 0.0" in (await caller.get("/metrics")).text
    assert [(await caller.get(path)).status for path in ("/", "/api/v1/devices", "/nodes")] == [401] * 3
    reviews = len(setup.reviews.reviewed)
    assert (await caller.get("/metrics")).status == 200
    assert len(setup.reviews.reviewed) == reviews, "its account was reviewed before"
    other = setup.user("eve")
    setup.reviews.own.add(other)
    assert (await setup.caller(authorization=f"Bearer {other}").get("/metrics")).status == 403


async def test_a_path_without_a_screen_has_no_form_whose_links_would_be_wrong(setup: Setup) -> None:
    found = await setup.caller().get("/nodes/")
    assert (found.status, found.fields["content-type"]) == (401, "text/html; charset=utf-8")
    assert 'action="login"' not in found.text
    assert 'href="../"' in found.text
    assert 'action="login"' in (await setup.caller().get("/nodes")).text


async def test_assets_need_no_token(setup: Setup) -> None:
    assert (await setup.caller().get(f"/{setup.screens.assets.links.style}")).status == 200


async def test_names_are_shown_only_in_namespaces_whose_pods_the_viewer_may_get(setup: Setup) -> None:
    nodes = setup.view.cluster().nodes.values()
    node = max(nodes, key=lambda each: len({h.namespace for unit in each.units for h in unit.holders}))
    holders = {holder.namespace: holder.pod for unit in node.units for holder in unit.holders}
    first, *others = sorted(holders)
    token = setup.user("ann", f"get pods {first}")
    caller = setup.caller(authorization=f"Bearer {token}")
    page = await caller.get(f"/node?node={node.name}")
    assert f"{first}/{holders[first]}" in page.text
    assert "hidden" in page.text
    assert not [name for name in others if f"{name}/{holders[name]}" in page.text]
    assert (await caller.get("/namespaces")).text.count(">hidden<") > 0
    everything = setup.caller(authorization=f"Bearer {setup.user('bob', 'list pods')}")
    assert ">hidden<" not in (await everything.get("/namespaces")).text


async def test_the_list_of_devices_hides_the_same_names(setup: Setup) -> None:
    nodes = setup.view.cluster().nodes.values()
    holders = {holder.namespace for node in nodes for unit in node.units for holder in unit.holders}
    first = min(holders)
    assert len(holders) > 1
    assert (await setup.caller().get("/api/v1/devices")).status == 401
    caller = setup.caller(authorization=f"Bearer {setup.user('ann', f'get pods {first}')}")
    listed = decode((await caller.get("/api/v1/devices")).body)
    assert {holder.namespace for device in listed.devices for holder in device.holders} == {first, "hidden"}
    everything = setup.caller(authorization=f"Bearer {setup.user('bob', 'list pods')}")
    listed = decode((await everything.get("/api/v1/devices")).body)
    assert {holder.namespace for device in listed.devices for holder in device.holders} == holders


async def test_a_new_right_is_effective_after_five_minutes_and_a_revoked_one_after_one(setup: Setup) -> None:
    caller = setup.timed
    token = {"authorization": f"Bearer {setup.user('ann')}"}
    assert "hidden" in (await caller.get("/waiting", **token)).text
    setup.reviews.allow("ann", "get pods vision")
    assert "vision/train-large-0" not in (await caller.get("/waiting", **token)).text
    setup.clock.now += 301
    output = (await caller.get("/waiting", **token)).text
    assert "vision/train-large-0" in output
    assert "hidden" in output
    setup.reviews.rights.discard(("ann", "get /fleet"))
    setup.clock.now += 61
    assert (await caller.get("/waiting", **token)).status == 403


async def test_a_viewer_with_rights_in_one_of_500_namespaces_sees_his_own_names(setup: Setup) -> None:
    pods = tuple(Waiting(f"team-{number:03}", "job", 5, {"gpu.intel.com/i915": 1}) for number in range(500))
    setup.view.replace(waiting=pods)
    token = {"authorization": f"Bearer {setup.user('ann', 'get pods team-499')}"}
    names = msgspec.json.decode((await setup.timed.get("/waiting.json", **token)).body)["items"]
    assert sorted(each["pod"] for each in names) == ["hidden"] * 499 + ["team-499/job"]
    assert "team-499/job" in (await setup.timed.get("/waiting?text=team-499", **token)).text
    reviews = len(setup.reviews.reviewed)
    assert (await setup.timed.get("/waiting", **token)).status == 200
    assert len(setup.reviews.reviewed) == reviews


async def test_names_whose_rights_are_not_known_in_time_are_hidden_with_a_notice(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelplane.fleet.web.access._NAMES_TIMEOUT", 0.0)
    output = (await setup.timed.get("/waiting", authorization=f"Bearer {setup.user('ann')}")).text
    assert re.search(r"names of \d+ namespaces are hidden, their rights are not known yet; refresh the page", output)


# Streams


async def test_a_stream_ends_when_the_right_is_revoked(setup: Setup) -> None:
    token = {"authorization": f"Bearer {setup.user('ann', 'list pods')}"}
    async with setup.timed.events("screen=waiting", **token) as events:
        await events.of_kind("comment")
        setup.reviews.rights.discard(("ann", "list pods"))
        setup.clock.now += 61
        await events.of_kind("end")
    await until(lambda: setup.screens.live.viewers == 0)


async def test_a_stream_with_a_bearer_token_ends_when_the_token_is_no_longer_valid(setup: Setup) -> None:
    token = setup.user("ann", "list pods")
    async with setup.timed.events("screen=waiting", authorization=f"Bearer {token}") as events:
        await events.of_kind("comment")
        setup.clock.now += 61
        reviews = len(setup.reviews.reviewed)
        await until(lambda: len(setup.reviews.reviewed) > reviews)
        assert setup.reviews.reviewed[reviews] == "token accelplane-fleet"
        assert setup.screens.live.viewers == 1, "a valid token keeps the stream open"
        del setup.reviews.users[token]
        setup.clock.now += 61
        await events.of_kind("end")
        with pytest.raises(asyncio.IncompleteReadError):
            await events.next()
    await until(lambda: setup.screens.live.viewers == 0)
    assert (await setup.timed.get("/waiting", authorization=f"Bearer {token}")).status == 401


async def test_a_stream_ends_when_the_token_belongs_to_another_user(setup: Setup) -> None:
    """Names are shown by the rights of the first user, such as those of its groups."""
    token = setup.user("ann", "list pods")
    async with setup.timed.events("screen=waiting", authorization=f"Bearer {token}") as events:
        await events.of_kind("comment")
        setup.user("bob", "list pods")
        setup.reviews.users[token] = "bob"
        setup.clock.now += 61
        await events.of_kind("end")
    await until(lambda: setup.screens.live.viewers == 0)


async def test_a_viewer_has_a_part_of_the_streams(setup: Setup) -> None:
    setup.screens.live.limits = msgspec.structs.replace(LIMITS, viewers=9, account=3, credential=2)
    setup.user("ann")
    setup.reviews.users["second-token"] = "ann"
    first, second = ({"authorization": f"Bearer {token}"} for token in ("token-of-ann", "second-token"))
    caller = setup.caller()
    async with AsyncExitStack() as stack:
        for number in (1, 2):
            await stack.enter_async_context(caller.events("screen=nodes", **first))
            await until(lambda number=number: setup.screens.live.viewers == number)
        refused = await caller.get("/api/v1/events?screen=nodes", **first)
        assert (refused.status, "of this session or token" in refused.text) == (503, True)
        await stack.enter_async_context(caller.events("screen=nodes", **second))
        await until(lambda: setup.screens.live.viewers == 3)
        refused = await caller.get("/api/v1/events?screen=nodes", **second)
        assert (refused.status, "of this user" in refused.text) == (503, True)
        bearer = {"authorization": f"Bearer {setup.user('bob')}"}
        other = await stack.enter_async_context(caller.events("screen=nodes", **bearer))
        assert other.status == 200
    await until(lambda: setup.screens.live.viewers == 0)
    assert not setup.screens.live._streams


async def test_sessions_of_one_token_share_its_streams(setup: Setup) -> None:
    setup.screens.live.limits = msgspec.structs.replace(LIMITS, credential=1)
    caller, token = setup.timed, setup.user("ann")
    cookies = [{"cookie": cookie_in(await sign_in(caller, token))} for _ in range(2)]
    async with caller.events("screen=nodes", **cookies[0]) as events:
        assert events.status == 200
        await until(lambda: setup.screens.live.viewers == 1)
        assert (await caller.get("/api/v1/events?screen=nodes", **cookies[1])).status == 503


# Proxies


async def test_an_authenticated_proxy_forwards_the_user(setup: Setup) -> None:
    setup.user("ann", "list pods")
    fields = {"x_remote_user": "ann", "x_remote_group": "g"}
    assert (await setup.caller("front-proxy").get("/", **fields)).status == 200
    assert (await setup.caller("front-proxy").get("/")).status == 401
    assert (await setup.caller("front-proxy").get("/", x_remote_user="eve")).status == 403


async def test_user_header_fields_of_clients_are_ignored(setup: Setup) -> None:
    setup.user("ann", "list pods")
    assert (await setup.caller().get("/", x_remote_user="ann")).status == 401
    assert (await setup.caller("other-name").get("/", x_remote_user="ann")).status == 401
    with pytest.raises((ssl.SSLError, ConnectionError, EOFError)):
        await setup.caller("front-proxy", authority=Authority("strangers")).get("/", x_remote_user="ann")
