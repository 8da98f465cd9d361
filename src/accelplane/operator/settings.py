"""Settings of an installation of the operator that apply to all custom resources: images, namespace, accounts.

Decision 0018 describes the names and versions of images.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

import accelplane
from accelplane.fpga.ids import Naming
from accelplane.operator.versions import is_original

RELEASE = accelplane.__version__
VENDOR = "accelplane"
# The registry and path of images before a release or `accelplane manifests --registry` sets it. Hosts of the domain
# invalid do not exist (RFC 6761), so the name cannot lead to images of others. Decision 0032.
PLACEHOLDER = f"set-your-registry.invalid/{VENDOR}"

# The Go project: the oldest release whose images are accepted, and the vendor of its images.
OLDEST = "0.31.1"
ORIGINAL_VENDOR = "intel"

Upgrade = Literal["spec", "daemonset", "off"]


class ImagePolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Which images are accepted, filled in and replaced.

    `minimum` is the oldest version that is accepted. Older images are replaced by `target`, or by default by `minimum`
    for images of the Go project and by `release` for others. `overrides` are the `<IMAGE>_SHA` variables of the
    environment by name. `digests` are those of `images.digests`, by name and tag. `upgrade` selects where a replaced
    reference is written: to the custom resource, only to the DaemonSet, or nowhere. `older` selects how admission
    treats a version below `minimum`; `warn` has no effect when `upgrade` is off.
    """

    minimum: str = OLDEST
    target: str = ""
    release: str = RELEASE
    vendor: str = PLACEHOLDER
    overrides: Mapping[str, str] = {}
    digests: Mapping[str, str] = {}
    upgrade: Upgrade = "spec"
    older: Literal["refuse", "warn"] = "refuse"

    def version(self, *, original: bool) -> str:
        """The version that images are filled in with and upgraded to, for images of the Go project or ours."""
        if self.target and is_original(self.target) == original:
            return self.target
        return self.minimum if original else self.release

    def reference(self, name: str) -> str:
        """The default image of that name."""
        return self.override(name) or self.default_reference(name)

    def default_reference(self, name: str) -> str:
        """The default image of that name without overrides."""
        vendor = self.vendor.rpartition("/")[2]
        version = self.version(original=vendor == ORIGINAL_VENDOR)
        if vendor != VENDOR:
            # Other vendors may have copies of either project's images.
            version = self.target or version
        return f"{self.vendor}/{name}:{version}"

    def override(self, name: str) -> str:
        """The image that replaces all images of that name; empty for none."""
        return "" if self.upgrade == "off" else self.overrides.get(variable_of(name), "")


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """`pull_secret` (`DEVICEPLUGIN_SECRET`) and `service_account` apply to the plugin pods; empty means none.

    `gpu_manager_role` is the ClusterRole for GPU plugins with `resourceManager`. `dra_role` and `dra_status_role` are
    those of plugins with `dra`, the second one with the device status of claims; empty if the operator must not grant
    them. `fpga_naming` selects how plugins and webhook name programmed FPGA functions.
    """

    namespace: str = "kube-system"
    pull_secret: str = ""
    service_account: str = ""
    gpu_manager_role: str = "inteldeviceplugins-gpu-manager-role"
    dra_role: str = ""
    dra_status_role: str = ""
    images: ImagePolicy = ImagePolicy()
    fpga_naming: Naming = "default"


def overrides(environment: Mapping[str, str]) -> dict[str, str]:
    """The image overrides of an environment."""
    return {name: value for name, value in environment.items() if name.endswith("_SHA") and value}


def variable_of(name: str) -> str:
    """Name of the environment variable that overrides the image of that name."""
    return f"{name.upper().replace('-', '_')}_SHA"
