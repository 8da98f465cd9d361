"""Pods that use SGX, of all kinds that the API server and the webhook treat differently; always the same for a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

Object = dict[str, Any]

EPC = "sgx.intel.com/epc"
RUNTIME_CLASS = "kata-qemu-sgx"
_AMOUNTS = ("1Mi", "512Ki", "1Ki", "1025", 4096, "1k", "1e3", "3000Ki", "2Gi", "5Ti", "900", "0.5Mi", "0")
_SOCKET_DIRECTORIES = ("/var/run/aesmd", "/run/q", "/run/r")
_NAMES = ("a", "b", "aesmd", "quoted", "c", "d", "e")


def sgx_pods(count: int, seed: int = 1) -> Iterator[Object]:
    """Pods of this seed. About one in ten is invalid."""
    chance = random.Random(seed)  # noqa: S311 - not a secret
    for _ in range(count):
        yield _pod(chance)


def _pod(chance: random.Random) -> Object:
    names = chance.sample(_NAMES, chance.randint(1, 6))
    main = chance.randint(1, len(names))
    volumes: list[Object] = [{"name": "v", "emptyDir": {}}]
    if chance.random() < 0.2:
        volumes.append({"name": "aesmd-socket", "emptyDir": {}})
    containers = [_container(chance, name) for name in names[:main]]
    inits = [_container(chance, name) | chance.choice([{}, {}, {"restartPolicy": "Always"}]) for name in names[main:]]
    mounted = {mount["name"] for each in (*containers, *inits) for mount in each.get("volumeMounts", ())}
    spec: Object = {"containers": containers, "automountServiceAccountToken": False}
    if inits:
        spec["initContainers"] = inits
    if "v" in mounted or len(volumes) > 1:
        spec["volumes"] = volumes
    if chance.random() < 0.1:
        spec["runtimeClassName"] = RUNTIME_CLASS
    annotations: Object = {}
    if chance.random() < 0.7:
        annotations["sgx.intel.com/quote-provider"] = chance.choice(["aesmd", "aesmd", "quoted", "a", "zzz", ""])
    if chance.random() < 0.1:
        annotations[EPC] = "7"
    if chance.random() < 0.3:
        annotations["example.com/x~y"] = "z"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "p-", **({"annotations": annotations} if annotations else {})},
        "spec": spec,
    }


def _container(chance: random.Random, name: str) -> Object:
    one: Object = {"name": name, "image": "x"}
    amounts: Object = {}
    if chance.random() < 0.6:
        amounts[EPC] = chance.choice(_AMOUNTS)
    for resource in ("sgx.intel.com/enclave", "sgx.intel.com/provision"):
        if chance.random() < 0.05:
            amounts[resource] = chance.choice(["1", "2"])
    if chance.random() < 0.3:
        amounts["cpu"] = "1500m"
    requests = dict(amounts)
    if amounts and chance.random() < 0.02:
        requests[chance.choice([*amounts])] = "1"
    if amounts and chance.random() < 0.02:
        amounts[EPC] = requests[EPC] = "1.5"
    if amounts:
        # The API server fills requests from limits.
        one["resources"] = {"limits": amounts, "requests": requests}
    if chance.random() < 0.3:
        one["env"] = chance.choices(
            [
                {"name": "SGX_AESM_ADDR", "value": "1"},
                {"name": "SGX_AESM_ADDR", "value": "2"},
                {"name": "SGX_AESM_ADDR", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
                {"name": "SGX_AESM_ADDR"},
                {"name": "X", "value": "y"},
            ],
            k=chance.randint(1, 3),
        )
    if chance.random() < 0.3:
        paths = chance.sample([*_SOCKET_DIRECTORIES, "/v", "/w"], chance.randint(1, 2))
        one["volumeMounts"] = [{"name": "v", "mountPath": path} for path in paths]
    return one
