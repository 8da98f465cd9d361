"""Every kustomize tree, and every demo, is what a genuine API server takes for right, to the last field."""

from __future__ import annotations

from pathlib import Path

import pytest

from .cluster import Cluster
from .machine import REPOSITORY

pytestmark = pytest.mark.cluster

DEPLOY = REPOSITORY / "deploy"
# NFD's own tree lies elsewhere, and its rules are of a kind that comes with it.
TREES = sorted(
    file.parent for file in DEPLOY.rglob("kustomization.yaml") if "nfd" not in file.relative_to(DEPLOY).parts
)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.relative_to(DEPLOY)))
def test_the_api_server_accepts_a_tree(cluster: Cluster, namespace: str, tree: Path) -> None:
    words = ["--namespace", namespace, "--dry-run=server", "--validate=strict"]
    assert "created (server dry run)" in cluster.kubectl("apply", "--kustomize", tree, *words)


@pytest.mark.parametrize("demo", sorted((REPOSITORY / "demos").glob("*.yaml")), ids=lambda demo: demo.name)
def test_the_api_server_accepts_a_demo(cluster: Cluster, namespace: str, demo: Path) -> None:
    words = ["--namespace", namespace, "--dry-run=server", "--validate=strict"]
    assert "created (server dry run)" in cluster.kubectl("apply", "--filename", demo, *words)
