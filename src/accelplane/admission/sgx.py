"""Pods that use SGX: they ask for EPC memory, and this adds what follows from it.

A container that requests `sgx.intel.com/epc` gets the enclave device; the pod's annotation `quote-provider` names who
quotes: a container, which gets the provisioning device, or `aesmd`, whose clients get its socket. The total goes into
an annotation from which Kata Containers sizes the EPC of a virtual machine.

Init containers that request EPC get their devices too. One that keeps running (`restartPolicy: Always`) is a side-car,
in all that follows like a container; an ordinary one gets no socket, since nobody may be serving it yet.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Literal

from msgspec import Struct

from accelplane.kube.admission import ALLOWED, Decision, Mutator, Review, deny
from accelplane.kube.jsonpatch import Operation, Word, append, put
from accelplane.kube.quantities import Quantity, QuantityError, binary_text, parse

PATH = "/mutate--v1-pod"

NAMESPACE = "sgx.intel.com"
EPC = f"{NAMESPACE}/epc"
ENCLAVE = f"{NAMESPACE}/enclave"
PROVISION = f"{NAMESPACE}/provision"
QUOTE_PROVIDER = f"{NAMESPACE}/quote-provider"
SOCKET_VOLUME = "aesmd-socket"
SOCKET_VARIABLE = "SGX_AESM_ADDR"

SocketVolume = Literal["auto", "hostPath", "emptyDir"]

_PAGE = 4096


class SgxOptions(Struct, frozen=True, kw_only=True):
    """What an administrator may want different."""

    aesmd_name: str = "aesmd"
    socket_directory: str = "/var/run/aesmd"
    socket_volume: SocketVolume = "auto"
    sidecar_without_epc: bool = False
    whole_pages: bool = False


class Resources(Struct, frozen=True):
    limits: Mapping[str, Quantity] | None = None
    requests: Mapping[str, Quantity] | None = None


class Mount(Struct, frozen=True, rename="camel"):
    mount_path: str = ""


class Variable(Struct, frozen=True):
    name: str = ""
    value: str | None = None


class Container(Struct, frozen=True, rename="camel"):
    name: str = ""
    resources: Resources | None = None
    volume_mounts: Sequence[Mount] | None = None
    env: Sequence[Variable] | None = None
    restart_policy: str | None = None


class Volume(Struct, frozen=True):
    name: str = ""


class PodSpec(Struct, frozen=True, rename="camel"):
    containers: Sequence[Container] | None = None
    init_containers: Sequence[Container] | None = None
    volumes: Sequence[Volume] | None = None
    runtime_class_name: str | None = None


class Metadata(Struct, frozen=True):
    annotations: Mapping[str, str] | None = None


class Pod(Struct, frozen=True):
    """The part of a pod that decides."""

    metadata: Metadata
    spec: PodSpec


class _Refused(Exception):
    """Resources that cannot be; the text is for the user."""


class _Part(Struct, frozen=True):
    """A container and where it stands. `epc` is None when it asks for none, which is not the same as for 0."""

    where: tuple[Word, ...]
    container: Container
    epc: Fraction | None
    ordinary_init: bool = False


def mutator(options: SgxOptions) -> Mutator[Pod]:
    """The webhook."""

    def decide(_review: Review, pod: Pod) -> Decision:
        return mutate(pod, options)

    return Mutator(PATH, Pod, decide)


def mutate(pod: Pod, options: SgxOptions) -> Decision:
    """What SGX needs that the pod does not have."""
    try:
        parts = list(_parts(pod.spec))
    except _Refused as error:
        return deny(str(error))
    provider = (pod.metadata.annotations or {}).get(QUOTE_PROVIDER, "")
    users = [part for part in parts if part.epc is not None]
    if not users:
        warnings = list(_by_hand(parts, provider))
        if provider:
            warnings.append(f"{QUOTE_PROVIDER}: no container requests {EPC}, so the annotation does nothing")
        return Decision(warnings=warnings) if warnings else ALLOWED
    operations = [operation for part in users for operation in _devices(part, provider)]
    warnings = [*_by_hand(parts, provider), *_about_provider(parts, provider, options)]
    if provider == options.aesmd_name:
        clients = [part for part in parts if _is_client(part, options)]
        for part in clients:
            operations += _socket(part, options)
        operations += append(("spec", "volumes"), pod.spec.volumes, _volume(pod.spec, clients, options))
    total = _total(parts)
    if total:
        if options.whole_pages:
            total = -(-total // _PAGE) * _PAGE
        annotation = {EPC: binary_text(total)}
        operations += put(("metadata", "annotations"), pod.metadata.annotations, annotation)
    if total % 1024 and "kata" in (pod.spec.runtime_class_name or "").lower():
        warnings.append(f"{EPC}: {total} bytes in all are no multiple of 1Ki, which Kata Containers refuses")
    return Decision(operations, warnings=warnings)


def _parts(spec: PodSpec) -> Iterator[_Part]:
    """All containers of the pod. Raises `_Refused`."""
    for index, container in enumerate(spec.init_containers or ()):
        ordinary = container.restart_policy != "Always"
        resources = container.resources or Resources()
        # Those without EPC have always been let through, right or wrong: the API server looks at them itself.
        asks = EPC in (resources.limits or {}) or EPC in (resources.requests or {})
        epc = _requested(container) if asks else None
        yield _Part(("spec", "initContainers", index), container, epc, ordinary)
    for index, container in enumerate(spec.containers or ()):
        yield _Part(("spec", "containers", index), container, _requested(container))


def _requested(container: Container) -> Fraction | None:
    """The EPC of a container, None without. Raises `_Refused` when any of its SGX resources is not as it has to be."""
    if container.resources is None:
        return None
    limits, requests = container.resources.limits or {}, container.resources.requests or {}
    names = {name for name in (*limits, *requests) if name.startswith(NAMESPACE)}
    numbers: dict[str, Fraction] = {}
    for name in sorted(names):
        limit, request = limits.get(name), requests.get(name)
        number = _number(name, limit)
        if number is None or (limit != request and number != _number(name, request)):
            raise _Refused(
                f'resource "{name}" of container {container.name!a}: limits and requests have to match, extended '
                f"resources cannot be overcommitted (limits: {_shown(limit)}, requests: {_shown(request)})"
            )
        if name.startswith(f"{NAMESPACE}/") and number.denominator != 1:
            raise _Refused(f'resource "{name}" of container {container.name!a}: {_shown(limit)} is not integral')
        numbers[name] = number
    return numbers.get(EPC)


def _number(name: str, quantity: Quantity | None) -> Fraction | None:
    """Raises `_Refused`."""
    try:
        return None if quantity is None else parse(quantity)
    except QuantityError as error:
        raise _Refused(f'resource "{name}": {error}') from None


def _shown(quantity: Quantity | None) -> str:
    return "none" if quantity is None else str(quantity)[:40]


def _is_one(resources: Mapping[str, Quantity] | None, name: str) -> bool:
    return resources is not None and name in resources and parse(resources[name]) == 1


def _devices(part: _Part, provider: str) -> Iterator[Operation]:
    """One enclave device, and one to provision with for the one who quotes."""
    resources = part.container.resources or Resources()
    names = [PROVISION, ENCLAVE] if part.container.name == provider else [ENCLAVE]
    for field, current in (("limits", resources.limits), ("requests", resources.requests)):
        wanted = {name: "1" for name in names if not _is_one(current, name)}
        yield from put((*part.where, "resources", field), current, wanted)


def _is_client(part: _Part, options: SgxOptions) -> bool:
    """Whether a container gets the socket of aesmd."""
    if part.ordinary_init:
        return False
    return part.epc is not None or (options.sidecar_without_epc and part.container.name == options.aesmd_name)


def _socket(part: _Part, options: SgxOptions) -> Iterator[Operation]:
    """The socket's directory, whatever is there already, and the variable that makes clients use it."""
    container = part.container
    if all(mount.mount_path != options.socket_directory for mount in container.volume_mounts or ()):
        mount = {"name": SOCKET_VOLUME, "mountPath": options.socket_directory}
        yield from append((*part.where, "volumeMounts"), container.volume_mounts, [mount])
    said = [variable.value for variable in container.env or () if variable.name == SOCKET_VARIABLE]
    if said[-1:] != ["1"]:
        yield from append((*part.where, "env"), container.env, [{"name": SOCKET_VARIABLE, "value": "1"}])


def _volume(spec: PodSpec, clients: Sequence[_Part], options: SgxOptions) -> list[dict[str, object]]:
    """Where the socket is: the node's directory, or one of the pod's own when aesmd is among several clients."""
    if not clients or any(volume.name == SOCKET_VOLUME for volume in spec.volumes or ()):
        return []
    sidecar = len(clients) >= 2 and any(part.container.name == options.aesmd_name for part in clients)
    if options.socket_volume == "emptyDir" or (options.socket_volume == "auto" and sidecar):
        return [{"name": SOCKET_VOLUME, "emptyDir": {"medium": "Memory"}}]
    host = {"path": options.socket_directory, "type": "DirectoryOrCreate"}
    return [{"name": SOCKET_VOLUME, "hostPath": host}]


def _total(parts: Sequence[_Part]) -> int:
    """The most EPC that the pod uses at a time, as the scheduler counts: ordinary init containers run one by one."""
    running = greatest = 0
    for part in parts:
        epc = int(part.epc or 0)
        if part.ordinary_init:
            greatest = max(greatest, running + epc)
        else:
            running += epc
    return max(greatest, running)


def _by_hand(parts: Sequence[_Part], provider: str) -> Iterator[str]:
    for part in parts:
        limits = (part.container.resources or Resources()).limits or {}
        for name in (ENCLAVE, PROVISION):
            meant = part.epc is not None and (name == ENCLAVE or part.container.name == provider)
            if name in limits and not (meant and _is_one(limits, name)):
                yield f"container {part.container.name!a}: {name} is for internal use; request {EPC} only"


def _about_provider(parts: Sequence[_Part], provider: str, options: SgxOptions) -> Iterator[str]:
    named = [part for part in parts if part.container.name == provider]
    if provider == options.aesmd_name:
        if not options.sidecar_without_epc and any(part.epc is None for part in named):
            yield f"container {provider!a} does not request {EPC}, so it is not a side-car: the node's aesmd is used"
    elif provider and all(part.epc is None for part in named):
        yield f"{QUOTE_PROVIDER}: {provider[:63]!a} names no container that requests {EPC}, so nobody gets {PROVISION}"
