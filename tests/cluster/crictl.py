"""crictl on a node, for programs of the product that need it there.

`make tools TOOLS=cri-tools` compiles the real one. Without it, a script on nodes with containerd executes commands in
containers by containerd's own client.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from .build import ClusterError, tool
from .node import Node
from .runtimes import CRIO, crio

CRICTL = "/opt/bin/crictl"

_SCRIPT = """#!/bin/sh
# crictl exec CONTAINER COMMAND...
[ "$1" = exec ] || exit 64
shift
exec {ctr} --namespace=k8s.io tasks exec --exec-id "onload-$$" "$@"
"""


def real_crictl() -> Path:
    """The compiled crictl. Raises `ClusterError` if it is not compiled."""
    program = tool("cri-tools", "crictl")
    if not program.exists():
        raise ClusterError("crictl: not found; run make tools TOOLS=cri-tools")
    return program


def require_crictl() -> None:
    """Skips the test without the real crictl; fails it if that is required."""
    try:
        real_crictl()
    except ClusterError as error:
        _skip(error)


def require_crio() -> None:
    """Skips the test without CRI-O or crictl; fails it if they are required."""
    try:
        crio()
        real_crictl()
    except ClusterError as error:
        _skip(error)


def install_crictl(node: Node) -> None:
    """Hardware of a node: crictl, and the configuration with which it finds the runtime."""
    target = node.path(CRICTL)
    target.parent.mkdir(parents=True, exist_ok=True)
    node.path("/etc/crictl.yaml").write_text(f"runtime-endpoint: unix://{node.plan.runtime.socket}\n")
    try:
        shutil.copy(real_crictl(), target)
    except ClusterError:
        if node.plan.runtime.name == CRIO:
            raise
        target.write_text(_SCRIPT.format(ctr=node.cluster.assets.program("ctr")))
        target.chmod(0o755)


def processes(node: Node, container: str) -> list[int]:
    """The processes of a container by their cgroups, the first one first. Their numbers are those of the node."""
    own = re.compile(rf"(?:.*[-:/])?(?<!conmon-){re.escape(container)}(?:\.scope)?")
    found: list[int] = []
    for directory in node.path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(own.fullmatch(line) for line in (directory / "cgroup").read_text().splitlines()):
                found.append(int(directory.name))
    return sorted(found)


def _skip(error: ClusterError) -> None:
    if os.environ.get("ACCELPLANE_CRIO") == "required":
        pytest.fail(str(error))
    pytest.skip(str(error))
