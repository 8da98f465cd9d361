"""Fields of custom resources that images of older releases do not support.

    unsupported_fields(plugin, policy)    one line for each field that the images of a custom resource do not support

The operator passes these fields to the plugin as flags or to the init container as variables. A plugin does not start
with a flag that it does not know; an init container ignores an unknown variable. The versions are those of the Go
project's releases. Images with a digest, or with a tag that is no version, are not checked.
"""

from collections.abc import Iterator

import msgspec

from accelplane.operator import images, versions
from accelplane.operator.models import DevicePlugin, DsaSpec, GpuSpec, NpuSpec, PluginSpec, QatSpec, SgxSpec
from accelplane.operator.settings import PLACEHOLDER, ImagePolicy

# The release of the Go project without the resource manager of GPUs, and the first one of this project.
MANAGER_REMOVED, OURS = "0.34.0", "1.0.0"


class Feature(msgspec.Struct, frozen=True):
    """A field, its value, and the release from which the image in `image_field` supports it."""

    field: str
    value: str
    since: str
    image_field: str = "image"


def unsupported_fields(plugin: DevicePlugin, policy: ImagePolicy) -> tuple[str, ...]:
    """One line for each field that the images of a custom resource do not support, with the image to use instead."""
    named = images.named_images(plugin.spec)
    found: list[str] = []
    for feature in _features(plugin.spec):
        image = named.get(feature.image_field, "")
        if versions.is_below(images.parse(image).tag, feature.since):
            found.append(_message(feature, image, policy))
    if isinstance(plugin.spec, GpuSpec) and plugin.spec.resource_manager:
        found += _removed(plugin.spec.image, policy)
    return tuple(found)


def _removed(image: str, policy: ImagePolicy) -> Iterator[str]:
    """The Go project removed the resource manager, this project has it."""
    if not _lacks_manager(image):
        return
    desired = policy.reference("intel-gpu-plugin")
    if _lacks_manager(desired):
        desired = f"{PLACEHOLDER}/intel-gpu-plugin:{policy.release}"
    yield (
        f"resourceManager true needs image version {OURS} or newer, or one below {MANAGER_REMOVED}, found {image!a}; "
        f"set image to {desired}"
    )


def _lacks_manager(image: str) -> bool:
    tag = images.parse(image).tag
    return versions.is_original(tag) and not versions.is_below(tag, MANAGER_REMOVED)


def _message(feature: Feature, image: str, policy: ImagePolicy) -> str:
    used = images.parse(image)
    desired = policy.reference(used.image)
    if versions.is_below(images.parse(desired).tag, feature.since):
        desired = f"{used.name}:{feature.since}"
    field = feature.image_field
    subject = "plugin" if feature.field == field else f"{feature.field} {feature.value}"
    return f"{subject} needs {field} version {feature.since} or newer, found {image!a}; set {field} to {desired}"


def _features(spec: PluginSpec) -> Iterator[Feature]:
    """The features that a spec uses and that releases since 0.31.1 have added."""
    if spec.dra is not None:
        yield Feature("dra", spec.dra.api or "dra", OURS)
    match spec:
        case DsaSpec(driver="vfio-pci"):
            yield Feature("driver", spec.driver, "0.36.0")
            yield Feature("driver", spec.driver, "0.36.0", "initImage")
        case GpuSpec():
            # Without monitoring the operator does not pass the mode on.
            mode = spec.monitoring_mode if spec.enable_monitoring else None
            for field, value, since in (
                ("allowIDs", spec.allow_ids, "0.34.0"),
                ("denyIDs", spec.deny_ids, "0.34.0"),
                ("bypathMode", spec.bypath_mode, "0.34.1"),
                ("monitoringMode", mode, "0.36.0"),
                ("xpumdEndpoint", spec.xpumd_endpoint, "0.36.0"),
            ):
                if value:
                    yield Feature(field, value, since)
        case NpuSpec():
            yield Feature("image", spec.image, "0.34.0")
        case QatSpec() if "6xxxvf" in spec.kernel_vf_drivers:
            yield Feature("kernelVfDrivers", "6xxxvf", "0.34.0")
        case SgxSpec(dcap_infra_resources=True):
            yield Feature("dcapInfraResources", "true", "0.34.0")
        case _:
            return
