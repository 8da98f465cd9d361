"""crictl on a node, for the programs that need it there and for tests. `make kube` compiles it."""

from __future__ import annotations

import json
import shutil
from typing import Any

from .build import ClusterError, tool
from .cluster import Node

CRICTL = "/opt/bin/crictl"
_TOOL = "cri-tools"


def install_crictl(node: Node) -> None:
    """Hardware of a node: crictl, and the configuration with which it finds the runtime."""
    program = tool(_TOOL, "crictl")
    if not program.exists():
        raise ClusterError(f"{program}: not found; run make tools TOOLS={_TOOL}")
    target = node.path(CRICTL)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(program, target)
    node.path("/etc/crictl.yaml").write_text(f"runtime-endpoint: unix://{node.plan.runtime.socket}\n")


def inspect(node: Node, container: str) -> dict[str, Any]:
    """What the runtime says about a container. `info` differs between runtimes, but always has the `pid`."""
    return json.loads(node.run(CRICTL, "inspect", container).stdout)
