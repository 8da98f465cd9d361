"""What an installation of the operator decides for all custom resources: images, namespace, accounts."""

from collections.abc import Mapping
from typing import Literal

import msgspec

from accelplane.fpga.ids import Naming

# The oldest release whose images and manifests are taken, and what an image is upgraded to when nothing else is said.
OLDEST = "0.31.1"

Upgrade = Literal["spec", "daemonset", "off"]


class ImagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which images are accepted, filled in and replaced.

    `overrides` are the `<IMAGE>_SHA` variables of the environment by name. `upgrade` says where an upgraded reference
    goes: into the custom resource, into the DaemonSet alone, or nowhere. `older` says what happens to a version below
    `minimum` at admission; `warn` only counts while upgrades are on.
    """

    minimum: str = OLDEST
    target: str = ""
    vendor: str = "intel"
    overrides: Mapping[str, str] = {}
    upgrade: Upgrade = "spec"
    older: Literal["refuse", "warn"] = "refuse"

    @property
    def version(self) -> str:
        """What images are filled in with, and upgraded to."""
        return self.target or self.minimum

    def reference(self, name: str) -> str:
        """The image of that name which is used when none is given."""
        return f"{self.vendor}/{name}:{self.version}"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`pull_secret` (`DEVICEPLUGIN_SECRET`) and `service_account` are of the plugins' pods, empty for none.

    `gpu_manager_role` is the ClusterRole for GPU plugins with `resourceManager`. `fpga_naming` is how plugins and
    webhook call functions of FPGAs that are programmed already.
    """

    namespace: str = "kube-system"
    pull_secret: str = ""
    service_account: str = ""
    gpu_manager_role: str = "inteldeviceplugins-gpu-manager-role"
    images: ImagePolicy = ImagePolicy()
    fpga_naming: Naming = "default"


def overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """The image overrides of an environment."""
    return {name: value for name, value in environment.items() if name.endswith("_SHA") and value}
