"""Distribution of the cluster tests over processes: a pytest plugin, loaded by `make test-cluster`.

A group of files runs in one process without other files in between. Files that use the same shared cluster are one
group: one process starts that cluster, and ends it after the last of them. The order is that of the expected durations,
so that short files are left for the end. A file that is not named here is a group of its own, after the others.

With `ACCELPLANE_TURN` 0 or 1, functions with the marker `by_turns` run with every second of their parameters: two runs
with both turns run all. Continuous integration does so, to end within an hour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

import pytest
from xdist.scheduler import LoadFileScheduling

GROUPS = tuple(
    tuple(files.split())
    for files in (
        # `shared_families`, then `cluster` with the images.
        (
            "families families_agent provisioning operator_trees "
            "cert_manager helm_accelplane renamed_trees webhook_trees gpu_levelzero gpu_labels gpu_base generic clients"
        ),
        "onload_upgrade",
        "onload_rollouts",
        # `cluster`
        (
            "harness helm operator cli_cluster epc_and_labels operator_crds operator_daemonsets onload_crds "
            "deployments release"
        ),
        "framework_scenarios",
        # It waits for five minutes while the API server is stopped.
        "fleet_page",
        "vanished_devices",
        "kubelet_defects",
        # `dra_cluster`
        "dra_agent dra_node",
        "dra_scheduling",
        "dra_kubelet",
        "operator_life",
        "operator_edits",
        "fpga_attacks",
        "fpga",
        "onload_faults",
        "operator_faults",
        "operator_scale",
        "onload_samples",
        "levelzero",
        "webhook_bursts",
        "onload_node",
        "gpu_fractional",
        "operator_upgrade",
        "prometheus",
        "page_access",
        "onload_migration",
        "kube_runtime",
        "images",
        "kmm_emulated",
        "onload_emulated",
        "onload_operator_image",
        "emulated",
        "fpga_runtimes",
        "kmm_double",
    )
)

_GROUP = {name: files[0] for files in GROUPS for name in files}
_POSITION = {name: position for position, name in enumerate(name for files in GROUPS for name in files)}


def group(path: str) -> str:
    """The group of a file, by its path."""
    name = _name(path)
    return _GROUP.get(name, name)


def position(path: str) -> tuple[int, str]:
    """A sort key of files."""
    name = _name(path)
    return _POSITION.get(name, len(_POSITION)), name


def in_turn(functions: Sequence[str], turn: int) -> list[bool]:
    """Whether each test belongs to the turn, 0 or 1: every second one of its function. A single one belongs to both."""
    total, seen = Counter(functions), Counter[str]()
    found: list[bool] = []
    for function in functions:
        found.append(total[function] == 1 or seen[function] % 2 == turn)
        seen[function] += 1
    return found


def _name(path: str) -> str:
    return PurePath(path).stem.removeprefix("test_")


class GroupScheduling(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return group(super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> GroupScheduling:
    return GroupScheduling(config, log)  # type: ignore[arg-type]
