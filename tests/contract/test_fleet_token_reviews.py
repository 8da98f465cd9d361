"""Limits of token reviews: invalid tokens, and floods of unknown ones."""

import asyncio

import pytest
from securepages import Setup, cookie_in, secure_page, sign_in
from waiting import until

setup = pytest.fixture(secure_page)


async def test_invalid_tokens_do_not_displace_valid_ones(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelplane.fleet.web.access._MAX_TOKENS", 4)
    token = setup.user("ann", "list pods")
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    for each in range(8):
        assert (await setup.timed.get("/nodes", authorization=f"Bearer wrong-{each}")).status == 401
    review_count = len(setup.reviews.reviewed)
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    assert len(setup.reviews.reviewed) == review_count


async def test_a_flood_of_unknown_tokens_is_limited_and_does_not_affect_known_users(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flood has the address of the users, as behind an ingress, and its reviews do not end."""
    monkeypatch.setattr("accelplane.fleet.web.access._MAX_UNKNOWN_TOKENS", 10)
    caller = setup.timed
    known = {"authorization": f"Bearer {setup.user('ann', 'list pods')}"}
    cookie = {"cookie": cookie_in(await sign_in(caller, setup.user("bob", "list pods")))}
    assert (await caller.get("/nodes", **known)).status == 200
    setup.reviews.block = lambda token: token.startswith("random")
    flood = [asyncio.create_task(caller.get("/", authorization=f"Bearer random-{each}")) for each in range(10)]
    await until(lambda: setup.access._unknown == 10)
    assert (await caller.get("/", authorization="Bearer random-11")).status == 429
    for _ in range(2):
        assert (await caller.get("/nodes", **known)).status == 200
        assert (await caller.get("/nodes", **cookie)).status == 200
        setup.clock.now += 61  # the reviews have expired: the tokens are reviewed again
    setup.reviews.block = lambda _token: False
    assert {(await each).status for each in flood} <= {401, 503}
    assert setup.access._unknown == 0
