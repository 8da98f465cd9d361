"""Names for FPGA functions and regions: what the AcceleratorFunctions and FpgaRegions of a namespace stand for.

A pod asks for `fpga.intel.com/<object name>`. A function that is programmed already (mode `af`) has a resource of its
own; one that is programmed for the pod (mode `region`) is a region plus what to put into it; an FpgaRegion is the
region alone, for pods that program it themselves. What a namespace has no name for, its pods cannot have.

A namespace's names follow from its objects alone: they are made anew after each change, and nothing is counted.
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
# What may stand behind the slash in what a pod asks for; the names of objects may be longer.
_LONGEST_NAME = 63


class FunctionSpec(Struct, frozen=True, rename="camel"):
    afu_id: str = ""
    interface_id: str = ""
    mode: str = ""


class RegionSpec(Struct, frozen=True, rename="camel"):
    interface_id: str = ""


class AcceleratorFunction(NamespacedResource, Struct, kw_only=True):
    """A function for pods of its namespace, with the fields that decide. The status is what was said of it last."""

    metadata: Metadata
    spec: FunctionSpec = field(default_factory=FunctionSpec)
    status: Raw = _NOTHING
    _api_info = api(GROUP, "v2", "AcceleratorFunction", "acceleratorfunctions")


class FpgaRegion(NamespacedResource, Struct, kw_only=True):
    """A region for pods of its namespace."""

    metadata: Metadata
    spec: RegionSpec = field(default_factory=RegionSpec)
    status: Raw = _NOTHING
    _api_info = api(GROUP, "v2", "FpgaRegion", "fpgaregions")


class Pair(Struct, frozen=True):
    """A region and the function to program into it, as the hook is told."""

    interface_id: str
    afu_id: str


class Target(Struct, frozen=True):
    """What a name stands for: the resource that the kubelet knows, and how it comes to its function."""

    resource: str
    mode: str
    pair: Pair | None = None


class Fault(Struct, frozen=True):
    """Why a name stands for nothing: in a word for programs, and for people."""

    reason: str
    text: str

    def __str__(self) -> str:
        return self.text


class Names(Struct, frozen=True):
    """What pods of one namespace may ask for.

    `faulty` are names that stand for nothing, and why. `programmable` are the pairs that a pod which names its
    region itself may carry, by the region's resource.
    """

    targets: Mapping[str, Target] = {}
    faulty: Mapping[str, Fault] = {}
    resources: frozenset[str] = frozenset()
    programmable: Mapping[str, frozenset[Pair]] = {}


NONE = Names()


def names_of(
    functions: Iterable[AcceleratorFunction], regions: Iterable[FpgaRegion], naming: Naming = "default"
) -> Names:
    """What these objects, which are all of one namespace, stand for."""
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
    """What one object stands for by itself. Raises `IdError`."""
    spec = thing.spec
    if isinstance(spec, RegionSpec):
        return Target(resource(region_type(spec.interface_id)), "regiondevel")
    if spec.mode == "af":
        return Target(resource(af_type(spec.interface_id, spec.afu_id, naming)), "af")
    region = resource(region_type(spec.interface_id))
    if spec.mode != "region":
        return Target(region, spec.mode)
    requested_id(spec.afu_id, "AFU id")  # which the hook would refuse
    return Target(region, spec.mode, Pair(spec.interface_id, spec.afu_id))


def fault_of(thing: AcceleratorFunction | FpgaRegion, names: Names) -> Fault | None:
    """Why pods that ask for this object, which is one of those that have these names, are refused."""
    name = thing.metadata.name or ""
    if isinstance(thing, AcceleratorFunction) and thing.spec.mode not in MODES:
        return Fault("UnknownMode", f"spec.mode: {thing.spec.mode[:40]!a}: expected one of {', '.join(MODES)}")
    if len(name) > _LONGEST_NAME:
        return Fault("NameTooLong", f"its name has {len(name)} characters, pods can ask for at most {_LONGEST_NAME}")
    return names.faulty.get(f"{PREFIX}{name}")


def checker(naming: Naming = "default") -> Validator[AcceleratorFunction]:
    """The webhook that warns of functions no pod will get. It refuses none: those that are stored stay editable."""

    def decide(_review: Review, function: AcceleratorFunction) -> Decision:
        fault = fault_of(function, names_of([function], [], naming))
        return Decision(warnings=[f"pods that ask for it are refused: {fault}"]) if fault else ALLOWED

    return Validator(FUNCTION_PATH, AcceleratorFunction, decide)


class Mappings:
    """The names of every namespace, as the caches have its objects."""

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
        """What pods of a namespace may ask for."""
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
            return  # its status was written, and as many are as there are objects
        for each in (old, new):
            if each is not None:
                self._known.pop(each.metadata.namespace or "", None)


def own(thing: AcceleratorFunction | FpgaRegion) -> None:
    """Keeps of an object what decides, and its status, in memory of their own."""
    thing.metadata.annotations = thing.metadata.labels = thing.metadata.managedFields = None
    thing.status = thing.status.copy()


def _namespace(thing: AcceleratorFunction | FpgaRegion) -> Sequence[str]:
    return [thing.metadata.namespace or ""]
