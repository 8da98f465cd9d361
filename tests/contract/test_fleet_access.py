"""The secure listener of the fleet page: tokens, sessions, proxies, and names that may not be seen."""

import asyncio
import base64
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import urlencode

import msgspec
import pytest
from cluster.pki import Authority
from fleetpages import Answer, Caller, Reviews
from hypothesis import given
from hypothesis import strategies as st
from waiting import until
from webtokens import TokenIssuer, text_of

from accelplane.fleet.devicelist import decode
from accelplane.fleet.options import PageOptions
from accelplane.fleet.program import serving
from accelplane.fleet.serve import listen
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.access import Access
from accelplane.fleet.web.gate import SecureGate, token_command_of
from accelplane.fleet.web.live import LiveLimits
from accelplane.fleet.web.reviewqueue import QueueLimits, ReviewQueue, is_doubtful
from accelplane.fleet.web.sessions import FailureLimit, Sessions, expiry
from accelplane.fleet.web.site import Screens, SiteOptions

SERVER = Authority("servers")
PROXIES = Authority("proxies")
LIMITS = LiveLimits(rows=0.01, overview=0.01, keepalive=0.05, share=1, check=0.05)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Setup:
    """The secure listener with a scripted API server."""

    def __init__(self, directory: Path) -> None:
        self.reviews = Reviews()
        self.view = SimulatedFleet(40, now=1764000000)
        self.screens = Screens(self.view, SiteOptions(limits=LIMITS))
        self.clock = Clock()
        self.queue = ReviewQueue()
        self.directory = directory
        self._stack = AsyncExitStack()
        self.port = 0

    async def start(self) -> None:
        credentials = SERVER.server("127.0.0.1", "127.0.0.1")
        (self.directory / "tls.crt").write_bytes(credentials.certificate)
        (self.directory / "tls.key").write_bytes(credentials.key)
        (self.directory / "proxies.crt").write_bytes(PROXIES.credentials.certificate)
        client = await self._stack.enter_async_context(self.reviews.serving())
        pages = PageOptions(
            address="", secure_address="127.0.0.1:0", tls_directory=str(self.directory),
            proxy_ca=str(self.directory / "proxies.crt"), proxy_names=("front-proxy",),
        )  # fmt: skip
        self.port = (await self._stack.enter_async_context(serving(client, self.screens, pages)))["secure"]
        # A listener with a clock of its own, for what changes with time.
        self.sessions = Sessions(clock=self.clock)
        gate = SecureGate(
            Access(client.server, ("accelplane-fleet",), clock=self.clock, queue=self.queue),
            self.screens.assets.links,
            sessions=self.sessions,
            failures=FailureLimit(clock=self.clock),
        )
        self.timed = Caller(await self._stack.enter_async_context(listen(self.screens, gate, "127.0.0.1:0")))

    async def stop(self) -> None:
        await self.screens.live.close()
        await self._stack.aclose()

    def caller(self, identity: str = "", *, authority: Authority = PROXIES, **fields: str) -> Caller:
        context = ssl.create_default_context(cadata=SERVER.credentials.certificate.decode())
        if identity:
            credentials = authority.client(identity)
            (self.directory / "c.crt").write_bytes(credentials.certificate)
            (self.directory / "c.key").write_bytes(credentials.key)
            context.load_cert_chain(self.directory / "c.crt", self.directory / "c.key")
        return Caller(self.port, context, **fields)

    def user(self, name: str, *rights: str) -> str:
        """Makes a user known, with the right to open the page. Returns the token."""
        self.reviews.users[f"token-of-{name}"] = name
        self.reviews.allow(name, "get /fleet", *rights)
        return f"token-of-{name}"


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    instance = Setup(tmp_path)
    await instance.start()
    yield instance
    await instance.stop()


async def sign_in(caller: Caller, token: str, target: str = "", **fields: str) -> Answer:
    origin = {"origin": f"https://127.0.0.1:{caller.port}"} | fields
    return await caller.send("POST", "/login", urlencode({"token": token, "next": target}).encode(), **origin)


def cookie_in(answer: Answer) -> str:
    return answer.fields["set-cookie"].partition(";")[0]


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


async def test_a_new_right_is_effective_after_a_minute(setup: Setup) -> None:
    caller = setup.timed
    token = {"authorization": f"Bearer {setup.user('ann')}"}
    assert "hidden" in (await caller.get("/waiting", **token)).text
    setup.reviews.allow("ann", "get pods vision")
    assert "vision/train-large-0" not in (await caller.get("/waiting", **token)).text
    setup.clock.now += 61
    output = (await caller.get("/waiting", **token)).text
    assert "vision/train-large-0" in output
    assert "hidden" in output
    setup.reviews.rights.discard(("ann", "get /fleet"))
    setup.clock.now += 61
    assert (await caller.get("/waiting", **token)).status == 403


async def test_updates_hide_the_same_names(setup: Setup) -> None:
    token = {"authorization": f"Bearer {setup.user('ann', 'get pods vision')}"}
    async with setup.caller(**token).events("screen=waiting") as events:
        rows = (await events.of_kind("rows")).data["blocks"]["rows"]["order"]
    assert "vision/train-large-0" in rows
    assert [each.split()[0] for each in rows if "/" not in each] == ["hidden"] * 3


async def test_a_stream_ends_when_the_right_is_revoked(setup: Setup) -> None:
    token = {"authorization": f"Bearer {setup.user('ann', 'list pods')}"}
    async with setup.timed.events("screen=waiting", **token) as events:
        await events.of_kind("comment")
        setup.reviews.rights.discard(("ann", "list pods"))
        setup.clock.now += 61
        await events.of_kind("reload")
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
        await events.of_kind("reload")
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
        await events.of_kind("reload")
    await until(lambda: setup.screens.live.viewers == 0)


# Sessions


async def test_a_browser_without_a_session_gets_a_form(setup: Setup) -> None:
    found = await setup.caller().get("/nodes?state=held")
    assert found.status == 401
    assert 'action="login"' in found.text
    assert 'value="nodes?state=held"' in found.text
    command = (
        "kubectl create token accelplane-fleet-viewer --duration 8h --audience accelplane-fleet --namespace default"
    )
    assert command in found.text
    assert (await setup.caller().get("/api/v1/events?screen=nodes")).fields["content-type"].startswith("text/plain")


@pytest.mark.parametrize(
    ("namespace", "audiences", "options"),
    [("", (), ""), ("ns", (), " --namespace ns"), ("ns", ("a b", "c"), " --audience 'a b' --namespace ns")],
)
def test_the_command_for_a_token_has_the_namespace_and_the_first_audience(
    namespace: str, audiences: tuple[str, ...], options: str
) -> None:
    command = token_command_of(namespace, audiences)
    assert command == f"kubectl create token accelplane-fleet-viewer --duration 8h{options}"


async def test_a_token_in_the_form_begins_a_session_and_sign_out_ends_it(setup: Setup) -> None:
    caller = setup.caller()
    answer = await sign_in(caller, setup.user("ann", "list pods"), "nodes?state=held")
    assert (answer.status, answer.fields["location"]) == (303, "nodes?state=held")
    attributes = answer.fields["set-cookie"].split("; ")[1:]
    assert {"HttpOnly", "Secure", "SameSite=Strict"} <= set(attributes)
    cookie = {"cookie": f"other=1; {cookie_in(answer)}"}
    page = await caller.get("/", **cookie)
    assert page.status == 200
    assert "ann " in page.text
    assert "token-of-ann" not in page.text + str(answer.fields)
    origin = {"origin": f"https://127.0.0.1:{caller.port}"}
    assert (await caller.send("POST", "/logout", **cookie)).status == 403, "another site cannot end a session"
    assert (await caller.send("POST", "/logout", **cookie, **origin)).status == 303
    assert (await caller.get("/", **cookie)).status == 401


@pytest.mark.parametrize("target", ["https://evil.example.com", "//evil.example.com", "/\\evil", "x", "login", "../x"])
async def test_sign_in_redirects_only_to_pages_of_this_site(setup: Setup, target: str) -> None:
    answer = await sign_in(setup.caller(), setup.user("ann"), target)
    assert answer.fields["location"] == "./"


@pytest.mark.parametrize(
    ("query", "kept"),
    [("page=1&query=2", ""), ("a%0d%0aX-Injected:%201=b&state=held", "?state=held"), ("%0a=1&start=7", "?start=7")],
)
async def test_only_fields_of_the_screen_are_kept_for_the_time_after_sign_in(
    setup: Setup, query: str, kept: str
) -> None:
    found = await setup.caller().get(f"/nodes?{query}")
    assert (found.status, f'value="nodes{kept}"' in found.text) == (401, True)
    answer = await sign_in(setup.caller(), setup.user("ann"), f"nodes?{query}")
    assert (answer.status, answer.fields["location"]) == (303, f"nodes{kept}")
    assert "x-injected" not in answer.fields


@pytest.mark.parametrize("origin", ["https://evil.example.com", "null", "http://127.0.0.1", ""])
async def test_a_form_of_another_site_is_rejected(setup: Setup, origin: str) -> None:
    answer = await sign_in(setup.caller(), setup.user("ann"), origin=origin)
    assert answer.status == 403
    assert "set-cookie" not in answer.fields


async def test_a_session_needs_the_right_too(setup: Setup) -> None:
    setup.reviews.users["t"] = "eve"
    assert (await sign_in(setup.caller(), "t")).status == 403


@pytest.mark.parametrize("cookie", ["__Secure-accelplane-fleet=x", "__Secure-accelplane-fleet=", "a=b;;=", "\xe9=1"])
async def test_unknown_cookies_are_no_session(setup: Setup, cookie: str) -> None:
    await sign_in(setup.caller(), setup.user("ann"))
    assert (await setup.caller().get("/", cookie=cookie)).status == 401


async def test_wrong_tokens_are_limited_by_address_and_do_not_lock_others_out(setup: Setup) -> None:
    caller, token = setup.timed, setup.user("ann")
    assert [(await sign_in(caller, f"wrong-{each}")).status for each in range(5)] == [401] * 5
    assert (await sign_in(caller, "wrong")).status == 429
    review_count = len(setup.reviews.reviewed)
    assert (await sign_in(caller, "wrong")).status == 429
    assert len(setup.reviews.reviewed) == review_count, "the same token is not reviewed again"
    # An ingress gives all users one address.
    assert (await sign_in(caller, token)).status == 303
    assert (await sign_in(caller, "other")).status == 429
    setup.clock.now += 61
    assert (await sign_in(caller, "wrong")).status == 401


async def test_concurrent_wrong_tokens_are_limited_together(setup: Setup) -> None:
    answers = await asyncio.gather(*(sign_in(setup.timed, f"wrong-{each}") for each in range(40)))
    assert sorted(answer.status for answer in answers) == [401] * 5 + [429] * 35
    assert len(setup.reviews.reviewed) > 5, "no other client was served"


def web_token(name: str, expires: float = 2**40) -> str:
    """A token of the form that Kubernetes issues."""
    return f"h.{base64.urlsafe_b64encode(msgspec.json.encode({'exp': expires, 'sub': name})).decode().rstrip('=')}.s"


@pytest.mark.parametrize(
    ("token", "doubtful"),
    [(web_token("ann"), False), (web_token("ann", 1.0), True), ("random", True), ("a.b.c", True), ("", True)],
)
def test_a_token_that_can_be_valid_is_not_doubtful(token: str, doubtful: bool) -> None:
    assert is_doubtful(token) is doubtful


_SOURCES = st.sampled_from([b"a", b"b", b"c"])
_TOKENS = st.sampled_from(["random", web_token("ann")])


@pytest.mark.untraced
@given(
    st.lists(st.tuples(_SOURCES, _TOKENS, st.integers(0, 3)), max_size=40),
    st.lists(st.integers(0, 39), max_size=10, unique=True),
)
def test_a_queue_of_reviews_keeps_its_limits_and_ends_empty(
    arrivals: list[tuple[bytes, str, int]], cancelled: list[int]
) -> None:
    """Arrivals are followed by a number of iterations of the event loop; some requests are cancelled."""
    limits = QueueLimits(places=8, share=5, doubtful=2, at_once=2, rate=10_000)

    async def run() -> None:
        queue, running, waiting = ReviewQueue(limits), 0, Counter[tuple[bytes, bool]]()

        async def review(source: bytes, token: str) -> bool:
            nonlocal running
            key = (source, is_doubtful(token))
            own = {each: count for each, count in waiting.items() if each[0] == source}
            full = sum(waiting.values()) >= 8 or sum(own.values()) >= 5 or (key[1] and waiting[key] >= 2)
            waiting[key] += 1
            try:
                async with queue.turn(source, token) as admitted:
                    assert admitted is not full
                    if not admitted:
                        return False
                    running += 1
                    try:
                        assert running <= 2
                        await asyncio.sleep(0)
                    finally:
                        running -= 1
                    return True
            finally:
                waiting[key] -= 1

        tasks: list[asyncio.Task[bool]] = []
        for number, (source, token, iterations) in enumerate(arrivals):
            tasks.append(asyncio.create_task(review(source, token)))
            for _ in range(iterations + 1):
                await asyncio.sleep(0)
            if number in cancelled:
                tasks[number // 2].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, bool | asyncio.CancelledError) for each in found), found
        assert (queue.size, queue._by_source, queue._doubtful) == (0, Counter(), Counter())

    asyncio.run(run())


async def test_a_flood_of_random_tokens_does_not_affect_users_and_delays_new_tokens_only(setup: Setup) -> None:
    """The flood has the address of the users, as behind an ingress, and its reviews do not end."""
    caller = setup.timed
    known = {"authorization": f"Bearer {setup.user('ann', 'list pods')}"}
    cookie = {"cookie": cookie_in(await sign_in(caller, setup.user("bob", "list pods")))}
    new = web_token("eve")
    setup.reviews.users[new] = "eve"
    setup.reviews.allow("eve", "get /fleet")
    assert (await caller.get("/nodes", **known)).status == 200
    setup.reviews.block = lambda token: token.startswith("random")
    bearers = [asyncio.create_task(caller.get("/", authorization=f"Bearer random-{each}")) for each in range(30)]
    await until(lambda: setup.queue.size == 30)
    forms = [asyncio.create_task(sign_in(caller, f"random-form-{each}")) for each in range(30)]
    await until(lambda: sum(form.done() for form in forms) == 28)
    assert {form.result().status for form in forms if form.done()} == {429}
    assert setup.queue.size == 32
    for _ in range(2):
        assert (await caller.get("/nodes", **known)).status == 200
        assert (await caller.get("/nodes", **cookie)).status == 200
        setup.clock.now += 61  # the reviews have expired: the tokens are reviewed again
    newcomer = asyncio.create_task(sign_in(caller, new))
    await until(lambda: setup.queue.size == 33)
    assert not newcomer.done()
    setup.reviews.block = lambda _token: False
    assert (await newcomer).status == 303
    assert {(await each).status for each in bearers} <= {401, 503}
    assert setup.queue.size == 0


@pytest.mark.parametrize(("published", "statuses"), [(True, (303, 200)), (False, (429, 429))])
async def test_a_flood_of_forged_tokens_does_not_affect_new_tokens_of_the_cluster(
    setup: Setup, *, published: bool, statuses: tuple[int, int]
) -> None:
    """Forged tokens have the form of those of the cluster and the address of the users, as behind an ingress."""
    issuer, caller = TokenIssuer.elliptic(), setup.timed
    setup.reviews.keys = issuer.document if published else None
    tokens = [issuer.token(user) for user in ("ann", "bob")]
    setup.reviews.users |= dict(zip(tokens, ("ann", "bob"), strict=True))
    for user in ("ann", "bob"):
        setup.reviews.allow(user, "get /fleet", "list pods")
    head, claims, _ = issuer.token("eve").split(".")
    forged = [f"{head}.{claims}.{text_of(bytes([each]) * 64)}" for each in range(65)]
    setup.reviews.block = lambda token: token in forged
    flood = [asyncio.create_task(caller.get("/", authorization=f"Bearer {each}")) for each in forged[:-1]]
    await until(lambda: setup.queue.size == 64)
    assert (await caller.get("/", authorization=f"Bearer {forged[-1]}")).status == 429
    assert (await sign_in(caller, tokens[0])).status == statuses[0]
    assert (await caller.get("/nodes", authorization=f"Bearer {tokens[1]}")).status == statuses[1]
    setup.reviews.block = lambda _token: False
    assert {(await each).status for each in flood} <= {401, 503}
    assert setup.queue.size == 0


async def test_a_session_that_ends_during_its_review_admits_nobody(setup: Setup) -> None:
    caller, token = setup.timed, setup.user("ann", "list pods")
    cookie = {"cookie": cookie_in(await sign_in(caller, token))}
    setup.clock.now += 61
    setup.reviews.block = lambda found: found == token
    page = asyncio.create_task(caller.get("/nodes", **cookie))
    await until(lambda: setup.reviews.blocked == 1)
    origin = {"origin": f"https://127.0.0.1:{caller.port}"}
    assert (await caller.send("POST", "/logout", **cookie, **origin)).status == 303
    setup.reviews.block = lambda _token: False
    assert (await page).status == 401


async def test_an_authenticated_proxy_forwards_the_address_whose_tokens_are_counted(setup: Setup) -> None:
    proxy = setup.caller("front-proxy")
    for each in range(5):
        assert (await sign_in(proxy, f"wrong-{each}", x_forwarded_for="10.0.0.9, 10.0.0.1")).status == 401
    assert (await sign_in(proxy, "wrong", x_forwarded_for="10.9.9.9, 10.0.0.1")).status == 429
    assert (await sign_in(proxy, "wrong", x_forwarded_for="10.0.0.1, 10.0.0.2")).status == 401
    # Without a certificate the field is not read, and neither is one without an address.
    for each in range(5):
        assert (await sign_in(setup.caller(), f"bad-{each}", x_forwarded_for=f"10.1.0.{each}")).status == 401
    assert (await sign_in(setup.caller(), "bad", x_forwarded_for="10.1.0.99")).status == 429
    assert (await sign_in(proxy, "bad", x_forwarded_for="junk")).status == 429


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


async def test_valid_tokens_and_failed_reviews_do_not_count_as_wrong_tokens(setup: Setup) -> None:
    caller, token = setup.timed, setup.user("ann")
    setup.reviews.fails = True
    assert [(await sign_in(caller, token)).status for _ in range(6)] == [503] * 6
    setup.reviews.fails = False
    assert [(await sign_in(caller, token)).status for _ in range(6)] == [303] * 6


async def test_invalid_tokens_do_not_displace_valid_ones(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelplane.fleet.web.access._MAX_CACHED", 4)
    token = setup.user("ann", "list pods")
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    for each in range(8):
        assert (await setup.timed.get("/nodes", authorization=f"Bearer wrong-{each}")).status == 401
    review_count = len(setup.reviews.reviewed)
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    assert len(setup.reviews.reviewed) == review_count


async def test_a_session_ends_with_its_token(setup: Setup) -> None:
    caller = setup.timed
    cookie = {"cookie": cookie_in(await sign_in(caller, setup.user("ann")))}
    assert (await caller.get("/", **cookie)).status == 200
    setup.reviews.users.clear()
    assert (await caller.get("/", **cookie)).status == 200
    setup.clock.now += 61
    assert (await caller.get("/", **cookie)).status == 401


def test_a_session_expires_with_its_token_or_after_twelve_hours() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    claims = msgspec.json.encode({"exp": 1060})

    token = f"h.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.s"
    short, seconds = sessions.create(token)
    long, others = sessions.create("opaque")
    assert (seconds, others) == (60, 43200)
    assert (sessions.token(short), sessions.token(long)) == (token, "opaque")
    clock.now += 60
    assert (sessions.token(short), sessions.token(long)) == ("", "opaque")
    clock.now += 43200
    assert sessions.token(long) == ""


def test_the_oldest_session_ends_if_there_are_too_many() -> None:
    sessions = Sessions(clock=Clock())
    first, *others = [sessions.create("t")[0] for _ in range(1025)]
    assert sessions.token(first) == ""
    assert sessions.token(others[0]) == "t"
    assert len(set(others)) == 1024


@pytest.mark.parametrize("token", ["", "a.b.c", "a.e30.c", "..", "a.!!.c", "a.bnVsbA.c", "a.W10.c"])
def test_a_token_without_a_readable_expiry_has_none(token: str) -> None:
    assert expiry(token) == 0.0


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
