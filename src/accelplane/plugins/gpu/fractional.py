"""Which cards and tiles a container gets by the annotations that GPU Aware Scheduling (GAS) wrote into its pod.

The kubelet's calls do not name a pod. The container is the next one without devices in the pending pod that was
scheduled first. All functions are pure. Annotations are input of pod authors: a long one counts as missing.

Facts: the annotations of GPU Aware Scheduling; the Level Zero specification (ZE_AFFINITY_MASK and
ZE_FLAT_DEVICE_HIERARCHY).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from msgspec import Struct, field

RESOURCES: Final = ("gpu.intel.com/i915", "gpu.intel.com/xe")
CARDS: Final = "gas-container-cards"
TILES: Final = "gas-container-tiles"
TIMESTAMP: Final = "gas-ts"
HIERARCHY: Final = "ZE_FLAT_DEVICE_HIERARCHY"

_COMPOSITE, _FLAT, _COMBINED = "COMPOSITE", "FLAT", "COMBINED"
_MAX_ANNOTATION = 16 * 1024
_TILE = re.compile(r"gt(-?)0*([0-9]{1,5})")
_INT16 = range(-(2**15), 2**15)
_QUANTITY = re.compile(r"\+?[0-9.]*[1-9]")

PodKey = tuple[str, str, str]  # namespace, name, uid


class Container(NamedTuple):
    """One container of a pod: whether it requests GPUs, and its hierarchy of devices."""

    uses_gpu: bool
    hierarchy: str


class Pod(Struct, frozen=True):
    """A pod with GPU containers that is pending or running. Annotations are None if missing, or if it is running."""

    namespace: str
    name: str
    uid: str
    pending: bool
    containers: Sequence[Container] = ()
    cards: str | None = None
    tiles: str | None = None
    timestamp: str | None = None

    @property
    def key(self) -> PodKey:
        return self.namespace, self.name, self.uid


class Candidate(NamedTuple):
    """The container that a call is for: the GPU container number `number` of a pod, from 0."""

    pod: Pod
    number: int


class NoCandidate(NamedTuple):
    """No candidate. `retry` is set if annotations may still be missing."""

    reason: str
    retry: bool


class Assignment(NamedTuple):
    """The device IDs that a container should get, and its affinity mask, empty without one."""

    ids: Sequence[str]
    mask: str


class _Annotations(Struct):
    cards: str | None = field(name=CARDS, default=None)
    tiles: str | None = field(name=TILES, default=None)
    timestamp: str | None = field(name=TIMESTAMP, default=None)


class _Metadata(Struct):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    annotations: _Annotations | None = None


class _Requests(Struct):
    i915: str | int | float | None = field(name=RESOURCES[0], default=None)
    xe: str | int | float | None = field(name=RESOURCES[1], default=None)


class _Resources(Struct):
    requests: _Requests | None = None


class _Variable(Struct):
    name: str = ""
    value: str | None = None


class _Container(Struct):
    resources: _Resources | None = None
    env: list[_Variable] | None = None


class _Spec(Struct):
    containers: list[_Container] | None = None


class _Status(Struct):
    phase: str = ""


class _Pod(Struct):
    metadata: _Metadata = field(default_factory=_Metadata)
    spec: _Spec = field(default_factory=_Spec)
    status: _Status = field(default_factory=_Status)


_DECODER = msgspec.json.Decoder(_Pod)


def project(document: memoryview) -> Pod | None:
    """The needed fields of a pod in JSON; None for a pod without GPUs or one that has ended.

    Raises `msgspec.MsgspecError`, or `UnicodeDecodeError`.
    """
    found = _DECODER.decode(document)
    if found.status.phase not in ("Pending", "Running"):
        return None
    containers = tuple(map(_container, found.spec.containers or ()))
    if not any(container.uses_gpu for container in containers):
        return None
    metadata = found.metadata
    pending = found.status.phase == "Pending"
    annotations = (metadata.annotations if pending else None) or _Annotations()
    return Pod(
        metadata.namespace,
        metadata.name,
        metadata.uid,
        pending,
        containers if pending else (),
        _drop_if_long(annotations.cards),
        _drop_if_long(annotations.tiles),
        _drop_if_long(annotations.timestamp),
    )


def find_candidate(pods: Iterable[Pod], holders: Mapping[tuple[str, str], int]) -> Candidate | NoCandidate:
    """The container that the kubelet allocates devices for.

    `holders` are the numbers of containers that hold GPUs, by the namespaces and names of the pods that the kubelet
    knows. It is the pending pod that lacks devices; the one that was scheduled first if there are several.
    """
    candidates: list[Candidate] = []
    for pod in pods:
        allocated = holders.get((pod.namespace, pod.name))
        target = sum(container.uses_gpu for container in pod.containers)
        if pod.pending and allocated is not None and allocated < target:
            candidates.append(Candidate(pod, allocated))
    if not candidates:
        return NoCandidate("found no pending pod that lacks GPUs", retry=False)
    if len(candidates) == 1:
        (candidate,) = candidates
        if candidate.pod.cards is None:
            return NoCandidate(f"pod {candidate.pod.namespace}/{candidate.pod.name} has no {CARDS}", retry=True)
        return candidate
    dated = [candidate for candidate in candidates if candidate.pod.timestamp is not None]
    if not dated:
        return NoCandidate(f"none of {len(candidates)} pending pods has {TIMESTAMP}", retry=True)
    return min(dated, key=lambda each: (each.pod.timestamp or "", *each.pod.key))  # time stamps compare as text


def assign(
    candidate: Candidate, available: Sequence[str], must_include: Sequence[str], size: int, tiles_per_card: int
) -> Assignment:
    """The IDs of the cards that the annotation names for the container, at most `size`, and the affinity mask."""
    return Assignment(
        select_ids(assigned_cards(candidate)[: max(0, size)], available, must_include),
        affinity_mask(candidate, tiles_per_card),
    )


def assigned_cards(candidate: Candidate) -> list[str]:
    """The cards of the container in the annotation: its non-empty part with the container's number."""
    _position, part = _part(candidate.pod.cards, candidate.number)
    return part.split(",") if part else []


def select_ids(cards: Iterable[str], available: Iterable[str], must_include: Iterable[str]) -> list[str]:
    """One ID for each card that has one left, IDs of `must_include` first. A card listed twice gets two IDs."""
    free: dict[str, list[str]] = {}
    for id_ in dict.fromkeys((*must_include, *available)):
        free.setdefault(id_.partition("-")[0], []).append(id_)
    for ids in free.values():
        ids.reverse()
    return [free[card].pop() for card in cards if free.get(card)]


def affinity_mask(candidate: Candidate, tiles_per_card: int) -> str:
    """The value of ZE_AFFINITY_MASK, empty without one.

    Devices in a container are numbered in the order of the annotation, whatever the numbers of the cards are.
    """
    if tiles_per_card <= 1:
        return ""
    position, part = _part(candidate.pod.tiles, candidate.number)
    if not part:
        return ""
    containers = candidate.pod.containers
    composite = position < len(containers) and containers[position].hierarchy == _COMPOSITE
    mask: list[str] = []
    for number, entry in enumerate(part.split(",")):
        _card, *tiles = entry.split(":")
        if len(tiles) != 1:
            return ""
        for text in tiles[0].split("+"):
            tile = _tile_number(text)
            if tile is None:
                return ""
            mask.append(f"{number}.{tile}" if composite else str(number * tiles_per_card + tile))
    return ",".join(mask)


def _part(annotation: str | None, index: int) -> tuple[int, str]:
    """The non-empty part number `index` and its position among all parts; an empty text without one."""
    for position, part in enumerate((annotation or "").split("|")):
        if part:
            if not index:
                return position, part
            index -= 1
    return 0, ""


def _tile_number(text: str) -> int | None:
    """The number of a tile `gt<number>`, which has 16 bits with a sign."""
    found = _TILE.fullmatch(text)
    if found is None:
        return None
    number = int(found[1] + found[2])
    return number if number in _INT16 else None


def _container(found: _Container) -> Container:
    requests = (found.resources or _Resources()).requests or _Requests()
    hierarchy = _FLAT
    for variable in found.env or ():
        if variable.name == HIERARCHY:  # the last of equal names counts, as in the container
            hierarchy = variable.value if variable.value in (_COMPOSITE, _COMBINED) else _FLAT
    return Container(_positive(requests.i915) or _positive(requests.xe), hierarchy)


def _positive(quantity: str | float | None) -> bool:
    """Whether a quantity is above zero. The API server has validated it."""
    if isinstance(quantity, str):
        return _QUANTITY.match(quantity) is not None
    return quantity is not None and quantity > 0


def _drop_if_long(annotation: str | None) -> str | None:
    return annotation if annotation is None or len(annotation) <= _MAX_ANNOTATION else None
