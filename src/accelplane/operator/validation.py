"""What admission refuses of a custom resource, and what it warns of.

    verdict(plugin, policy, others=…, overlaps=…)    the first refusal in the order of Go's operator, and all warnings

Create and update are judged alike, without the old object. Where Go's releases differ, what one of them accepts is
accepted: an unset policy of GPUs counts as `none`, both spellings of init images do, and `packed` without
`sharedDevNum` is a warning. What concerns pods (tolerations, resources, …) is looked at last: what the API server would
refuse in the DaemonSet is refused here, where its author sees it. The definitions' own rules (CEL) say much of this
before, to those who have no webhook.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from accelplane.kube.names import is_dns_subdomain
from accelplane.operator import images
from accelplane.operator.models import (
    PCI_IDS,
    PROVISIONED_VF_DRIVERS,
    DevicePlugin,
    DlbSpec,
    DsaSpec,
    FpgaSpec,
    GpuDevicePlugin,
    GpuSpec,
    IaaSpec,
    QatSpec,
    SgxSpec,
)
from accelplane.operator.overlap import Overlap, told
from accelplane.operator.pods import pod_refusals
from accelplane.operator.settings import ImagePolicy

PREFIX = "invalid resource: "

# Go's releases after 0.31 expect names of init images that were never published.
_DLB_INIT = ("intel-dlb-initcontainer", "intel-dlb-initimage")
_FPGA_INIT = ("intel-fpga-initcontainer", "intel-fpga-initimage")
_IDXD_INIT = ("intel-idxd-config-initcontainer",)
_QAT_INIT = ("intel-qat-initcontainer",)
_SGX_INIT = ("intel-sgx-initcontainer",)
_GPU_INIT = ("intel-gpu-initcontainer",)

_LONGEST_NAME = 253
_LONGEST_SOCKET = 107
_SOCKET = re.compile(r"(/(?!\.\.?(/|\Z))[\w.-]+){2,}", re.ASCII)


class Verdict(msgspec.Struct, frozen=True):
    """`refusal` is empty when the resource is admitted; the warnings are for whoever applied it."""

    refusal: str = ""
    warnings: tuple[str, ...] = ()


class Warned(msgspec.Struct, frozen=True):
    """A finding that is no reason to refuse."""

    text: str


Finding = str | Warned


def verdict(
    plugin: DevicePlugin,
    policy: ImagePolicy,
    *,
    others: Iterable[DevicePlugin] = (),
    overlaps: Iterable[Overlap] = (),
) -> Verdict:
    """Judge a resource after defaulting.

    `others` are the cluster's resources of its kind, among which it may be; `overlaps` its own with them.
    """
    warnings: list[str] = []
    for finding in _findings(plugin, policy, [other for other in others if other.name != plugin.name]):
        if isinstance(finding, str):
            return Verdict(PREFIX + finding, tuple(warnings))
        warnings.append(finding.text)
    warnings += [told(each, plugin.name) for each in overlaps]
    return Verdict(warnings=tuple(warnings))


def _findings(plugin: DevicePlugin, policy: ImagePolicy, others: Sequence[DevicePlugin]) -> Iterator[Finding]:
    own = (f"intel-{plugin.family}-plugin",)
    match plugin.spec:
        case DlbSpec() as spec:
            yield from _image("initImage", spec.init_image, _DLB_INIT, policy, optional=True)
            yield from _image("image", spec.image, own, policy)
        case DsaSpec() | IaaSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _unprovisioned(spec, _IDXD_INIT)
            yield from _image("initImage", spec.init_image, _IDXD_INIT, policy, optional=True)
        case FpgaSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _image("initImage", spec.init_image, _FPGA_INIT, policy)
        case GpuSpec() as spec:
            yield from _gpu(spec, others)
            yield from _image("image", spec.image, own, policy)
            yield from _gpu_further(spec, policy)
        case QatSpec() as spec:
            yield from _image("initImage", spec.init_image, _QAT_INIT, policy, optional=True)
            yield from _qat(spec)
            yield from _image("image", spec.image, own, policy)
        case SgxSpec() as spec:
            yield from _image("image", spec.image, own, policy)
            yield from _image("initImage", spec.init_image, _SGX_INIT, policy, optional=True)
        case spec:
            yield from _image("image", spec.image, own, policy)
    longest = _LONGEST_NAME - len(f"{own[0]}-")
    if len(plugin.name) > longest:
        yield f"metadata.name has {len(plugin.name)} characters, expected {longest} or fewer: the DaemonSet's is longer"
    yield from pod_refusals(plugin.spec)


def _image(
    field: str, reference: str, names: Sequence[str], policy: ImagePolicy, *, optional: bool = False
) -> Iterator[Finding]:
    if optional and not reference:
        return
    if problem := images.refusal(reference, names, policy):
        yield f"{field} {problem}"
    elif older := images.below_minimum(reference, policy):
        if policy.older == "warn" and policy.upgrade != "off":
            yield Warned(f"{field} {older}: {images.upgraded(reference, policy)} runs instead")
        else:
            yield f"{field} {older}"


def _unprovisioned(spec: DsaSpec | IaaSpec | QatSpec, names: Sequence[str]) -> Iterator[Finding]:
    if spec.provisioning_config and not spec.init_image:
        yield (
            f"provisioningConfig is {spec.provisioning_config!a} and initImage is empty, expected an image of "
            f"{names[0]} in initImage"
        )
    if spec.provisioning_config and not is_dns_subdomain(spec.provisioning_config):
        yield f"provisioningConfig is {spec.provisioning_config!a}, expected the name of a ConfigMap"


def _qat(spec: QatSpec) -> Iterator[Finding]:
    yield from _unprovisioned(spec, _QAT_INIT)
    if spec.provisioning_config and not {*PROVISIONED_VF_DRIVERS} & {*spec.kernel_vf_drivers}:
        yield (
            f"provisioningConfig is {spec.provisioning_config!a} and kernelVfDrivers is "
            f"{','.join(spec.kernel_vf_drivers) or 'empty'}, expected one of {', '.join(PROVISIONED_VF_DRIVERS)} in it"
        )


def _gpu(spec: GpuSpec, others: Sequence[DevicePlugin]) -> Iterator[Finding]:
    """What Go's operator looks at before the image."""
    policy = spec.preferred_allocation_policy or "none"
    if policy != "none" and spec.shared_dev_num == 1:
        yield f"preferredAllocationPolicy is {policy} and sharedDevNum is 1, expected none or sharedDevNum above 1"
    if policy != "none" and spec.shared_dev_num is None:
        yield Warned(f"preferredAllocationPolicy {policy} has no effect without sharedDevNum above 1")
    if spec.resource_manager and spec.shared_dev_num == 1:
        yield "resourceManager is true and sharedDevNum is 1, expected false or sharedDevNum above 1"
    for other in others:
        if isinstance(other, GpuDevicePlugin) and other.spec.resource_manager != spec.resource_manager:
            here, there = (str(each.resource_manager).lower() for each in (spec, other.spec))
            yield f"resourceManager is {here}, but {there} in GpuDevicePlugin {other.name}, expected the same in all"
    for field, ids in (("allowIDs", spec.allow_ids), ("denyIDs", spec.deny_ids)):
        if ids and not re.fullmatch(PCI_IDS, ids):
            yield f"{field} is {ids!a}, expected PCI device ids like 0x56c0,0x56c1: lower case, no spaces"
    if spec.allow_ids and spec.deny_ids:
        yield f"allowIDs is {spec.allow_ids} and denyIDs is {spec.deny_ids}, expected one of them or none"


def _gpu_further(spec: GpuSpec, policy: ImagePolicy) -> Iterator[Finding]:
    """What Go's operator has no fields for, or never looks at."""
    if spec.level_zero_image:
        yield from _image("levelZeroImage", spec.level_zero_image, ("intel-gpu-levelzero",), policy)
    if spec.health_management and spec.xpumd_endpoint:
        yield f"healthManagement is true and xpumdEndpoint is {spec.xpumd_endpoint}, expected one of them or none"
    socket = spec.xpumd_endpoint
    if socket and (len(socket) > _LONGEST_SOCKET or not _SOCKET.fullmatch(socket)):
        yield f"xpumdEndpoint is {socket!a}, expected the path of a socket in a directory of its own, up to 107 bytes"
    for finding in _image("initImage", spec.init_image, _GPU_INIT, policy, optional=True):
        # Never looked at so far, and anything may have run there.
        yield Warned(finding) if isinstance(finding, str) else finding
