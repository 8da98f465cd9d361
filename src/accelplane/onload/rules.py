"""Rules about the spec of an Onload resource, with one message each for admission and for the API server.

    DEVICE_PLUGIN            about `spec.devicePlugin`
    SPEC                     about `spec`
    duration_errors(upgrade) about the times of `spec.upgrade`

The definition of the Go operator has one CEL rule, the first one here. The other rules with a CEL expression concern
fields that the Go operator does not have, or specs that it accepts and cannot realize: without kernel modules. All
others are evaluated at admission only. A spec that works with the Go operator is never rejected by the API server
itself.

Rules with a reason also prevent that the operator realizes the resource, which may be stored without admission.
"""

import re
from collections.abc import Iterator

from accelplane.kube.names import is_label_value
from accelplane.kube.rules import Rule, is_set
from accelplane.onload.models import DevicePluginSpec, Spec, UpgradeSpec, seconds, uses_kmm

_PULL_POLICIES = ("", "Always", "IfNotPresent", "Never")
_EXPECTED_POLICY = "expected Always, IfNotPresent or Never; change it or remove it"
_PERCENTAGE = "(100|[1-9][0-9]?)%"
_UNAVAILABLE = "upgrade.maxUnavailable"
DEFAULT_LIBRARY_PATH = "/usr/lib64"


def _no_node_is_upgraded(spec: Spec) -> bool:
    value = spec.upgrade and spec.upgrade.max_unavailable
    if isinstance(value, str):
        return not re.fullmatch(_PERCENTAGE, value)
    return value is not None and value < 1


def _library_paths_differ(spec: DevicePluginSpec) -> bool:
    """The API server sets the default of `libMounthPath`, so that its default contradicts nothing."""
    return spec.lib_mount_path is not None and spec.lib_mounth_path not in (
        None, DEFAULT_LIBRARY_PATH, spec.lib_mount_path,
    )  # fmt: skip


DEVICE_PLUGIN: tuple[Rule[DevicePluginSpec], ...] = (
    Rule(
        message="SetPreload and MountOnload mutually exclusive",
        broken=lambda spec: bool(spec.set_preload and spec.mount_onload and spec.preload is not False),
        # The default of setPreload is true: preload false was set by the author.
        cel="!(self.setPreload && self.mountOnload) || (has(self.preload) && !self.preload)",
        reason="InvalidSpec",
    ),
    Rule(
        message="devicePlugin.preload is true and setPreload is false, expected the same in both; remove preload",
        broken=lambda spec: spec.preload is True and spec.set_preload is False,
    ),
    Rule(
        message="devicePlugin.libMountPath is {libMountPath} and libMounthPath is {libMounthPath}, expected the same "
        "in both; remove libMountPath",
        broken=_library_paths_differ,
    ),
    Rule(
        message="devicePlugin.maxPodsPerNode is {maxPodsPerNode!s}, expected 0 or more; change it",
        broken=lambda spec: spec.max_pods_per_node is not None and spec.max_pods_per_node < 0,
    ),
    Rule(
        message=f"devicePlugin.imagePullPolicy is {{imagePullPolicy}}, {_EXPECTED_POLICY}",
        broken=lambda spec: spec.image_pull_policy not in _PULL_POLICIES,
    ),
)

SPEC: tuple[Rule[Spec], ...] = (
    Rule(
        message="onload.kernelMappings is empty, expected at least one mapping; add one, or set "
        "onload.moduleManagement to External if the modules are loaded by other means",
        broken=lambda spec: uses_kmm(spec.onload) and not spec.onload.kernel_mappings,
        cel="self.onload.moduleManagement == 'External' || size(self.onload.kernelMappings) > 0",
        reason="InvalidSpec",
    ),
    Rule(
        message="onload.moduleManagement is External and onload.kernelMappings is set, expected one of them; remove "
        "one",
        broken=lambda spec: not uses_kmm(spec.onload) and bool(spec.onload.kernel_mappings),
        cel="self.onload.moduleManagement != 'External' || size(self.onload.kernelMappings) == 0",
    ),
    Rule(
        message="onload.version is empty, expected a version that is a label value; set it",
        broken=lambda spec: not spec.onload.version,
        reason="InvalidVersion",
    ),
    Rule(
        message="onload.version is {onload.version}, expected a label value: at most 63 characters of A-Z, a-z, 0-9, "
        "-, _ and ., the first and last one a letter or a digit; change it",
        broken=lambda spec: bool(spec.onload.version) and not is_label_value(spec.onload.version),
        reason="InvalidVersion",
    ),
    Rule(
        message="onload.userImage is empty, expected an image with the Onload userland; set it",
        broken=lambda spec: not spec.onload.user_image,
    ),
    Rule(
        message=f"onload.imagePullPolicy is {{onload.imagePullPolicy}}, {_EXPECTED_POLICY}",
        broken=lambda spec: spec.onload.image_pull_policy not in _PULL_POLICIES,
    ),
    Rule(
        message=f"{_UNAVAILABLE} is {{{_UNAVAILABLE}!s}}, expected a number from 1 or a percentage from 1% to 100%; "
        "remove maxUnavailable for 1",
        broken=_no_node_is_upgraded,
        cel=f"!({is_set(_UNAVAILABLE)}) || (type(self.{_UNAVAILABLE}) == int ? self.{_UNAVAILABLE} >= 1 : "
        f"self.{_UNAVAILABLE}.matches('^{_PERCENTAGE}$'))",
    ),
)


def duration_errors(upgrade: UpgradeSpec | None) -> Iterator[str]:
    """Errors of the durations in `spec.upgrade`. An invalid one also prevents the reconciliation of the resource."""
    if upgrade is None:
        return
    for field, text in (("nodeTimeout", upgrade.node_timeout), ("evictionTimeout", upgrade.eviction_timeout)):
        try:
            if text is not None and seconds(text) <= 0:
                yield f"upgrade.{field} is {text}, expected more than 0; remove it for the default"
        except ValueError as error:
            yield f"upgrade.{field} is {error}; change it"
