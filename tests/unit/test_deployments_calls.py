"""Roles of the trees and of the charts grant the calls that programs make, and no others."""

from typing import Any

import pytest
from apicalls import (
    ACCOUNTS,
    BIND,
    DEVICE_CLASSES,
    DRA,
    DRIVER_RIGHTS,
    DRIVER_ROLES,
    EVENTS,
    FPGA_NAMES,
    FPGA_NODE,
    GPU_MANAGER,
    REVIEWS,
    Call,
    calls,
)
from charts import template
from deployrights import granted_rights, trees_with_bindings
from manifests import DEPLOY, Object, render


def calls_of(objects: list[Object]) -> dict[str, set[Call]]:
    """The calls that the roles grant to each account."""
    return {
        account: {(each.group, each.resource, each.verb) for each in found}
        for account, found in granted_rights(objects).items()
    }


def test_roles_grant_the_calls_of_their_programs_and_no_others() -> None:
    granted: dict[tuple[str, str], set[Call]] = {}
    for tree in trees_with_bindings():
        for account, found in calls_of(render(DEPLOY / tree)).items():
            granted.setdefault((tree.partition("/")[0], account), set()).update(found)
    assert granted.keys() == ACCOUNTS.keys()
    for key, found in granted.items():
        assert found - ACCOUNTS[key] == set(), f"{key}: granted, but not used"
        assert ACCOUNTS[key] - found == set(), f"{key}: used, but not granted"


_FOR_GPUS = GPU_MANAGER | BIND
_FOR_CLAIMS = DRIVER_ROLES | DRIVER_RIGHTS | DEVICE_CLASSES
# The operator needs pods of its own namespace for other kinds, too. `operator.overlap` works without nodes.
_FOR_FPGAS = FPGA_NAMES - EVENTS - calls("", "pods", "list watch")


@pytest.mark.parametrize(
    ("devices", "unneeded"),
    [
        ({}, set[Call]()),
        ({"gpu": False}, set[Call]()),
        ({"gpu": True}, _FOR_FPGAS),
        ({"fpga": True, "qat": True}, _FOR_GPUS),
        ({"qat": True, "gpu": False}, _FOR_GPUS | _FOR_FPGAS),
    ],
    ids=["all", "none named", "gpu", "fpga and qat", "qat"],
)
def test_the_chart_of_the_operator_grants_the_calls_of_its_families(
    devices: dict[str, bool], unneeded: set[Call]
) -> None:
    granted = calls_of(template("intel-device-plugins-operator", manager={"devices": devices}))
    assert granted == {
        "controller-manager": ACCOUNTS["operator", "controller-manager"] - _FOR_CLAIMS - unneeded,
        "plugins": ACCOUNTS["operator", "plugins"],
    }


@pytest.mark.parametrize("family", ["gpu", "fpga", "qat"])
def test_operators_for_one_family_may_bind_the_role_of_gpu_plugins_only_for_gpus(family: str) -> None:
    granted = calls_of(render(DEPLOY / "operator/device" / family))["controller-manager"]
    assert _FOR_GPUS & granted == (_FOR_GPUS if family == "gpu" else set())


# Of agents that authorize the page.
_AGENTS = calls("", "/api/v1/* /status", "get")


@pytest.mark.parametrize(
    ("component", "tree", "account", "unneeded", "values"),
    [
        ("labels", "labels", "accelplane-labels", set[Call](), {}),
        ("fpgaWebhook", "fpga_admissionwebhook", "webhook", set[Call](), {}),
        ("sgxWebhook", "sgx_admissionwebhook", "webhook", set[Call](), {}),
        # Its metrics are not served to authorized clients only.
        ("onload", "onload", "controller-manager", REVIEWS, {}),
        ("fleet", "fleet", "accelplane-fleet", REVIEWS | _AGENTS, {}),
        ("fleet", "fleet", "accelplane-fleet", _AGENTS, {"fleet": {"tlsSecret": "tls"}}),
        ("fleet", "fleet", "accelplane-fleet", REVIEWS, {"fleet": {"agentAuthority": "ca"}}),
        ("agent", "accelplane_node", "accelplane-node", FPGA_NODE | DRA, {"agent": {"pages": {"tlsSecret": "tls"}}}),
    ],
)
def test_components_of_the_chart_accelplane_grant_the_calls_of_their_programs(
    component: str, tree: str, account: str, unneeded: set[Call], values: dict[str, Any]
) -> None:
    granted = calls_of(template("accelplane", components={"agent": False, component: True}, **values))
    assert granted[account] == ACCOUNTS[tree, account] - unneeded
    assert granted.keys() <= {name for directory, name in ACCOUNTS if directory == tree}
