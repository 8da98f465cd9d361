"""The operator against another program, wrong answers, late watches and a wrong clock, in hours of virtual time.

Whatever happens, the operator touches no object of others and writes each object ten times in a minute at most. When
it ends, the operator reaches the desired state. All timeouts are those of the product.
"""

import asyncio
import base64
import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from certificates import accepts
from hypothesis import given, settings
from hypothesis import strategies as st
from operatoropponents import ACTIONS, SECRET, WEBHOOKS, ObservedApi, Opponent
from operatorruns import ANY, do, missing_in, operator, put
from operatorscenarios import NAMESPACE, NOWHERE, VERSION, config, sample_resource
from thoroughness import examples
from virtualtime import TCP_DELAY, VirtualTimeLoop

from accelplane.http.servingtls import ServingTls
from accelplane.kube.authority import plan_renewal_in_process
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import Manager
from accelplane.kube.trust import Trust, TrustSettings
from accelplane.kube.truststore import ClusterTrustStore

pytestmark = [pytest.mark.untraced, pytest.mark.virtual_time]

WRITES_IN_A_MINUTE = 10
# The longest delay of the operator is that of a field that another program changed many times.
END_STATE = 1800
SERVICE = "hooks"


class World:
    """A server with two resources, their operator, and its clock."""

    def __init__(self, api: ObservedApi) -> None:
        self.api = api
        self.opponent = Opponent(api)
        self.ahead = datetime.timedelta()

    def now(self) -> datetime.datetime:
        seconds = asyncio.get_running_loop().time()
        return datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=seconds) + self.ahead

    def missing(self) -> str:
        """What is not as desired."""
        return missing_in(self.api) or ("" if self._certificate_is_accepted() else "certificate is not accepted")

    async def end_state(self) -> None:
        """Waits for the end state, then verifies all invariants."""
        for _ in range(END_STATE // 5):
            if not self.missing():
                break
            await asyncio.sleep(5)
        assert not self.missing()
        self.verify()

    def verify(self) -> None:
        assert not self.api.foreign
        count, key = self.api.most_writes_in_a_minute()
        assert count <= WRITES_IN_A_MINUTE, key

    def extend(self, manager: Manager) -> None:
        """Adds the certificate of the webhooks."""
        names = {"MutatingWebhookConfiguration": [WEBHOOKS]}
        store = ClusterTrustStore(manager.client, NAMESPACE, SECRET, names)
        trust_settings = TrustSettings(service=SERVICE, namespace=NAMESPACE)
        trust = Trust(store, ServingTls(), trust_settings, clock=self.now, planner=plan_renewal_in_process)
        manager.add_runnable(trust.run)

    def _certificate_is_accepted(self) -> bool:
        secret = self.api.get("secrets", SECRET, NAMESPACE) or {}
        found = self.api.get("mutatingwebhookconfigurations", WEBHOOKS) or {}
        bundle = base64.b64decode(found["webhooks"][0]["clientConfig"].get("caBundle", ""))
        certificate = base64.b64decode((secret.get("data") or {}).get("tls.crt", ""))
        return bool(bundle and certificate) and accepts(bundle, certificate, f"{SERVICE}.{NAMESPACE}.svc", self.now())


@asynccontextmanager
async def world(*, prepare: Callable[[World], object] = lambda _: None) -> AsyncIterator[World]:
    """A world whose operator has just been started."""
    async with ObservedApi() as api:
        result = World(api)
        service = {"name": SERVICE, "namespace": NAMESPACE}
        webhook = {"name": "a.b.c", "clientConfig": {"service": service}}
        api.put("mutatingwebhookconfigurations", {"metadata": {"name": WEBHOOKS}, "webhooks": [webhook]})
        do(api, config("0"))
        do(api, sample_resource("gpu", resourceManager=True, sharedDevNum=2))
        initial = f"intel/intel-qat-initcontainer:{VERSION}"
        do(api, sample_resource("qat", provisioningConfig="functions", initImage=initial, nodeSelector=NOWHERE))
        prepare(result)
        async with operator(api, "gpu", "qat", timeout=15, watch_timeouts=WatchTimeouts(), extend=result.extend):
            yield result


async def fight(opposed: World, *actions: str, period: float, seconds: float) -> None:
    """The actions of an opponent, one after the other."""
    for index in range(round(seconds / period)):
        opposed.opponent.act(actions[index % len(actions)])
        await asyncio.sleep(period)
    opposed.opponent.stop()


@pytest.mark.parametrize("period", [0.5, 7])
@pytest.mark.parametrize("action", ACTIONS)
async def test_an_opponent_causes_few_writes_and_the_end_state_is_reached_afterwards(
    action: str, period: float
) -> None:
    async with world() as opposed:
        await opposed.end_state()
        await fight(opposed, action, period=period, seconds=100)
        await opposed.end_state()


_RETRY_AFTER = ("86400", "-5", "soon", "Wed, 21 Oct 2099 07:28:00 GMT", "1e9", "99999999999999999999", "\xb2", "")
_STATUS = '{{"kind":"Status","status":"Failure","code":429,"details":{{"retryAfterSeconds":{}}}}}'
_SECONDS = ("86400", "-5", '"soon"', "1e300", "99999999999999999999", "null")
# A wrong delay, in the field of the header or in the body.
WRONG_DELAYS: dict[str, dict[str, Any]] = {
    **{f"Retry-After: {each}": {"headers": {"Retry-After": each}} for each in _RETRY_AFTER},
    **{f"retryAfterSeconds: {each}": {"body": _STATUS.format(each).encode()} for each in _SECONDS},
}
# Requests for a kind whose definition is created now, or whose API is not available for a moment.
DISCOVERY: dict[str, dict[str, Any]] = {
    "404": {"status": 404},
    "403": {"status": 403},
    "500": {"status": 500},
    "503": {"status": 503, "body": b"no healthy upstream"},
    "aborted": {},
    "no answer": {"hang": True},
    "another page": {"status": 200, "body": b"<html>"},
    "another kind": {"status": 200, "body": b'{"kind":"APIResourceList","resources":[]}'},
    "items of another kind": {"status": 200, "body": b'{"metadata":{"resourceVersion":"1"},"items":[1,{}]}'},
}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("description", WRONG_DELAYS)
async def test_a_wrong_delay_of_the_server_stops_nothing(description: str, status: int) -> None:
    async with world() as answered:
        await answered.end_state()
        for pattern in (ANY, "WATCH ", "^PATCH ", "GET .*deviceplugins"):
            answered.api.fault(pattern, status, times=3, **WRONG_DELAYS[description])
        answered.api.end_watches()
        edited = sample_resource("gpu", resourceManager=True, sharedDevNum=3)
        put(answered.api, edited.plural, edited.thing)
        started = asyncio.get_running_loop().time()
        await answered.end_state()
        assert asyncio.get_running_loop().time() - started < 600


@pytest.mark.parametrize("times", [1, 20])
@pytest.mark.parametrize("error", DISCOVERY)
async def test_errors_of_discovery_at_the_start_end_with_the_errors(error: str, times: int) -> None:
    def prepare(starting: World) -> None:
        for plural in ("gpudeviceplugins", "nodes", "daemonsets"):
            starting.api.fault(f"GET .*/{plural}$", times=times, **DISCOVERY[error])

    async with world(prepare=prepare) as starting:
        await starting.end_state()


@pytest.mark.parametrize("plural", ["gpudeviceplugins", "daemonsets", "configmaps", "nodes", "pods", "secrets"])
@pytest.mark.parametrize("lateness", ["stalled", "late"])
async def test_a_stalled_or_late_watch_of_one_kind_with_an_opponent(plural: str, lateness: str) -> None:
    async with world() as delayed:
        await delayed.end_state()
        if lateness == "stalled":
            delayed.api.pause_watches(f"/{plural}$")
        else:
            delayed.api.delay_watches(f"/{plural}$", 20)
        actions = ("edits the resource", "deletes", "replaces and deletes", "creates the resource again", "copies")
        await fight(delayed, *actions, "edits the ConfigMap", "empties the Secret", period=5, seconds=300)
        delayed.api.delay_watches(f"/{plural}$", 0)
        await delayed.end_state()


@pytest.mark.parametrize("running", [True, False])
async def test_a_clock_that_was_ahead_and_comes_back(running: bool) -> None:
    def set_ahead(early: World) -> None:
        early.ahead = datetime.timedelta(days=400)

    async with world(prepare=set_ahead if not running else lambda _: None) as early:
        await early.end_state()
        set_ahead(early)
        early.opponent.empty_secret()
        await asyncio.sleep(700)
        assert not early.missing()
        early.ahead = datetime.timedelta()
        assert early.missing() == "certificate is not accepted"
        await early.end_state()


STEPS = st.one_of(
    st.tuples(
        st.just("fight"),
        st.lists(st.sampled_from(list(ACTIONS)), min_size=1, max_size=4),
        st.sampled_from([0.1, 0.7, 3, 11, 40]),
        st.sampled_from([20, 90, 300]),
    ),
    st.tuples(st.just("delay"), st.sampled_from([*WRONG_DELAYS.values()]), st.sampled_from([429, 503])),
    st.tuples(st.just("error"), st.sampled_from(list(DISCOVERY)), st.integers(1, 20)),
    st.tuples(st.just("late"), st.sampled_from(["gpudeviceplugins", "daemonsets", "configmaps"]), st.integers(0, 60)),
    st.tuples(st.just("stalled"), st.sampled_from(["gpudeviceplugins", "daemonsets", "configmaps", ""])),
    st.tuples(st.just("clock"), st.sampled_from([-400, 0, 400])),
)


async def step(opposed: World, description: str, *how: Any) -> None:
    match description:
        case "fight":
            await fight(opposed, *how[0], period=how[1], seconds=min(how[2], 100 * how[1]))
        case "delay":
            opposed.api.fault("", how[1], times=5, **how[0])
        case "error":
            opposed.api.fault("(GET|WATCH) ", times=how[1], **DISCOVERY[how[0]])
        case "late":
            opposed.api.delay_watches(f"/{how[0]}$", how[1])
        case "stalled":
            opposed.api.pause_watches(f"/{how[0]}")
        case _:
            opposed.ahead = datetime.timedelta(days=how[0])


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(STEPS, min_size=1, max_size=6))
def test_whatever_happens_no_foreign_object_is_touched_and_the_end_state_is_reached(
    steps: list[tuple[Any, ...]],
) -> None:
    async def live() -> None:
        async with world() as opposed:
            await opposed.end_state()
            for each in steps:
                await step(opposed, *each)
            opposed.api.delay_watches("", 0)
            for pattern in ("gpudeviceplugins", "daemonsets", "configmaps"):
                opposed.api.delay_watches(f"/{pattern}$", 0)
            opposed.api.faults.clear()
            opposed.ahead = datetime.timedelta()
            await opposed.end_state()

    with asyncio.Runner(loop_factory=partial(VirtualTimeLoop, TCP_DELAY)) as runner:
        runner.run(live())
