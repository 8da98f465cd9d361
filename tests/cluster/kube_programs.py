"""The program of the page about the controller runtime, its custom resource, and clients of the cluster."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import yaml
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import ConfigMap

from accelplane.kube.client import Client, load_config

from .cluster import Cluster
from .machine import wait_until

PAGE = Path(__file__).parents[2] / "docs" / "kube.md"
NAMESPACE = "greetings"
TEXTS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
GREETINGS = f"/apis/example.com/v1/namespaces/{NAMESPACE}/greetings"

CRD = yaml.safe_load(re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0])

# The program of the page, for several replicas, without fixed ports.
PROGRAM = """
import sys
sys.argv.pop(0)
page, identity = sys.argv
import asyncio, logging, re
names = {"__name__": "greeter"}
exec(re.search(r"^```python\\n(.*?)^```", open(page).read(), re.M | re.S)[1], names)
from accelplane.kube.client import Client, load_config
from accelplane.kube.leader import Election
from accelplane.kube.manager import OFF, Manager
logging.basicConfig(level=logging.INFO)
async def main():
    client = Client(load_config(), field_manager="greeter")
    election = None
    if identity:
        times = {"lease_duration": 4, "renew_deadline": 3, "retry_period": 0.5}
        election = Election(name="greeter", namespace="default", identity=identity, **times)
    manager = Manager(client, election=election, health_address=OFF, metrics_address=OFF)
    names["greeter"](manager)
    await manager.run()
asyncio.run(main())
"""


@asynccontextmanager
async def connected(cluster: Cluster) -> AsyncIterator[Client]:
    client = Client(load_config(str(cluster.kubeconfig)), field_manager="test")
    try:
        yield client
    finally:
        await client.close()


@contextmanager
def program(cluster: Cluster, identity: str = "") -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", PROGRAM, str(PAGE), identity]
    process = subprocess.Popen(command, env={"KUBECONFIG": str(cluster.kubeconfig), "PATH": cluster.path})
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def create_greeting(cluster: Cluster, name: str, greeting_name: str) -> None:
    greeting = {
        "apiVersion": "example.com/v1",
        "kind": "Greeting",
        "metadata": {"name": name},
        "spec": {"recipient": greeting_name},
    }
    found = cluster.get(f"{GREETINGS}/{name}")
    if found:
        status, answer = cluster.request("PUT", f"{GREETINGS}/{name}", {**found, "spec": {"recipient": greeting_name}})
    else:
        status, answer = cluster.request("POST", GREETINGS, greeting)
    assert status in {200, 201}, answer


def wait_text(cluster: Cluster, name: str, text: str, seconds: float = 30) -> None:
    def is_reached() -> bool:
        found = cluster.get(f"{TEXTS}/{name}")
        return (found and found["data"]["text"]) == text

    wait_until(is_reached, f"{name}: {text}", seconds)


def text(name: str, **data: str) -> ConfigMap:
    return ConfigMap(metadata=ObjectMeta(name=name, namespace=NAMESPACE, labels={"test": "runtime"}), data=data)
