"""The operator as a process with a real API server, killed or with faults: the final state is unchanged.

`tests/contract/test_operator_faults.py` injects faults at every request to a double of the API server. These tests
inject them at some requests, with the real apply, ownership and garbage collection. A run of each scenario without
faults determines the final state.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import http
import json
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from operatorscenarios import (
    FAMILIES,
    JUDGED,
    NAMESPACE,
    OVERRIDES,
    SCENARIOS,
    SETTINGS,
    Change,
    Copy,
    Drift,
    PutObject,
    Remove,
    difference,
    differences_to_desired,
    duplicate,
    end,
)
from waiting import until

from accelplane.kube.client import Client, load_config
from accelplane.kube.informer import WatchTimeouts
from accelplane.kube.manager import OFF, Manager
from accelplane.operator.controller import controllers

from .faultyproxy import FaultyProxy, faulty_proxy
from .installation import MANAGER, Installation, Operator
from .pki import Authority

pytestmark = [pytest.mark.cluster, pytest.mark.by_turns]

Object = dict[str, Any]

PLACES = {
    "nodes": "/api/v1/nodes",
    "configmaps": f"/api/v1/namespaces/{NAMESPACE}/configmaps",
    "daemonsets": f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets",
    "serviceaccounts": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "clusterrolebindings": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}
# Other objects have accounts and bindings, too.
OURS = {
    "configmaps": {"functions"},
    "serviceaccounts": {"gpu-manager-sa"},
    "clusterrolebindings": {"gpu-manager-rolebinding"},
}
ANY = r"^(GET|PATCH|PUT|POST|DELETE) "
# Writes of compared objects.
WRITE = r"^(PATCH|PUT|POST|DELETE) (?!.*/events)"
EXPIRED = b'{"type":"ERROR","object":{"kind":"Status","status":"Failure","code":410,"reason":"Expired"}}'

# The faults of every second of the first twelve requests, one after the other.
FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 409},
    {"status": 429, "headers": {"Retry-After": "1"}},
    {"status": 500},
    {"after": True},
)
WATCHES: dict[str, Callable[[FaultyProxy], object]] = {
    "cut": FaultyProxy.kill_watches,
    "too old": lambda way: way.send_line(EXPIRED),
    "ended in a line": lambda way: way.end_watches(b'{"type":"MODIFIED","object":{"metadata":{"na'),
}


class Setup:
    """The objects of the cluster, and an operator behind the proxy."""

    def __init__(self, troubled: Installation, proxy: FaultyProxy, operator: Operator) -> None:
        self.kubeconfig = troubled.kubeconfig
        self.proxy = proxy
        self.operator = operator
        self._cluster = troubled.cluster

    def restart(self) -> None:
        """Kills the operator and starts another one, as Kubernetes does."""
        self.operator.kill()
        self.operator.begin()

    def do(self, change: Change) -> None:
        match change:
            case PutObject(plural, thing):
                self._put(f"{_place(plural)}/{thing['metadata']['name']}", thing)
            case Remove(plural, name):
                self._ask("DELETE", f"{_place(plural)}/{name}")
            case Copy(name, new):
                found = self._ask("GET", f"{PLACES['daemonsets']}/{name}")
                self._ask("POST", PLACES["daemonsets"], duplicate(found, new))
            case Drift(name, args):
                found = self._ask("GET", f"{PLACES['daemonsets']}/{name}")
                found["spec"]["template"]["spec"]["containers"][0]["args"] = list(args)
                del found["metadata"]["resourceVersion"]
                self._ask("PUT", f"{PLACES['daemonsets']}/{name}", found)

    def end(self) -> Object:
        return end({plural: self._all(plural) for plural in JUDGED})

    def missing(self) -> str:
        return differences_to_desired({plural: self._all(plural) for plural in (*JUDGED, "nodes", "configmaps")})

    def clear(self) -> None:
        """Deletes all objects of the scenarios."""
        self.proxy.faults.clear()
        for family in FAMILIES:
            self._cluster.request("DELETE", _place(f"{family}deviceplugins"))
        self._cluster.request("DELETE", f"{PLACES['configmaps']}/functions")
        for name in ("one", "two", "three"):
            self._cluster.request("DELETE", f"{PLACES['nodes']}/{name}")

    def _all(self, plural: str) -> list[Object]:
        found = (self._cluster.get(_place(plural)) or {"items": []})["items"]
        return [each for each in found if each["metadata"]["name"] in OURS.get(plural, {each["metadata"]["name"]})]

    def _put(self, path: str, thing: Object) -> None:
        changed_thing = copy.deepcopy(thing)
        code = http.HTTPStatus.CONFLICT
        while code == http.HTTPStatus.CONFLICT:
            if (found := self._cluster.get(path)) is None:
                code, answer = self._cluster.request("POST", path.rpartition("/")[0], changed_thing)
            else:
                # Only labels of nodes change.
                labels = changed_thing["metadata"].get("labels")
                changed = changed_thing if labels is None else found
                changed["metadata"] = {**found["metadata"], **({"labels": labels} if labels else {})}
                code, answer = self._cluster.request("PUT", path, changed)
        assert code in {http.HTTPStatus.OK, http.HTTPStatus.CREATED}, answer["message"]

    def _ask(self, method: str, path: str, body: Object | None = None) -> Object:
        code, answer = self._cluster.request(method, path, body)
        assert code in {http.HTTPStatus.OK, http.HTTPStatus.CREATED}, answer["message"]
        return answer


def _place(plural: str) -> str:
    return PLACES.get(plural) or f"/apis/deviceplugin.intel.com/v1/{plural}"


@pytest.fixture
async def setup(installation: Installation, tmp_path: Path) -> AsyncIterator[Setup]:
    """An operator that uses the API server through the proxy."""
    pair = Authority("tests").server("localhost", "localhost")
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    async with faulty_proxy(installation.kubeconfig) as proxy:
        troubled = Installation(installation.cluster, tmp_path)
        config = json.loads(troubled.kubeconfig.read_text())
        config["clusters"][0]["cluster"] = {"server": proxy.url}
        del config["contexts"][0]["context"]["user"]
        troubled.kubeconfig.write_text(json.dumps(config))
        flags = (f"-devices={','.join(FAMILIES)}", "-certificate-secret=", f"-cert-dir={tmp_path}")
        with troubled.process(*flags, **OVERRIDES) as operator:
            instance = Setup(troubled, proxy, operator)
            operator.begin()
            try:
                yield instance
            finally:
                instance.clear()
            proxy.faults.clear()
            await until(lambda: not instance.end(), 60)
            operator.signal(signal.SIGTERM)
            await asyncio.to_thread(operator.ended)
            assert "Traceback" not in operator.text()


async def wait_reconciled(setup: Setup, name: str) -> None:
    """Waits until all resources are reconciled."""
    with contextlib.suppress(TimeoutError):
        await until(lambda: not setup.missing(), 60)
    assert not setup.missing(), f"{name}:\n{setup.operator.text()[-4000:]}"


async def prepare(setup: Setup, name: str) -> None:
    """Creates exactly the initial objects of a scenario."""
    setup.clear()
    await until(lambda: not setup.end(), 60)
    for change in SCENARIOS[name].before:
        setup.do(change)
    await wait_reconciled(setup, name)


_ends: dict[str, Object] = {}


async def expected(setup: Setup, name: str) -> Object:
    """The final state of a scenario without faults, in which all resources are reconciled."""
    if name not in _ends:
        await prepare(setup, name)
        for change in SCENARIOS[name].changes:
            setup.do(change)
        await wait_reconciled(setup, name)
        _ends[name] = setup.end()
    return _ends[name]


async def wait_final_state(setup: Setup, name: str) -> None:
    expected_state = await expected(setup, name)
    with contextlib.suppress(TimeoutError):
        await until(lambda: setup.end() == expected_state, 60)
    assert not difference(setup.end(), expected_state), name
    setup.proxy.faults.clear()


@pytest.mark.parametrize("turn", range(len(FAULTS)))
async def test_faults_at_every_second_request_do_not_change_the_final_state(setup: Setup, turn: int) -> None:
    faults = [FAULTS[(turn + index) % len(FAULTS)] for index in range(6)]
    for name, scenario in SCENARIOS.items():
        await expected(setup, name)
        await prepare(setup, name)
        first, *_ = [setup.proxy.fault(ANY, skip=1 if index else turn % 2, **each) for index, each in enumerate(faults)]
        for change in scenario.changes:
            setup.do(change)
        await wait_final_state(setup, name)
        assert not first.times, name


@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
async def test_an_operator_killed_at_a_write_continues(setup: Setup, after: bool) -> None:
    # Before a write is the same as after the previous one, except for the first.
    for name in SCENARIOS if after else ("created", "gone", "upgraded"):
        await expected(setup, name)
        await prepare(setup, name)
        first, _ = (
            setup.proxy.fault(WRITE, skip=skip, hang=True, after=after, then=setup.restart) for skip in (after, 1)
        )
        for change in SCENARIOS[name].changes:
            setup.do(change)
        await wait_final_state(setup, name)
        assert not first.times


@pytest.mark.parametrize("description", WATCHES)
async def test_failing_watches_hide_no_changes(setup: Setup, description: str) -> None:
    for name, scenario in SCENARIOS.items():
        await expected(setup, name)
        await prepare(setup, name)
        for change in scenario.changes:
            setup.do(change)
        WATCHES[description](setup.proxy)
        await wait_final_state(setup, name)


async def test_a_request_without_response_is_retried(setup: Setup) -> None:
    name = "edited"
    await expected(setup, name)
    await prepare(setup, name)
    hanging = [setup.proxy.fault(f"^PATCH .*/{kind}", hang=True) for kind in ("daemonsets", "gpudeviceplugins")]
    for change in SCENARIOS[name].changes:
        setup.do(change)
    await wait_final_state(setup, name)
    assert not any(each.times for each in hanging)


async def test_idle_watches_hide_no_changes(setup: Setup) -> None:
    name = "edited"
    await expected(setup, name)
    await prepare(setup, name)
    setup.operator.kill()
    # As the command does, except for the watch timeouts.
    client = Client(load_config(str(setup.kubeconfig)), field_manager=MANAGER)
    watch_timeouts = WatchTimeouts(idle=2)
    manager = Manager(client, health_address=OFF, metrics_address=OFF, watch_timeouts=watch_timeouts)
    controllers(manager, FAMILIES, SETTINGS)
    watches = 3 * len(FAMILIES) + 1
    task = asyncio.create_task(manager.run())
    try:
        await until(lambda: setup.proxy.watches >= watches, 60)
        setup.proxy.pause_watches()
        for change in SCENARIOS[name].changes:
            setup.do(change)
        await wait_final_state(setup, name)
        manager.stop()
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
        setup.operator.begin()
