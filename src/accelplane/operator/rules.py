"""Rules about the fields of specs, for admission and for the API server.

Only rules whose fields are all ours have a CEL expression. The definitions of the Go project have no CEL rules: without
a webhook, the API server accepts any combination of their fields, for example in objects that are restored from a
backup while no operator runs. Admission evaluates all rules.
"""

import re

from accelplane.kube.rules import Rule, is_set
from accelplane.operator.models import (
    PCI_IDS,
    PROVISIONED_VF_DRIVERS,
    DsaSpec,
    GpuSpec,
    IaaSpec,
    PluginSpec,
    QatSpec,
)

# sun_path of a Unix socket address holds 108 bytes, the last of which is 0.
MAX_SOCKET_PATH = 107
_SOCKET = "(/[A-Za-z0-9_.-]+){2,}"
_DOTS = "/[.]{1,2}(/|$)"
_PERCENTAGE = "(100|[1-9][0-9]?)%"


def _max_surge_is_set(spec: PluginSpec) -> bool:
    update = spec.update_strategy and spec.update_strategy.rolling_update
    for_claims = spec.dra is not None and spec.dra.is_exclusive
    return bool(update) and update.max_surge not in (None, 0, "0%") and not for_claims


def _no_pod_is_replaced(spec: PluginSpec) -> bool:
    update = spec.update_strategy and spec.update_strategy.rolling_update
    value = update.max_unavailable if update else None
    if isinstance(value, str):
        return not re.fullmatch(_PERCENTAGE, value)
    return value is not None and value < 1


_SURGE = "updateStrategy.rollingUpdate.maxSurge"
# No device has a resource, as `Dra.is_exclusive`.
_FOR_CLAIMS = (
    "has(self.dra) && !(has(self.dra.api) && self.dra.api == 'plugin') && "
    "(!has(self.dra.devices) || !self.dra.devices.exists(each, self.dra.devices[each] == 'plugin'))"
)
_ADDRESS = "[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]"
_UNAVAILABLE = "updateStrategy.rollingUpdate.maxUnavailable"

UPDATE_STRATEGY: tuple[Rule[PluginSpec], ...] = (
    Rule(
        message="updateStrategy.type is OnDelete and rollingUpdate is set, expected one of them; remove rollingUpdate",
        broken=lambda spec: bool(
            spec.update_strategy and spec.update_strategy.type == "OnDelete" and spec.update_strategy.rolling_update
        ),
        cel=f"!({is_set('updateStrategy.type')} && self.updateStrategy.type == 'OnDelete' && "
        "has(self.updateStrategy.rollingUpdate))",
    ),
    Rule(
        message=f"{_SURGE} is {{{_SURGE}!s}}, expected 0 because two plugin pods on a node register the same "
        "resources; remove maxSurge",
        broken=_max_surge_is_set,
        cel=f"!({is_set(_SURGE)}) || self.{_SURGE} == 0 || self.{_SURGE} == '0%' || {_FOR_CLAIMS}",
    ),
    Rule(
        message=f"{_UNAVAILABLE} is {{{_UNAVAILABLE}!s}}, expected a number from 1 or a percentage from 1% to 100%; "
        "remove maxUnavailable for 1",
        broken=_no_pod_is_replaced,
        cel=f"!({is_set(_UNAVAILABLE)}) || (type(self.{_UNAVAILABLE}) == int ? self.{_UNAVAILABLE} >= 1 : "
        f"self.{_UNAVAILABLE}.matches('^{_PERCENTAGE}$'))",
    ),
)

DRA: tuple[Rule[PluginSpec], ...] = (
    Rule(
        message="dra.devices has a key that is not a PCI address, expected for example 0000:03:00.0 in lower case; "
        "correct it",
        broken=lambda spec: bool(spec.dra) and not all(re.fullmatch(_ADDRESS, key) for key in spec.dra.devices),
        cel=f"!({is_set('dra.devices')}) || self.dra.devices.all(each, each.matches('^{_ADDRESS}$'))",
    ),
)

GPU_HEALTH: tuple[Rule[GpuSpec], ...] = (
    Rule(
        message="healthManagement is true and xpumdEndpoint is {xpumdEndpoint}, expected one of them; remove one",
        broken=lambda spec: bool(spec.health_management and spec.xpumd_endpoint),
        cel="!(has(self.healthManagement) && self.healthManagement && has(self.xpumdEndpoint) && "
        "self.xpumdEndpoint != '')",
    ),
    Rule(
        message="xpumdEndpoint is {xpumdEndpoint}, expected the absolute path of a socket in its own directory, "
        f"up to {MAX_SOCKET_PATH} bytes; set for example /run/xpumd/intelxpuinfo.sock",
        broken=lambda spec: bool(spec.xpumd_endpoint and not _is_socket_path(spec.xpumd_endpoint)),
        cel="!has(self.xpumdEndpoint) || self.xpumdEndpoint == '' || "
        f"self.xpumdEndpoint.matches('^{_SOCKET}$') && !self.xpumdEndpoint.matches('{_DOTS}')",
    ),
)


def _is_socket_path(path: str) -> bool:
    fits = len(path) <= MAX_SOCKET_PATH and re.fullmatch(_SOCKET, path)
    return bool(fits) and not re.search(_DOTS, path)


# Rules about fields of the Go project.

_IDS = "expected PCI device ids in lower case and without spaces; write for example 0x56c0,0x56c1"

GPU: tuple[Rule[GpuSpec], ...] = (
    Rule(
        message="preferredAllocationPolicy is {preferredAllocationPolicy} and sharedDevNum is 1, expected policy none; "
        "set sharedDevNum above 1 or remove preferredAllocationPolicy",
        broken=lambda spec: spec.shared_dev_num == 1 and spec.preferred_allocation_policy in ("balanced", "packed"),
    ),
    Rule(
        message="resourceManager is true and sharedDevNum is 1, expected false; "
        "set sharedDevNum above 1 or remove resourceManager",
        broken=lambda spec: spec.resource_manager and spec.shared_dev_num == 1,
    ),
    Rule(
        message="resourceManager is true and dra is set, expected one of them; remove one",
        broken=lambda spec: spec.resource_manager and spec.dra is not None,
    ),
)

GPU_IDS: tuple[Rule[GpuSpec], ...] = (
    Rule(message=f"allowIDs is {{allowIDs}}, {_IDS}", broken=lambda spec: _are_not_ids(spec.allow_ids)),
    Rule(message=f"denyIDs is {{denyIDs}}, {_IDS}", broken=lambda spec: _are_not_ids(spec.deny_ids)),
    Rule(
        message="allowIDs is {allowIDs} and denyIDs is {denyIDs}, expected one of them; remove one",
        broken=lambda spec: bool(spec.allow_ids and spec.deny_ids),
    ),
)


def _are_not_ids(text: str) -> bool:
    return bool(text) and not re.fullmatch(PCI_IDS, text)


NO_INIT_IMAGE: Rule[DsaSpec | IaaSpec | QatSpec] = Rule(
    message="provisioningConfig is {provisioningConfig} and initImage is empty, "
    "expected the image of the init container that applies it",
    broken=lambda spec: bool(spec.provisioning_config and not spec.init_image),
)

QAT: tuple[Rule[QatSpec], ...] = (
    Rule(
        message="provisioningConfig is {provisioningConfig} and kernelVfDrivers is {kernelVfDrivers!s}, expected at "
        f"least one of {', '.join(PROVISIONED_VF_DRIVERS)}; add it or remove provisioningConfig",
        broken=lambda spec: bool(
            spec.provisioning_config and not {*PROVISIONED_VF_DRIVERS} & {*spec.kernel_vf_drivers}
        ),
    ),
)
