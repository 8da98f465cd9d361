"""Helm releases on a cluster, and what they leave in its API."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from charts import helm, with_hub

from .cluster import Cluster

Helm = Callable[..., subprocess.CompletedProcess[str]]
# Objects that controllers and the kubelet write at any time, that exist in every namespace, or that the API server
# creates for definitions.
_VOLATILE = ("event/", "event.events.k8s.io/", "lease.coordination.k8s.io/node-", "configmap/kube-root-ca.crt",
             "serviceaccount/default", "apiservice.")  # fmt: skip


def runner(cluster: Cluster, namespace: str, directory: Path) -> Helm:
    """Runs Helm for a namespace, with directories of its own. Charts get the registry of the images on the nodes."""
    homes = {f"HELM_{name}_HOME": str(directory / name) for name in ("CACHE", "CONFIG", "DATA")}
    environment = {**os.environ, **homes, "KUBECONFIG": str(cluster.kubeconfig)}

    def call(*words: str | Path) -> subprocess.CompletedProcess[str]:
        command = [helm(), "--namespace", namespace, *words]
        chart = next((each for each in words if isinstance(each, Path) and (each / "Chart.yaml").exists()), None)
        if chart:
            # The first values, so that those of the test take precedence.
            values = directory / f"hub-of-{chart.name}.json"
            values.parent.mkdir(parents=True, exist_ok=True)
            values.write_text(json.dumps(with_hub(chart, {})))
            command += ["--values", str(values)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)

    return call


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    """The output of a command, which must succeed."""
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    return result.stdout


def all_objects(cluster: Cluster, namespace: str) -> set[str]:
    """Kind and name of every object of the cluster and of this namespace, except volatile ones."""
    found: set[str] = set()
    for scope in ("true", "false"):
        kinds = cluster.kubectl("api-resources", "--verbs=list,delete", f"--namespaced={scope}", "--output=name")
        words = ["get", ",".join(kinds.split()), "--output=name", "--ignore-not-found"]
        found |= {*cluster.kubectl(*words, f"--namespace={namespace}").split()}
    return {each for each in found if not each.startswith(_VOLATILE)}
