"""Limits of token reviews: wrong tokens by address, the queue, floods of random and forged tokens."""

import asyncio
import base64
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from securepages import Setup, cookie_in, secure_page, sign_in
from waiting import until
from webtokens import TokenIssuer, text_of

from accelplane.fleet.web.reviewqueue import QueueLimits, ReviewQueue, is_doubtful

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
    monkeypatch.setattr("accelplane.fleet.web.access._MAX_CACHED", 4)
    token = setup.user("ann", "list pods")
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    for each in range(8):
        assert (await setup.timed.get("/nodes", authorization=f"Bearer wrong-{each}")).status == 401
    review_count = len(setup.reviews.reviewed)
    assert (await setup.timed.get("/nodes", authorization=f"Bearer {token}")).status == 200
    assert len(setup.reviews.reviewed) == review_count


# The queue


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
