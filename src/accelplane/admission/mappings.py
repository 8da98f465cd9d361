"""Names of FPGA functions and regions: the AcceleratorFunctions and FpgaRegions of a namespace.

A pod requests `fpga.intel.com/<object name>`. A function that is already programmed (mode `af`) has its own resource. A
function that is programmed for the pod (mode `region`) is a region and the function to program. An FpgaRegion is the
region alone, for pods that program it themselves. Pods cannot request what has no name in their namespace.

The names of a namespace are a function of its objects. They are computed again after each change.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Raw, Struct, field

from accelplane.fpga.ids import NAMESPACE, IdError, Naming, af_type, region_type, requested_id, resource
from accelplane.kube.admission import ALLOWED, Decision, Review, Validator
from accelplane.kube.cache import Cache
from accelplane.kube.objects import Metadata, NamespacedResource, api

GROUP = NAMESPACE
PREFIX = f"{NAMESPACE}/"
FUNCTION_PATH = "/validate-fpga-intel-com-v2-acceleratorfunction"
MODES = ("af", "region")

_PLACE = "namespace"
_NOTHING = Raw(b"null")
# The limit of the part of a resource name after the slash. Names of objects may be longer.
_LONGEST_NAME = 63


class FunctionSpec(Struct, frozen=True, rename="camel"):
    afu_id: str = ""
    interface_id: str = ""
    mode: str = ""


class RegionSpec(Struct, frozen=True, rename="camel"):
    interface_id: str = ""


class AcceleratorFunction(NamespacedResource, Struct, kw_only=True):
    """A function that pods of its namespace may request: the fields that are used, and the current status."""

    metadata: Metadata
    spec: FunctionSpec = field(default_factory=FunctionSpec)
    status: Raw = _NOTHING
    _api_info = api(GROUP, "v2", "AcceleratorFunction", "acceleratorfunctions")


class FpgaRegion(NamespacedResource, Struct, kw_only=True):
    """A region that pods of its namespace may request."""

    metadata: Metadata
    spec: RegionSpec = field(default_factory=RegionSpec)
    status: Raw = _NOTHING
    _api_info = api(GROUP, "v2", "FpgaRegion", "fpgaregions")


class Pair(Struct, frozen=True):
    """A region and the function to program into it, in the format of the hook's variables."""

    interface_id: str
    afu_id: str


class Target(Struct, frozen=True):
    """The target of a name: the resource of the kubelet, and the function to program."""

    resource: str
    mode: str
    pair: Pair | None = None


class Fault(Struct, frozen=True):
    """The reason why a name has no target: a word for programs, and a text."""

    reason: str
    text: str

    def __str__(self) -> str:
        return self.text


class Names(Struct, frozen=True):
    """The names that pods of one namespace may request.

    `faulty` are the names without a target, with the reason. `programmable` are the pairs that a pod may have in its
    own variables, by the resource of the region.
    """

    targets: Mapping[str, Target] = {}
    faulty: Mapping[str, Fault] = {}
    resources: frozenset[str] = frozenset()
    programmable: Mapping[str, frozenset[Pair]] = {}


NONE = Names()


def names_of(
    functions: Iterable[AcceleratorFunction], regions: Iterable[FpgaRegion], naming: Naming = "default"
) -> Names:
    """The names of these objects, which are all of one namespace."""
    targets: dict[str, Target] = {}
    faulty: dict[str, Fault] = {}
    found: list[Target] = []
    for each in functions:
        name = f"{PREFIX}{each.metadata.name}"
        try:
            targets[name] = target_of(each, naming)
        except IdError as error:
            faulty[name] = Fault("UnusableId", f"AcceleratorFunction {each.metadata.name!a}: {error}")
        else:
            found.append(targets[name])
    for each in regions:
        name = f"{PREFIX}{each.metadata.name}"
        twice = name in targets or name in faulty
        try:
            target = target_of(each, naming)
        except IdError as error:
            faulty[name] = Fault("UnusableId", f"FpgaRegion {each.metadata.name!a}: {error}")
        else:
            found.append(target)
            targets[name] = target
        if twice:
            targets.pop(name, None)
            faulty[name] = Fault(
                "NameConflict", f"there is an AcceleratorFunction and a FpgaRegion of the name {each.metadata.name!a}"
            )
    programmable: dict[str, set[Pair]] = {}
    for target in found:
        if target.pair is not None:
            programmable.setdefault(target.resource, set()).add(target.pair)
    return Names(
        targets,
        faulty,
        frozenset(target.resource for target in found),
        {region: frozenset(pairs) for region, pairs in programmable.items()},
    )


def target_of(thing: AcceleratorFunction | FpgaRegion, naming: Naming = "default") -> Target:
    """The target of one object. Raises `IdError`."""
    spec = thing.spec
    if isinstance(spec, RegionSpec):
        return Target(resource(region_type(spec.interface_id)), "regiondevel")
    if spec.mode == "af":
        return Target(resource(af_type(spec.interface_id, spec.afu_id, naming)), "af")
    region = resource(region_type(spec.interface_id))
    if spec.mode != "region":
        return Target(region, spec.mode)
    requested_id(spec.afu_id, "AFU id")  # otherwise the hook rejects it
    return Target(region, spec.mode, Pair(spec.interface_id, spec.afu_id))


def fault_of(thing: AcceleratorFunction | FpgaRegion, names: Names) -> Fault | None:
    """The reason why pods that request this object are denied, None if they are not."""
    name = thing.metadata.name or ""
    if isinstance(thing, AcceleratorFunction) and thing.spec.mode not in MODES:
        return Fault("UnknownMode", f"spec.mode: {thing.spec.mode[:40]!a}: expected one of {', '.join(MODES)}")
    if len(name) > _LONGEST_NAME:
        return Fault("NameTooLong", f"its name has {len(name)} characters, expected at most {_LONGEST_NAME}")
    return names.faulty.get(f"{PREFIX}{name}")


def checker(naming: Naming = "default") -> Validator[AcceleratorFunction]:
    """The webhook that warns about functions that pods cannot get. It denies nothing: stored objects can be edited."""

    def decide(_review: Review, function: AcceleratorFunction) -> Decision:
        fault = fault_of(function, names_of([function], [], naming))
        return Decision(warnings=[f"pods that request it are rejected: {fault}"]) if fault else ALLOWED

    return Validator(FUNCTION_PATH, AcceleratorFunction, decide)


class Mappings:
    """The names of all namespaces, from the caches of their objects."""

    def __init__(
        self, functions: Cache[AcceleratorFunction], regions: Cache[FpgaRegion], naming: Naming = "default"
    ) -> None:
        self.functions = functions
        self.regions = regions
        self.naming: Naming = naming
        self._known: dict[str, Names] = {}
        functions.add_index(_PLACE, _namespace)
        regions.add_index(_PLACE, _namespace)
        functions.subscribe(self._forget)
        regions.subscribe(self._forget)

    def of(self, namespace: str) -> Names:
        """The names of a namespace."""
        known = self._known.get(namespace)
        if known is None:
            functions = self.functions.by_index(_PLACE, namespace)
            regions = self.regions.by_index(_PLACE, namespace)
            if not functions and not regions:
                return NONE
            known = self._known[namespace] = names_of(functions, regions, self.naming)
        return known

    def _forget(
        self, old: AcceleratorFunction | FpgaRegion | None, new: AcceleratorFunction | FpgaRegion | None
    ) -> None:
        if old is not None and new is not None and old.spec == new.spec:
            return  # a status write, not a change of the spec
        for each in (old, new):
            if each is not None:
                self._known.pop(each.metadata.namespace or "", None)


def remove_metadata(thing: AcceleratorFunction | FpgaRegion) -> None:
    """Copies the fields that are used and the status, so that the decoded page can be freed."""
    thing.metadata.annotations = thing.metadata.labels = thing.metadata.managedFields = None
    thing.status = thing.status.copy()


def _namespace(thing: AcceleratorFunction | FpgaRegion) -> Sequence[str]:
    return [thing.metadata.namespace or ""]
