"""Device classes of FPGA functions and regions, and extended resource names that several classes have.

    fpga_classes(functions, regions)      the classes of AcceleratorFunctions and FpgaRegions, by name
    name_conflicts(classes, driver)       one line for each extended resource name that several classes have

The classes of other families are manifests (`deploy/dra`). The resources of FPGAs have the IDs of functions in their
names, so their classes depend on the names that the cluster has. Decision 0043.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from accelplane.admission.mappings import MODES, AcceleratorFunction, FpgaRegion, target_of
from accelplane.fpga.ids import NAMESPACE, IdError, Naming, canonical
from accelplane.kube.objects import GlobalResource, Metadata, api

LABELS = {"app.kubernetes.io/managed-by": "accelplane"}


class DeviceClass(GlobalResource, msgspec.Struct, kw_only=True, omit_defaults=True):
    """A device class with its complete spec, for comparison with the desired one."""

    metadata: Metadata
    spec: dict[str, object] = {}
    _api_info = api("resource.k8s.io", "v1", "DeviceClass", "deviceclasses")

    @property
    def extended_name(self) -> str:
        """The resource for which pods get a claim of this class, empty for none."""
        found = self.spec.get("extendedResourceName")
        return found if isinstance(found, str) else ""


def fpga_classes(
    functions: Iterable[AcceleratorFunction], regions: Iterable[FpgaRegion], naming: Naming = "default"
) -> Mapping[str, DeviceClass]:
    """The classes of these objects by name. An object without a resource has none: its status has the reason.

    A function of mode `af` and a region have the resource that the device plugin gives them. A function of mode
    `region` has a class that programs it, and no resource: its pods request the region's resource, and a claim for that
    does not name the function. So this region has a class without a resource.

    Of functions with the same IDs and different modes the oldest has the class, so that a later function of another
    namespace does not change it.
    """
    found: dict[str, DeviceClass] = {}
    programmed: set[str] = set()
    for function in sorted(functions, key=_age):
        resource, spec = _resource(function, naming), function.spec
        if not resource or spec.mode not in MODES:
            continue
        interface, afu = canonical(spec.interface_id), canonical(spec.afu_id)
        name = f"af-{interface}-{afu}.{NAMESPACE}"
        if spec.mode == "region":
            programmed.add(interface)
        if name in found:
            continue
        if spec.mode == "af":
            found[name] = _device_class(name, resource, type="port", interfaceId=interface, afuId=afu)
        else:
            found[name] = _device_class(name, "", program=afu, type="region", interfaceId=interface)
    for region in regions:
        resource, interface = _resource(region, naming), canonical(region.spec.interface_id)
        if resource:
            name = f"region-{interface}.{NAMESPACE}"
            found[name] = _device_class(
                name, "" if interface in programmed else resource, type="region", interfaceId=interface
            )
    return found


def name_conflicts(classes: Iterable[DeviceClass], driver: str) -> Sequence[str]:
    """One line for each extended resource name that several classes have, one of them of this driver.

    The scheduler uses the newest of these classes for pods that request the resource.
    """
    by_resource: dict[str, list[str]] = {}
    for each in classes:
        if each.extended_name:
            by_resource.setdefault(each.extended_name, []).append(each.metadata.name or "")
    return [
        f"extendedResourceName {resource} is set in the device classes {', '.join(sorted(names))}, expected one class; "
        "remove it from the others"
        for resource, names in sorted(by_resource.items())
        if len(names) > 1 and _concerns(driver, resource, names)
    ]


def _concerns(driver: str, resource: str, names: Iterable[str]) -> bool:
    return resource.startswith(f"{driver}/") or any(f".{name}".endswith(f".{driver}") for name in names)


def _age(function: AcceleratorFunction) -> tuple[str, str, str]:
    metadata = function.metadata
    return metadata.creationTimestamp or "", metadata.namespace or "", metadata.name or ""


def _resource(thing: AcceleratorFunction | FpgaRegion, naming: Naming) -> str:
    try:
        return target_of(thing, naming).resource
    except IdError:
        return ""


def _device_class(name: str, resource: str, *, program: str = "", **attributes: str) -> DeviceClass:
    """`program` is the function that claims of the class program. Selectors compare the driver first, and IDs are
    hexadecimal digits."""
    where = f'device.attributes["{NAMESPACE}"]'
    terms = [f'device.driver == "{NAMESPACE}"', *(f'{where}.{key} == "{value}"' for key, value in attributes.items())]
    spec: dict[str, object] = {"selectors": [{"cel": {"expression": " && ".join(terms)}}]}
    if resource:
        spec["extendedResourceName"] = resource
    if program:
        parameters = {"apiVersion": f"{NAMESPACE}/v1alpha1", "kind": "FpgaConfig", "afu": program}
        spec["config"] = [{"opaque": {"driver": NAMESPACE, "parameters": parameters}}]
    return DeviceClass(metadata=Metadata(name=name, labels=dict(LABELS)), spec=spec)
