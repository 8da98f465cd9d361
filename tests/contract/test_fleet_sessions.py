"""Sessions of the fleet page: the form for a token, cookies, expiry."""

import asyncio

import pytest
from fleetpages import web_token
from securepages import Clock, Setup, cookie_in, secure_page, sign_in
from waiting import until

from accelplane.fleet.web.gate import token_command_of
from accelplane.fleet.web.sessions import Sessions, claims

setup = pytest.fixture(secure_page)


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
    token = web_token({"exp": 1060})
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
    assert claims(token).exp == 0.0
