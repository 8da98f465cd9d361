"""Limits of token reviews: wrong tokens by address, and floods of unknown tokens."""

import asyncio

import pytest
from securepages import Setup, cookie_in, secure_page, sign_in
from waiting import until

setup = pytest.fixture(secure_page)


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


async def test_valid_tokens_and_failed_reviews_do_not_count_as_wrong_tokens(setup: Setup) -> None:
    caller, token = setup.timed, setup.user("ann")
    setup.reviews.fails = True
    assert [(await sign_in(caller, token)).status for _ in range(6)] == [503] * 6
    setup.reviews.fails = False
    assert [(await sign_in(caller, token)).status for _ in range(6)] == [303] * 6


async def test_invalid_tokens_do_not_displace_valid_ones(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelplane.fleet.web.access._MAX_TOKENS", 4)
    token = setup.user("ann", "list pods")
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    for each in range(8):
        assert (await setup.timed.get("/nodes", authorization=f"Bearer wrong-{each}")).status == 401
    review_count = len(setup.reviews.reviewed)
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    assert len(setup.reviews.reviewed) == review_count


# Floods


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
