"""The published double of the API server. `tests/cluster/test_api_behaviour.py` runs the same against a real one."""

import subprocess
import sys
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

import msgspec
import pytest
from apibehaviour import ALL, Connect

from accelplane.kube.client import Client
from accelplane.kube.testing import FakeApiServer, PatchError, apply_json_patch, apply_merge_patch
from accelplane.kube.testing.documents import deep_copy
from accelplane.operator.resources import DaemonSet


@pytest.mark.parametrize("behaviour", ALL, ids=lambda one: one.__name__)
async def test_the_test_double_behaves_as_the_api_server(behaviour: Callable[[Connect], Awaitable[None]]) -> None:
    clients: list[Client] = []
    async with FakeApiServer() as server:

        def connect(manager: str) -> Client:
            clients.append(Client(server.config, field_manager=manager))
            return clients[-1]

        try:
            await behaviour(connect)
        finally:
            for client in clients:
                await client.close()


def test_the_test_double_needs_only_packages_of_the_operator() -> None:
    script = (
        "import sys, accelplane.kube.client, accelplane.kube.manager; before = set(sys.modules)\n"
        "import accelplane.kube.testing\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= {'accelplane', *sys.stdlib_module_names}, new\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    ("document", "step", "expected"),
    [
        ({"a": [1, 2]}, {"op": "add", "path": "/a/0", "value": 0}, {"a": [0, 1, 2]}),
        ({"a": [1, 2]}, {"op": "add", "path": "/a/-", "value": 3}, {"a": [1, 2, 3]}),
        ({"a": [1, 2]}, {"op": "remove", "path": "/a/0"}, {"a": [2]}),
        ({"a": 1}, {"op": "copy", "from": "/a", "path": "/b"}, {"a": 1, "b": 1}),
        ({"a/b": {"~": 1}}, {"op": "replace", "path": "/a~1b/~0", "value": 2}, {"a/b": {"~": 2}}),
        ({"a": 1}, {"op": "replace", "path": "", "value": []}, []),
    ],
)
def test_json_patch_follows_rfc_6902(document: object, step: dict[str, object], expected: object) -> None:
    assert apply_json_patch(document, [step]) == expected


@pytest.mark.parametrize(
    "step",
    [
        {"op": "replace", "path": "/b", "value": 1},
        {"op": "remove", "path": "/b"},
        {"op": "remove", "path": "/a/2"},
        {"op": "add", "path": "/a/3", "value": 1},
        {"op": "add", "path": "/b/c", "value": 1},
        {"op": "add", "path": "/a/x", "value": 1},
        {"op": "test", "path": "/a", "value": 1},
        {"op": "add", "path": "/b"},
        {"op": "swap", "path": "/a"},
    ],
)
def test_json_patch_that_does_not_fit_changes_nothing(step: dict[str, object]) -> None:
    document = {"a": [1, 2]}
    with pytest.raises(PatchError):
        apply_json_patch(document, [{"op": "add", "path": "/x", "value": 1}, step])
    assert document == {"a": [1, 2]}


def test_merge_patch_follows_rfc_7386() -> None:
    assert apply_merge_patch({"a": {"b": 1, "c": 2}}, {"a": {"b": None}, "d": {"e": None, "f": 1}}) == {
        "a": {"c": 2},
        "d": {"f": 1},
    }
    assert apply_merge_patch({"a": [1]}, {"a": {"b": 1}}) == {"a": {"b": 1}}
    assert apply_merge_patch({"a": 1}, [1]) == [1]


class Phase(StrEnum):
    RUNNING = "Running"


@pytest.mark.parametrize("phase", ["Running", Phase.RUNNING])
def test_parts_of_a_copied_document_are_independent(phase: str) -> None:
    labels = {"a": ["b"]}
    original: Any = {"one": labels, "two": labels, "phase": phase}
    copied = deep_copy(original)
    assert copied == original
    copied["one"]["a"].append("c")
    assert copied["two"] == labels == {"a": ["b"]}


async def test_a_node_selector_is_atomic() -> None:
    """An apply replaces it as a whole: a key of another client does not stay."""
    metadata = {"name": "d", "namespace": "n"}
    desired: dict[str, Any] = {"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata}
    desired["spec"] = {"template": {"spec": {"nodeSelector": {"a": "1"}}}}
    found = {"metadata": metadata, "spec": {"template": {"spec": {"nodeSelector": {"b": "2"}}}}}
    async with FakeApiServer() as server:
        server.put("daemonsets", deep_copy(found))
        client = Client(server.config, field_manager="test")
        try:
            await client.apply(msgspec.convert(desired, DaemonSet))
        finally:
            await client.close()
        assert server.objects["daemonsets", "n", "d"]["spec"] == desired["spec"]
