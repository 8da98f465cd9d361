"""The memory of the caches of the Onload operator. The budget of the program is 80 MB with 1,000 nodes."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from accelplane.kube.cache import Cache
from accelplane.kube.client import Selection
from accelplane.kube.objects import Object
from accelplane.onload.resources import Node, Pod, node_only, pod_only

MANY = 1000
pytestmark = pytest.mark.untraced


def node(index: int) -> dict[str, Any]:
    features = {f"feature.node.kubernetes.io/cpu-{number}": "true" for number in range(60)}
    conditions = [{"type": each, "status": "False", "message": "m" * 50} for each in ("Ready", "MemoryPressure")]
    images = [{"names": [f"registry/image-{number}@sha256:{'a' * 64}"]} for number in range(50)]
    return {
        "metadata": {
            "name": f"node-{index}",
            "resourceVersion": str(index),
            "labels": {**features, "kubernetes.io/hostname": f"node-{index}"},
            "annotations": {f"example.com/a{number}": "x" * 100 for number in range(10)},
        },
        "status": {"conditions": conditions, "images": images, "allocatable": {"cpu": "1", "memory": "1"}},
    }


def pod(index: int) -> dict[str, Any]:
    variables = [{"name": f"E{number}", "value": "v" * 20} for number in range(10)]
    container = {"name": "main", "env": variables, "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"app-{index}", "uid": "1", "controller": True}
    return {
        "metadata": {
            "name": f"app-{index}-7d9f8b6c5d-x2k4p",
            "namespace": "apps",
            "uid": f"0a0a0a0a-{index}",
            "resourceVersion": str(index),
            "labels": {"app": f"app-{index}", "pod-template-hash": "7d9f8b6c5d"},
            "ownerReferences": [owner],
        },
        "spec": {"nodeName": f"node-{index % 50}", "containers": [container]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]},
    }


def bytes_each(kind: type[Object], transform: Callable[[Any], None], make: Callable[[int], dict[str, Any]]) -> float:
    cache = Cache(kind, Selection(), asyncio.Event(), transform=transform)
    documents = [json.dumps(make(index)).encode() for index in range(MANY)]
    gc.collect()
    tracemalloc.start()
    try:
        for document in documents:
            cache.store(msgspec.Raw(document))
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(cache) == MANY
    return used / MANY


def test_pods_that_do_not_concern_onload_are_small() -> None:
    assert bytes_each(Pod, pod_only, pod) < 800


def test_a_cached_node_needs_only_the_memory_of_its_labels() -> None:
    assert bytes_each(Node, node_only, node) < 5000
