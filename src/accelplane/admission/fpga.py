"""Mutation of pods that use FPGAs.

Pods request a function or a region by a name of their namespace. The names (`mappings`) are replaced by the resources
that the kubelet counts. For functions that are programmed for the pod, environment variables name the function and the
region for the programming hook, and their number. Only this webhook sets these variables: it removes or checks those of
users. It does not see variables of images and of envFrom: those in `env` have precedence, and the number, also 0, is
set in every container that requests a region. A mutated pod passes unchanged when it is created again.

Init containers are treated like containers. Containers that request no FPGA are not changed.
"""

import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from fractions import Fraction

import msgspec
from msgspec import Raw, Struct

from accelplane.admission.mappings import PREFIX, Names, Pair, Target
from accelplane.admission.pods import Container, Place, PodSpec, Resources, containers, quantities
from accelplane.fpga.ids import AFU_VARIABLE, COUNT_VARIABLE, REGION_VARIABLE
from accelplane.kube.admission import ALLOWED, Decision, Mutator, Review, Steps, deny, run
from accelplane.kube.jsonarray import elements
from accelplane.kube.jsonpatch import Operation, PatchBuilder, PatchTooLargeError, Word, pointer
from accelplane.kube.quantities import Quantity, QuantityError, parse

PATH = "/pods"

_RESERVED = (REGION_VARIABLE.rstrip("_"), AFU_VARIABLE.rstrip("_"))
_NUMBERED = re.compile(rf"({REGION_VARIABLE}|{AFU_VARIABLE})[1-9][0-9]{{0,4}}", re.ASCII)
_REGIONS = f"{PREFIX}region-"
# Each unit of a function becomes two variables. No node has that many regions.
_MAX_UNITS = 1000
# More than a response carries: further ones are dropped.
_MAX_WARNINGS = 20


class Metadata(Struct, frozen=True):
    namespace: str = ""


class Pod(Struct, frozen=True):
    """The part of a pod that matters."""

    metadata: Metadata = Metadata()
    spec: PodSpec = PodSpec()


class _Variable(Struct, frozen=True):
    name: str = ""
    value: Raw = Raw(b"null")


_EXPECTED_PAIRS = f"expected pairs of {REGION_VARIABLE}n and {AFU_VARIABLE}n from 1 on"
_VARIABLE = msgspec.json.Decoder(_Variable)
_TEXT = msgspec.json.Decoder(str)
_ENCODER = msgspec.json.Encoder()


class _InvalidError(Exception):
    """The pod is invalid; the text is for the user."""


def mutator(names: Callable[[str], Names], complete: Callable[[], bool] = lambda: True) -> Mutator[Pod]:
    """The webhook. `names` returns what pods of a namespace may request, `complete` whether the caches are synced.

    Before that, which happens with manifests without a readiness probe, pods are denied with a temporary error.
    Controllers retry it, whereas an unmutated pod would never start.
    """

    def decide(review: Review, pod: Pod) -> Steps:
        if (review.kind.group, review.kind.kind) != ("", "Pod"):
            return _denied(f"expected a Pod, found {review.kind.kind[:80]!a}")
        namespace = pod.metadata.namespace or review.namespace
        decision = yield from _steps(pod, names(namespace), namespace)
        if decision.denial is not None and not complete():
            return deny(
                "the names of functions and regions of FPGAs are still being read; try again in a moment",
                code=503, reason="ServiceUnavailable",
            )  # fmt: skip
        return decision

    return Mutator(PATH, Pod, decide, max_values=None)


def mutate(pod: Pod, names: Names, namespace: str = "") -> Decision:
    """The decision on a pod in a namespace with these names. Raises `msgspec.DecodeError`."""
    return run(_steps(pod, names, namespace))


def _steps(pod: Pod, names: Names, namespace: str) -> Steps:
    """Raises `msgspec.DecodeError`."""
    patch = PatchBuilder()
    warnings: list[str] = []
    units = 0
    container = ""
    try:
        for place in containers(pod.spec):
            if place is None:
                yield
                continue
            container = place.container.name
            requested = _requested(place.container.resources) if place.container.resources is not None else {}
            if not requested:
                continue
            units += sum(requested.values())
            if units > _MAX_UNITS:
                raise _InvalidError(
                    f"found requests of {units} FPGA resources in this and earlier containers of the pod, expected at "
                    f"most {_MAX_UNITS}"
                )
            operations, warning = yield from _mutated(place, requested, names, namespace)
            patch.add(operations)
            if warning and len(warnings) < _MAX_WARNINGS:
                warnings.append(warning)
    except _InvalidError as error:
        return _denied(f"container {container[:63]!a}: {error}")
    except PatchTooLargeError as error:
        return deny(f"container {container[:63]!a}: {error}", code=413, reason="RequestEntityTooLarge")
    operations = patch.build()
    return Decision(operations, warnings=warnings) if operations or warnings else ALLOWED


def _denied(message: str) -> Decision:
    return deny(message, code=400, reason="BadRequest")


def _mutated(
    place: Place, requested: Mapping[str, int], names: Names, namespace: str
) -> Generator[None, None, tuple[list[Operation], str]]:
    """The changes of a container and a warning. Raises `_InvalidError`, `PatchTooLargeError`."""
    container = place.container
    aliases = {name: _target(name, names, namespace) for name in sorted(requested) if name not in names.resources}
    regions = {name: units for name, units in requested.items() if name not in aliases and name.startswith(_REGIONS)}
    pairs = _pairs(aliases, requested)
    programmable = bool(regions) or any(target.resource.startswith(_REGIONS) for target in aliases.values())
    reserved: list[_Variable] = []
    others: list[bytes] = []
    if programmable or _may_be_reserved(container.env):
        reserved, others = yield from _split_variables(container.env)
    changed = programmable or bool(reserved)
    if regions and not aliases:
        pairs, changed = _check_programmed(reserved, regions, names)
    operations = list(_translated(place.path, aliases, requested)) if aliases else []
    if changed:
        own = map(_ENCODER.encode, _variables(pairs)) if programmable else ()
        env = b"[%b]" % b",".join((*own, *others))
        operations.append(Operation("add", pointer(*place.path, "env"), Raw(env)))
    return operations, _warning(container, aliases, requested)


def _warning(container: Container, aliases: Mapping[str, Target], requested: Mapping[str, int]) -> str:
    resources = (aliases[name].resource if name in aliases else name for name, units in requested.items() if units)
    if bytes(container.env_from) in (b"null", b"[]") or not any(name.startswith(_REGIONS) for name in resources):
        return ""
    return (
        f"container {container.name[:63]!a}: {REGION_VARIABLE}… and {AFU_VARIABLE}… from envFrom may make it fail to "
        "start; only the names of the namespace say what a region is programmed with"
    )


def _requested(resources: Resources) -> dict[str, int]:
    """The FPGA resources of a container and how many of each. Raises `_InvalidError`."""
    limits, requests = quantities(resources.limits, PREFIX) or {}, quantities(resources.requests, PREFIX) or {}
    found: dict[str, int] = {}
    for name in sorted({*limits, *requests}):
        limit, request = limits.get(name), requests.get(name)
        number = _number(name, limit)
        if number is None or number != _number(name, request):
            raise _InvalidError(
                f"{_shown(name)}: limits and requests have to be the same (limits: {_quantity(limit)}, requests: "
                f"{_quantity(request)})"
            )
        if number.denominator != 1 or not 0 <= number <= _MAX_UNITS:
            raise _InvalidError(f"{_shown(name)}: {_quantity(limit)} is not a whole number from 0 to {_MAX_UNITS}")
        found[name] = int(number)
    return found


def _number(name: str, quantity: Quantity | None) -> Fraction | None:
    """Raises `_InvalidError`."""
    try:
        return None if quantity is None else parse(quantity)
    except QuantityError as error:
        raise _InvalidError(f"{_shown(name)}: {error}") from None


def _target(name: str, names: Names, namespace: str) -> Target:
    """The target of an alias. Raises `_InvalidError`."""
    target = names.targets.get(name)
    if target is not None and target.mode in ("af", "region", "regiondevel"):
        return target
    if target is not None:
        raise _InvalidError(f"{_shown(name)}: mode: found {target.mode[:40]!a}, expected af or region")
    if name in names.faulty:
        raise _InvalidError(f"{_shown(name)}: {names.faulty[name]}")
    raise _InvalidError(
        f"{_shown(name)}: namespace {namespace[:63]!a} has no AcceleratorFunction and no FpgaRegion that gives it"
    )


def _pairs(aliases: Mapping[str, Target], requested: Mapping[str, int]) -> list[Pair]:
    """The pairs to program, one for each unit. Raises `_InvalidError`."""
    modes = {target.mode for target in aliases.values()}
    if len(modes) > 1:
        found = ", ".join(f"{_shown(name)} ({target.mode})" for name, target in aliases.items())
        raise _InvalidError(f"all FPGA resources of a container have to be of one mode: {found[:400]}")
    return [target.pair for name, target in aliases.items() if target.pair for _ in range(requested[name])]


def _may_be_reserved(env: Raw) -> bool:
    """Whether a variable may be reserved, also if its name is written with escapes, which the API server never does.

    A value that is no list is decoded, and denied.
    """
    text = bytes(env)
    return b"FPGA_" in text or b"\\u" in text or not text.startswith((b"[", b"null"))


def _split_variables(env: Raw) -> Generator[None, None, tuple[list[_Variable], list[bytes]]]:
    """The reserved variables, and all others as they are. Raises `_InvalidError`, `PatchTooLargeError`."""
    reserved: list[_Variable] = []
    others: list[bytes] = []
    size = 0
    try:
        for element in elements(env):
            if element is None:
                yield
                continue
            variable = _VARIABLE.decode(element)
            if variable.name.startswith(_RESERVED):
                reserved.append(variable)
            else:
                others.append(bytes(element))
                size += len(element) + 1
            if size > PatchBuilder.LIMIT or len(reserved) > 4 * _MAX_UNITS:
                raise PatchTooLargeError(f"found an environment of {size} bytes and more")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _InvalidError(f"its variables cannot be decoded: {error}") from None
    return reserved, others


def _variables(pairs: Sequence[Pair]) -> Iterable[Mapping[str, object]]:
    yield {"name": COUNT_VARIABLE, "value": str(len(pairs))}
    for number, pair in enumerate(pairs, 1):
        yield {"name": f"{REGION_VARIABLE}{number}", "value": pair.interface_id}
        yield {"name": f"{AFU_VARIABLE}{number}", "value": pair.afu_id}


def _translated(
    where: tuple[Word, ...], aliases: Mapping[str, Target], requested: Mapping[str, int]
) -> Iterable[Operation]:
    """Replaces aliases by their resources, and adds units that are also requested by the resource's name."""
    totals: Counter[str] = Counter()
    for name, target in aliases.items():
        totals[target.resource] += requested[name]
        for field in ("limits", "requests"):
            yield Operation("remove", pointer(*where, "resources", field, name))
    for resource, units in sorted(totals.items()):
        for field in ("limits", "requests"):
            total = str(units + requested.get(resource, 0))
            yield Operation("add", pointer(*where, "resources", field, resource), total)


def _check_programmed(
    reserved: Sequence[_Variable], regions: Mapping[str, int], names: Names
) -> tuple[list[Pair], bool]:
    """The pairs in the variables, and whether their number is missing.

    Checks that the variables are as this webhook sets them: functions of the namespace, for requested units.

    There may be more units than functions: a container that requests a region by its own name and by a function's has
    the sum of both, and is reviewed again after its mutation. Raises `_InvalidError`.
    """
    values: dict[str, str] = {}
    for each in reserved:
        name, value = each.name, _text(each.value)
        known = name == COUNT_VARIABLE or _NUMBERED.fullmatch(name)
        if not known or name in values or value is None:
            raise _InvalidError(f"variable {name[:63]!a} is reserved for programming FPGAs")
        values[name] = value
    count = values.pop(COUNT_VARIABLE, None)
    try:
        pairs = [
            Pair(values.pop(f"{REGION_VARIABLE}{number}"), values.pop(f"{AFU_VARIABLE}{number}"))
            for number in range(1, len(values) // 2 + 1)
        ]
    except KeyError as missing:
        raise _InvalidError(f"variable {missing} is not set: {_EXPECTED_PAIRS}") from None
    for name in values:
        raise _InvalidError(f"variable {name[:63]!a} has no counterpart: {_EXPECTED_PAIRS}")
    for pair in pairs:
        if pair not in names.programmable.get(f"{_REGIONS}{pair.interface_id}", ()):
            raise _InvalidError(
                f"no AcceleratorFunction of the namespace programs {pair.afu_id[:40]!a} into region "
                f"{pair.interface_id[:40]!a}"
            )
    for region, number in Counter(f"{_REGIONS}{pair.interface_id}" for pair in pairs).items():
        if number > (units := regions.get(region, 0)):
            raise _InvalidError(f"{REGION_VARIABLE}n name {_shown(region)} {number} times, but {units} are requested")
    if count not in (None, str(len(pairs))):
        raise _InvalidError(
            f"variable {COUNT_VARIABLE}: found {count[:40]!a}, expected {len(pairs)}, the number of pairs"
        )
    return pairs, count is None


def _text(value: Raw) -> str | None:
    try:
        return _TEXT.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _quantity(quantity: Quantity | None) -> str:
    return "none" if quantity is None else str(quantity)[:40]


def _shown(name: str) -> str:
    return ascii(name[:120])
