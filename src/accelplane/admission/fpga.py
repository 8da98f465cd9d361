"""Pods that use FPGAs: they ask for a function or a region by a name of their namespace, and get what it stands for.

The names (`mappings`) are replaced by the resources that the kubelet counts. Where a function is programmed for the
pod, variables tell the programming hook which one goes into which region: they are ours, so nobody else sets them. A
pod that was changed by this already passes unchanged.

Init containers are treated like containers. What has no FPGA in it is let through, less variables of the hook's.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import msgspec
from msgspec import Raw, Struct

from accelplane.admission.mappings import PREFIX, Names, Pair, Target
from accelplane.fpga.ids import AFU_VARIABLE, REGION_VARIABLE
from accelplane.kube.admission import ALLOWED, Decision, Mutator, Review, deny
from accelplane.kube.jsonpatch import Operation, Word, pointer
from accelplane.kube.quantities import Quantity, QuantityError, parse

PATH = "/pods"

_RESERVED = (REGION_VARIABLE.rstrip("_"), AFU_VARIABLE.rstrip("_"))
_NUMBERED = re.compile(rf"({REGION_VARIABLE}|{AFU_VARIABLE})[1-9][0-9]{{0,4}}", re.ASCII)
_REGIONS = f"{PREFIX}region-"
_NOTHING = Raw(b"null")
# What a pod asks for, in all of its containers, is written out as variables; no node has so many regions.
_MOST_UNITS = 1000
# What a pod of 3 MB can ask for holds a server up for seconds.
_MOST_OPERATIONS = 10_000


class Resources(Struct, frozen=True):
    limits: Mapping[str, Quantity] | None = None
    requests: Mapping[str, Quantity] | None = None


class Container(Struct, frozen=True, rename="camel"):
    name: str = ""
    resources: Resources | None = None
    env: Raw = _NOTHING
    env_from: Raw = _NOTHING


class PodSpec(Struct, frozen=True, rename="camel"):
    containers: Sequence[Container] | None = None
    init_containers: Sequence[Container] | None = None


class Metadata(Struct, frozen=True):
    namespace: str = ""


class Pod(Struct, frozen=True):
    """The part of a pod that decides. Variables stay as they came: most are of no interest, and there may be many."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()


class _Variable(Struct, frozen=True):
    name: str = ""
    value: Raw = _NOTHING


_VARIABLES = msgspec.json.Decoder(list[Raw] | None)
_VARIABLE = msgspec.json.Decoder(_Variable)
_TEXT = msgspec.json.Decoder(str)


class _Refused(Exception):
    """What cannot be; the text is for the user."""


def mutator(names: Callable[[str], Names], complete: Callable[[], bool] = lambda: True) -> Mutator[Pod]:
    """The webhook. `names` tells what pods of a namespace may ask for, `complete` whether all of them were read.

    Manifests without a readiness probe have it asked before. Refusals come then from not knowing yet; whoever makes
    pods for others tries again after one, while nobody mends what was let through.
    """

    def decide(review: Review, pod: Pod) -> Decision:
        if (review.kind.group, review.kind.kind) != ("", "Pod"):
            return _denied(f"expected a Pod, found {review.kind.kind[:80]!a}")
        namespace = pod.metadata.namespace or review.namespace
        decision = mutate(pod, names(namespace), namespace)
        if decision.denial is not None and not complete():
            return deny(
                "the names of functions and regions of FPGAs are still being read; try again in a moment",
                code=503, reason="ServiceUnavailable",
            )  # fmt: skip
        return decision

    return Mutator(PATH, Pod, decide)


def mutate(pod: Pod, names: Names, namespace: str = "") -> Decision:
    """What becomes of a pod in a namespace of these names."""
    operations: list[Operation] = []
    warnings: list[str] = []
    units = 0
    for field, containers in (("initContainers", pod.spec.init_containers), ("containers", pod.spec.containers)):
        for index, container in enumerate(containers or ()):
            where = ("spec", field, index)
            try:
                requested = _requested(container.resources) if container.resources is not None else {}
                units += sum(requested.values())
                if units > _MOST_UNITS:
                    raise _Refused(
                        f"the pod asks for {units} FPGA resources up to here, expected at most {_MOST_UNITS} in all"
                    )
                operations += _mutated(container, requested, where, names, namespace, warnings=warnings)
                if len(operations) > _MOST_OPERATIONS:
                    raise _Refused(f"the pod takes more than {_MOST_OPERATIONS} changes up to here")
            except _Refused as error:
                return _denied(f"container {container.name[:63]!a}: {error}")
    return Decision(operations, warnings=warnings) if operations or warnings else ALLOWED


def _denied(message: str) -> Decision:
    return deny(message, code=400, reason="BadRequest")


def _mutated(
    container: Container,
    requested: Mapping[str, int],
    where: tuple[Word, ...],
    names: Names,
    namespace: str,
    *,
    warnings: list[str],
) -> Iterator[Operation]:
    """Raises `_Refused`."""
    aliases = {name: _target(name, names, namespace) for name in sorted(requested) if name not in names.resources}
    regions = {name: units for name, units in requested.items() if name not in aliases and name.startswith(_REGIONS)}
    pairs = _pairs(aliases, requested)
    reserved, kept = _variables_of(container.env) if requested or _may_be_reserved(container.env) else ([], [])
    if regions and not aliases and reserved:
        _check_programmed(reserved, regions, names)
        reserved = []
    if aliases:
        yield from _translated(where, aliases, requested)
    if pairs or reserved:
        yield Operation("add", pointer(*where, "env"), [*_variables(pairs), *kept])
    resources = (aliases[name].resource if name in aliases else name for name, units in requested.items() if units)
    if bytes(container.env_from) not in (b"null", b"[]") and any(
        resource.startswith(_REGIONS) for resource in resources
    ):
        warnings.append(
            f"container {container.name[:63]!a}: {REGION_VARIABLE}… and {AFU_VARIABLE}… from envFrom may make it fail "
            "to start; what its region is programmed with is the namespace's to say"
        )


def _requested(resources: Resources) -> dict[str, int]:
    """The FPGA resources of a container and how many of each. Raises `_Refused`."""
    limits, requests = resources.limits or {}, resources.requests or {}
    found: dict[str, int] = {}
    for name in sorted({name for name in (*limits, *requests) if name.startswith(PREFIX)}):
        limit, request = limits.get(name), requests.get(name)
        number = _number(name, limit)
        if number is None or number != _number(name, request):
            raise _Refused(
                f"{_shown(name)}: limits and requests have to be the same (limits: {_quantity(limit)}, requests: "
                f"{_quantity(request)})"
            )
        if number.denominator != 1 or not 0 <= number <= _MOST_UNITS:
            raise _Refused(f"{_shown(name)}: {_quantity(limit)} is not a whole number from 0 to {_MOST_UNITS}")
        found[name] = int(number)
    return found


def _number(name: str, quantity: Quantity | None) -> Fraction | None:
    """Raises `_Refused`."""
    try:
        return None if quantity is None else parse(quantity)
    except QuantityError as error:
        raise _Refused(f"{_shown(name)}: {error}") from None


def _target(name: str, names: Names, namespace: str) -> Target:
    """What an alias stands for. Raises `_Refused`."""
    target = names.targets.get(name)
    if target is not None and target.mode in ("af", "region", "regiondevel"):
        return target
    if target is not None:
        raise _Refused(f"{_shown(name)}: mode of the AcceleratorFunction is {target.mode[:40]!a}, not af or region")
    if name in names.faulty:
        raise _Refused(f"{_shown(name)}: {names.faulty[name]}")
    raise _Refused(
        f"{_shown(name)}: namespace {namespace[:63]!a} has no AcceleratorFunction and no FpgaRegion that gives it"
    )


def _pairs(aliases: Mapping[str, Target], requested: Mapping[str, int]) -> list[Pair]:
    """What is to be programmed, a pair for each unit. Raises `_Refused`."""
    modes = {target.mode for target in aliases.values()}
    if len(modes) > 1:
        found = ", ".join(f"{_shown(name)} ({target.mode})" for name, target in aliases.items())
        raise _Refused(f"all FPGA resources of a container have to be of one mode: {found[:400]}")
    return [target.pair for name, target in aliases.items() if target.pair for _ in range(requested[name])]


def _may_be_reserved(env: Raw) -> bool:
    """Whether one of them may be ours, also where its letters are written as escapes, as the API server never does.

    What is no list may be anything.
    """
    text = bytes(env)
    return b"FPGA_" in text or b"\\u" in text or not text.startswith((b"[", b"null"))


def _variables_of(env: Raw) -> tuple[list[_Variable], list[Raw]]:
    """The reserved variables, and the others as they came. Raises `_Refused`."""
    reserved: list[_Variable] = []
    kept: list[Raw] = []
    try:
        for each in _VARIABLES.decode(env) or ():
            variable = _VARIABLE.decode(each)
            if variable.name.startswith(_RESERVED):
                reserved.append(variable)
            else:
                kept.append(each)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _Refused(f"its variables cannot be decoded: {error}") from None
    return reserved, kept


def _variables(pairs: Sequence[Pair]) -> Iterator[Mapping[str, object]]:
    for number, pair in enumerate(pairs, 1):
        yield {"name": f"{REGION_VARIABLE}{number}", "value": pair.interface_id}
        yield {"name": f"{AFU_VARIABLE}{number}", "value": pair.afu_id}


def _translated(
    where: tuple[Word, ...], aliases: Mapping[str, Target], requested: Mapping[str, int]
) -> Iterator[Operation]:
    """Takes the aliases away and asks for what they stand for, together with what is asked for by its own name."""
    totals: Counter[str] = Counter()
    for name, target in aliases.items():
        totals[target.resource] += requested[name]
        for field in ("limits", "requests"):
            yield Operation("remove", pointer(*where, "resources", field, name))
    for resource, units in sorted(totals.items()):
        for field in ("limits", "requests"):
            total = str(units + requested.get(resource, 0))
            yield Operation("add", pointer(*where, "resources", field, resource), total)


def _check_programmed(reserved: Sequence[_Variable], regions: Mapping[str, int], names: Names) -> None:
    """Whether the variables are such as this webhook sets: functions of the namespace, for units that are asked for.

    There may be more units than functions: who asks for a region by its own name beside a function's, which stands for
    the same, has the sum of both, and what was mutated so comes again. Raises `_Refused`.
    """
    values: dict[str, str] = {}
    for each in reserved:
        name, value = each.name, _text(each.value)
        if not _NUMBERED.fullmatch(name) or name in values or value is None:
            raise _Refused(f"variable {name[:63]!a} is reserved for programming FPGAs")
        values[name] = value
    try:
        pairs = [
            Pair(values.pop(f"{REGION_VARIABLE}{number}"), values.pop(f"{AFU_VARIABLE}{number}"))
            for number in range(1, len(values) // 2 + 1)
        ]
    except KeyError as missing:
        raise _Refused(f"variable {missing} is not set, and others like it are: expected pairs from 1 on") from None
    for name in values:
        raise _Refused(f"variable {name[:63]!a} is one too many: expected pairs from 1 on")
    for pair in pairs:
        if pair not in names.programmable.get(f"{_REGIONS}{pair.interface_id}", ()):
            raise _Refused(
                f"no AcceleratorFunction of the namespace programs {pair.afu_id[:40]!a} into region "
                f"{pair.interface_id[:40]!a}"
            )
    for region, number in Counter(f"{_REGIONS}{pair.interface_id}" for pair in pairs).items():
        if number > (units := regions.get(region, 0)):
            raise _Refused(f"{REGION_VARIABLE}n name {_shown(region)} {number} times, and {units} are asked for")


def _text(value: Raw) -> str | None:
    try:
        return _TEXT.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _quantity(quantity: Quantity | None) -> str:
    return "none" if quantity is None else str(quantity)[:40]


def _shown(name: str) -> str:
    return ascii(name[:120])
