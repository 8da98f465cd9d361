"""Validation of custom resources at admission: errors and warnings.

    verdict(plugin, policy, others=…, overlaps=…)    the first error in the order of the Go operator, and all warnings

Create and update are validated alike, without the old object. Only a `resourceManager` that differs from that of
another resource is a warning in an update: otherwise it could be changed in none of them. Where releases of the Go
operator differ, a resource is accepted if one of them accepts it: an unset allocation policy of GPUs counts as `none`,
both spellings of init images are valid, and `packed` without `sharedDevNum` is a warning. Fields of the pods
(tolerations, resources, …) are validated last, so that their author sees the error, and not only the operator that
writes the DaemonSet.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from accelplane.kube.names import is_dns_subdomain
from accelplane.kube.rules import broken
from accelplane.operator import images, rules
from accelplane.operator.daemonsets.dra import uses_dra
from accelplane.operator.features import unsupported_fields
from accelplane.operator.models import (
    DevicePlugin,
    DlbSpec,
    DsaSpec,
    FpgaSpec,
    GenericSpec,
    GpuDevicePlugin,
    GpuSpec,
    IaaSpec,
    QatSpec,
    SgxSpec,
)
from accelplane.operator.overlap import Overlap, format_overlap
from accelplane.operator.pods import pod_errors
from accelplane.operator.settings import PLACEHOLDER, ImagePolicy, variable_of
from accelplane.plugins.generic.config import DEFAULT_DOMAIN, MAX_DEVICE_TEXT, GenericConfig, binds

PREFIX = "invalid resource: "
_MAX_DRIVER = 63  # as the API server validates ResourceSlices
DRA_NOT_INSTALLED = (
    "dra is set, but the operator may not grant the rights for claims; apply deploy/operator/overlays/dra, or set "
    "manager.dra of the chart"
)

# Releases of the Go operator after 0.31 expect init image names that were never published.
_DLB_INIT = ("intel-dlb-initcontainer", "intel-dlb-initimage")
_FPGA_INIT = ("intel-fpga-initcontainer", "intel-fpga-initimage")
_IDXD_INIT = ("intel-idxd-config-initcontainer",)
_QAT_INIT = ("intel-qat-initcontainer",)
_SGX_INIT = ("intel-sgx-initcontainer",)
_GPU_INIT = ("intel-gpu-initcontainer",)
_LEVEL_ZERO = ("intel-gpu-levelzero",)

_MAX_NAME = 253
# Of all devices as arguments: an object of the API server has at most 1.5 MiB.
_MAX_DEVICES_TEXT = 512 * 1024


class Verdict(msgspec.Struct, frozen=True):
    """`refusal` is empty when the resource is admitted. The warnings are shown to the author."""

    refusal: str = ""
    warnings: tuple[str, ...] = ()


class ValidationWarning(msgspec.Struct, frozen=True):
    """A finding that does not refuse the resource."""

    text: str


Finding = str | ValidationWarning


def verdict(
    plugin: DevicePlugin,
    policy: ImagePolicy,
    *,
    others: Iterable[DevicePlugin] = (),
    overlaps: Iterable[Overlap] = (),
    is_update: bool = False,
    grants_dra: bool = True,
) -> Verdict:
    """Validates a resource after defaulting.

    `others` are the resources of its kind in the cluster, and may include it. `overlaps` are its own with them.
    `grants_dra`: the operator may grant the rights for claims.
    """
    warnings: list[str] = []
    if uses_dra(plugin) and not grants_dra:
        return Verdict(f"{PREFIX}{DRA_NOT_INSTALLED}")
    others = [other for other in others if other.name != plugin.name]
    for finding in _findings(plugin, policy, others, is_update=is_update):
        if isinstance(finding, str):
            return Verdict(PREFIX + finding, tuple(warnings))
        warnings.append(finding.text)
    warnings += unsupported_fields(images.upgrade(plugin, policy)[0], policy)
    warnings += (format_overlap(each, plugin.name) for each in overlaps)
    return Verdict(warnings=tuple(warnings))


def _findings(
    plugin: DevicePlugin, policy: ImagePolicy, others: Sequence[DevicePlugin], *, is_update: bool
) -> Iterator[Finding]:
    own = (f"intel-{plugin.family}-plugin",)
    match plugin.spec:
        case DlbSpec() as spec:
            yield from _image("initImage", spec.init_image, _DLB_INIT, policy, optional=True)
            yield from _image("image", spec.image, own, policy)
        case DsaSpec() | IaaSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _provisioning(spec, _IDXD_INIT, policy)
            yield from _image("initImage", spec.init_image, _IDXD_INIT, policy, optional=True)
        case FpgaSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _image("initImage", spec.init_image, _FPGA_INIT, policy)
        case GenericSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _generic(spec)
        case GpuSpec() as spec:
            yield from _gpu(spec, others, is_update=is_update)
            yield from _image("image", spec.image, own, policy)
            yield from _gpu_sidecars(spec, policy)
        case QatSpec() as spec:
            yield from _image("initImage", spec.init_image, _QAT_INIT, policy, optional=True)
            yield from _provisioning(spec, _QAT_INIT, policy)
            yield from broken(spec, rules.QAT)
            yield from _image("image", spec.image, own, policy)
        case SgxSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _image("initImage", spec.init_image, _SGX_INIT, policy, optional=True)
        case spec:
            yield from _image("image", spec.image, own, policy)
    longest = _MAX_NAME - len(f"{own[0]}-")
    if len(plugin.name) > longest:
        yield (
            f"metadata.name has {len(plugin.name)} characters, expected at most {longest} because it is part of the "
            "DaemonSet's name; choose a shorter name"
        )
    yield from broken(plugin.spec, (*rules.UPDATE_STRATEGY, *rules.DRA))
    yield from pod_errors(plugin.spec)


def _image(
    field: str, reference: str, names: Sequence[str], policy: ImagePolicy, *, optional: bool = False
) -> Iterator[Finding]:
    if optional and not reference:
        return
    advice = f"set {field} to {policy.reference(names[0])}"
    used = images.upgrade_reference(reference, policy)
    if error := images.reference_error(reference, names):
        yield f"{field} {error}; {advice}"
    elif error := images.version_error(reference, policy):
        if policy.older == "warn" and policy.upgrade != "off":
            yield ValidationWarning(
                f"{field} is {reference!a}, older than {policy.minimum}; the operator replaces it with {used}"
            )
        else:
            yield f"{field} {error}; {advice}"
    elif used != reference:
        name = images.parse(reference).image
        cause = f"{variable_of(name)} of the operator" if policy.override(name) else "the operator"
        yield ValidationWarning(f"{field} is {reference!a}; {cause} replaces it with {used}")
    elif images.parse(reference).repository == PLACEHOLDER:
        yield ValidationWarning(
            f"{field} is {reference!a}, whose registry does not exist; set {field}, and -image-vendor of the operator, "
            "to the registry with your images"
        )
    elif images.parse(reference).tag == images.DEVEL:
        yield ValidationWarning(
            f"{field} has tag devel in {reference!a}, which is no version and is never upgraded; {advice}"
        )


def _provisioning(spec: DsaSpec | IaaSpec | QatSpec, names: Sequence[str], policy: ImagePolicy) -> Iterator[Finding]:
    for error in broken(spec, (rules.NO_INIT_IMAGE,)):
        yield f"{error}; set initImage to {policy.reference(names[0])}"
    if spec.provisioning_config and not is_dns_subdomain(spec.provisioning_config):
        yield (
            f"provisioningConfig is {spec.provisioning_config!a}, expected the name of a ConfigMap; use only a-z, 0-9, "
            "- and ."
        )


def _generic(spec: GenericSpec) -> Iterator[Finding]:
    """Validation that the plugin performs at its start, and of the size of its arguments."""
    domain = spec.domain or DEFAULT_DOMAIN
    if spec.dra is not None and not (is_dns_subdomain(domain) and len(domain) <= _MAX_DRIVER):
        yield (
            f"domain is {domain[:80]!a}, expected at most {_MAX_DRIVER} characters of a-z, 0-9, - and . because it is "
            "the name of the driver with dra"
        )
    if not spec.devices:
        yield "devices is empty, expected one resource or more"
    try:
        GenericConfig(domain=domain, devices=spec.devices, cdi=spec.cdi or "auto")
    except ValueError as error:
        yield str(error)
    sizes = [len(msgspec.json.encode(device)) for device in spec.devices]
    if max(sizes, default=0) > MAX_DEVICE_TEXT or sum(sizes) > _MAX_DEVICES_TEXT:
        yield (
            f"devices has {sum(sizes)} bytes as JSON, expected at most {_MAX_DEVICES_TEXT}, and {MAX_DEVICE_TEXT} for "
            "each device; use several resources of this kind"
        )
    if binds(spec.devices):
        yield ValidationWarning(
            "bind needs a pod without the default profiles of AppArmor and SELinux, which deny writes to /sys; set "
            "podAnnotations for AppArmor"
        )


def _gpu(spec: GpuSpec, others: Sequence[DevicePlugin], *, is_update: bool) -> Iterator[Finding]:
    """Validation that the Go operator performs before that of the image."""
    yield from broken(spec, rules.GPU)
    policy = spec.preferred_allocation_policy or "none"
    if policy != "none" and spec.shared_dev_num is None:
        yield ValidationWarning(f"preferredAllocationPolicy {policy} has no effect without sharedDevNum above 1")
    for other in others:
        if isinstance(other, GpuDevicePlugin) and other.spec.resource_manager != spec.resource_manager:
            own, other_text = (str(each.resource_manager).lower() for each in (spec, other.spec))
            problem = (
                f"resourceManager is {own} and {other_text} in GpuDevicePlugin {other.name}, expected the same in all"
            )
            if is_update:
                yield ValidationWarning(f"{problem}; change {other.name} as well")
            else:
                yield f"{problem}; set resourceManager to {other_text} or change {other.name} first"
    yield from broken(spec, rules.GPU_IDS)


def _gpu_sidecars(spec: GpuSpec, policy: ImagePolicy) -> Iterator[Finding]:
    """Validation of fields that the Go operator does not have or does not validate."""
    if spec.level_zero_image:
        yield from _image("levelZeroImage", spec.level_zero_image, _LEVEL_ZERO, policy)
    yield from broken(spec, rules.GPU_HEALTH)
    for finding in _image("initImage", spec.init_image, _GPU_INIT, policy, optional=True):
        # The Go operator accepts any image here.
        yield ValidationWarning(finding) if isinstance(finding, str) else finding
