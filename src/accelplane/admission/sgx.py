"""Mutation of pods that use SGX.

A pod requests only EPC memory. A container that requests `sgx.intel.com/epc` gets the enclave device. An amount of 0 is
no request: the device would be outside of all accounting and quotas. The pod's annotation
`sgx.intel.com/quote-provider` names who makes quotes: a container, which gets the provision device, or `aesmd`, whose
clients get its socket. The total is written to an annotation, from which Kata Containers takes the EPC size of a
virtual machine.

Init containers that request EPC get their devices too. An init container with `restartPolicy: Always` is a sidecar and
treated like a container. Other init containers get no socket, because nothing may be serving it yet.
"""

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, field

from accelplane.admission.pods import Place, PodSpec, Resources, containers, is_null, quantities
from accelplane.kube.admission import ALLOWED, Decision, Mutator, Review, Steps, deny, run
from accelplane.kube.jsonarray import elements
from accelplane.kube.jsonpatch import Operation, PatchBuilder, PatchTooLargeError, append, put
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
# More than a response carries: further ones are dropped.
_MAX_WARNINGS = 20


class SgxOptions(Struct, frozen=True, kw_only=True):
    """Options of the webhook."""

    aesmd_name: str = "aesmd"
    socket_directory: str = "/var/run/aesmd"
    socket_volume: SocketVolume = "auto"
    sidecar_without_epc: bool = False
    whole_pages: bool = False
    epc_required: bool = False


class Annotations(Struct, frozen=True):
    quote_provider: str = field(name=QUOTE_PROVIDER, default="")
    epc: str | UnsetType = field(name=EPC, default=UNSET)


class Metadata(Struct, frozen=True):
    annotations: Annotations | None = None


class Pod(Struct, frozen=True):
    """The part of a pod that matters."""

    metadata: Metadata
    spec: PodSpec


class _Mount(Struct, frozen=True, rename="camel"):
    mount_path: str = ""


class _Variable(Struct, frozen=True):
    name: str = ""
    value: str | None = None


class _Volume(Struct, frozen=True):
    name: str = ""


_MOUNT = msgspec.json.Decoder(_Mount)
_VARIABLE = msgspec.json.Decoder(_Variable)
_VOLUME = msgspec.json.Decoder(_Volume)
_PRESENT: Final[Sequence[object]] = ()


class _InvalidResourcesError(Exception):
    """Resources are invalid; the text is for the user."""


class _Requests(Struct, frozen=True):
    """The SGX resources of a container; `epc` is None if it requests none, or 0."""

    limits: Mapping[str, Quantity] | None
    requests: Mapping[str, Quantity] | None
    epc: Fraction | None


def mutator(options: SgxOptions) -> Mutator[Pod]:
    """The webhook."""

    def decide(_review: Review, pod: Pod) -> Steps:
        return _Mutation(pod, options).steps()

    return Mutator(PATH, Pod, decide, max_values=None)


def mutate(pod: Pod, options: SgxOptions) -> Decision:
    """Returns the changes that SGX needs. Raises `msgspec.DecodeError`."""
    return run(_Mutation(pod, options).steps())


class _Mutation:
    """The mutation of one pod, container by container. Its memory does not grow with the number of containers."""

    def __init__(self, pod: Pod, options: SgxOptions) -> None:
        self._pod = pod
        self._options = options
        self._provider = pod.metadata.annotations.quote_provider if pod.metadata.annotations else ""
        self._uses_aesmd = self._provider == options.aesmd_name
        self._patch = PatchBuilder()
        self._warnings: list[str] = []
        self._users = 0
        self._clients = 0
        self._has_sidecar = False
        self._provider_has_epc = self._provider_lacks_epc = False
        self._running = self._greatest = 0

    def steps(self) -> Steps:
        """Decides. Raises `msgspec.DecodeError`."""
        try:
            for place in containers(self._pod.spec):
                if place is None:
                    yield
                else:
                    yield from self._container(place)
            if not self._users:
                return self._without_users()
            if self._uses_aesmd:
                yield from self._volume()
            self._annotation()
        except _InvalidResourcesError as error:
            return deny(str(error))
        except PatchTooLargeError as error:
            return deny(
                f"the pod has too many containers that request {EPC}: {error}; use fewer containers",
                code=413, reason="RequestEntityTooLarge",
            )  # fmt: skip
        return Decision(self._patch.build(), warnings=self._all_warnings())

    def _container(self, place: Place) -> Iterator[None]:
        requests = _requests(place)
        name = place.container.name
        if name == self._provider:
            self._provider_has_epc |= requests.epc is not None
            self._provider_lacks_epc |= requests.epc is None
        if requests.epc is None and EPC in (requests.limits or {}):
            self._warn(name, f"{EPC} is 0, so it gets no enclave; request the amount that it needs")
        self._check_internal_resources(name, requests)
        self._count(place, requests.epc)
        if requests.epc is not None:
            self._users += 1
            self._patch.add(_devices(place, requests, is_provider=name == self._provider))
        if self._uses_aesmd and self._is_client(place, requests):
            self._clients += 1
            self._has_sidecar |= name == self._options.aesmd_name
            yield from self._socket(place)

    def _count(self, place: Place, epc: Fraction | None) -> None:
        """Sums up EPC as the scheduler does: init containers run one by one."""
        if place.is_init:
            self._greatest = max(self._greatest, self._running + int(epc or 0))
        else:
            self._running += int(epc or 0)

    def _is_client(self, place: Place, requests: _Requests) -> bool:
        """Whether a container gets the socket of aesmd."""
        if place.is_init:
            return False
        is_sidecar = self._options.sidecar_without_epc and place.container.name == self._options.aesmd_name
        return requests.epc is not None or is_sidecar

    def _socket(self, place: Place) -> Iterator[None]:
        """Adds the socket's directory, and the variable that makes clients use it."""
        container, directory = place.container, self._options.socket_directory
        mounted = False
        for element in elements(container.volume_mounts):
            if element is None:
                yield
            elif _MOUNT.decode(element).mount_path == directory:
                mounted = True
        if not mounted:
            mount = {"name": SOCKET_VOLUME, "mountPath": directory}
            self._patch.add(append((*place.path, "volumeMounts"), _current(container.volume_mounts), [mount]))
        value = None
        for element in elements(container.env):
            if element is None:
                yield
            elif (variable := _VARIABLE.decode(element)).name == SOCKET_VARIABLE:
                value = variable.value
        if value != "1":
            variables = [{"name": SOCKET_VARIABLE, "value": "1"}]
            self._patch.add(append((*place.path, "env"), _current(container.env), variables))

    def _volume(self) -> Iterator[None]:
        """Adds the socket's volume: the node's directory, or one of the pod if aesmd is one of several clients."""
        present = False
        for element in elements(self._pod.spec.volumes):
            if element is None:
                yield
            elif _VOLUME.decode(element).name == SOCKET_VOLUME:
                present = True
        if present or not self._clients:
            return
        kind = self._options.socket_volume
        if kind == "emptyDir" or (kind == "auto" and self._has_sidecar and self._clients >= 2):
            source: dict[str, object] = {"emptyDir": {"medium": "Memory"}}
        else:
            source = {"hostPath": {"path": self._options.socket_directory, "type": "DirectoryOrCreate"}}
        volume = {"name": SOCKET_VOLUME, **source}
        self._patch.add(append(("spec", "volumes"), _current(self._pod.spec.volumes), [volume]))

    def _annotation(self) -> None:
        total = max(self._greatest, self._running)
        if not total:
            return
        if self._options.whole_pages:
            total = -(-total // _PAGE) * _PAGE
        annotations = self._pod.metadata.annotations
        epc = UNSET if annotations is None else annotations.epc
        current = None if annotations is None else {} if epc is UNSET else {EPC: epc}
        self._patch.add(put(("metadata", "annotations"), current, {EPC: binary_text(total)}))

    # Warnings

    def _without_users(self) -> Decision:
        if self._provider:
            self._warnings.append(f"{QUOTE_PROVIDER}: no container requests {EPC}, so the annotation has no effect")
        return Decision(warnings=self._warnings) if self._warnings else ALLOWED

    def _warn(self, container: str, problem: str) -> None:
        if len(self._warnings) < _MAX_WARNINGS:
            self._warnings.append(f"container {container[:63]!a}: {problem}")

    def _check_internal_resources(self, name: str, requests: _Requests) -> None:
        """Raises `_InvalidResourcesError` for a resource that only the webhook may add, if the options say so."""
        for resource in (ENCLAVE, PROVISION):
            is_own = requests.epc is not None and (resource == ENCLAVE or name == self._provider)
            limits = requests.limits or {}
            if resource in limits and not (is_own and _is_one(limits, resource)):
                problem = f"{resource} is for internal use; request {EPC} only"
                if self._options.epc_required:
                    raise _InvalidResourcesError(f"container {name[:63]!a}: {problem}")
                self._warn(name, problem)

    def _all_warnings(self) -> list[str]:
        provider = self._provider
        warnings = self._warnings
        if self._uses_aesmd:
            if self._provider_lacks_epc and not self._options.sidecar_without_epc:
                warnings.append(
                    f"container {provider[:63]!a} does not request {EPC}: it is no sidecar, the node's aesmd is used"
                )
        elif provider and not self._provider_has_epc:
            warnings.append(
                f"{QUOTE_PROVIDER}: {provider[:63]!a} names no container that requests {EPC}; no container gets "
                f"{PROVISION}"
            )
        total = max(self._greatest, self._running)
        if total % 1024 and "kata" in (self._pod.spec.runtime_class_name or "").lower():
            warnings.append(f"{EPC}: the total is {total} bytes; Kata Containers expects a multiple of 1Ki")
        return warnings


def _requests(place: Place) -> _Requests:
    """The SGX resources of a container. Raises `_InvalidResourcesError`, `msgspec.DecodeError`."""
    resources = place.container.resources or Resources()
    limits, requests = quantities(resources.limits, NAMESPACE), quantities(resources.requests, NAMESPACE)
    # Init containers without EPC are not checked, as in the original: the API server checks them itself.
    is_init = place.path[1] == "initContainers"
    if is_init and EPC not in (limits or ()) and EPC not in (requests or ()):
        return _Requests(limits, requests, None)
    return _Requests(limits, requests, _epc(place.container.name[:63], limits or {}, requests or {}))


def _epc(container: str, limits: Mapping[str, Quantity], requests: Mapping[str, Quantity]) -> Fraction | None:
    """The EPC of a container, None for 0 and without.

    Raises `_InvalidResourcesError` if any of its SGX resources is invalid.
    """
    numbers: dict[str, Fraction] = {}
    for name in sorted({*limits, *requests}):
        limit, request = limits.get(name), requests.get(name)
        number = _number(name, limit)
        if number is None or (limit != request and number != _number(name, request)):
            raise _InvalidResourcesError(
                f'resource "{name}" of container {container!a}: limits and requests have to match, extended '
                f"resources cannot be overcommitted (limits: {_text(limit)}, requests: {_text(request)})"
            )
        if name.startswith(f"{NAMESPACE}/") and number.denominator != 1:
            raise _InvalidResourcesError(
                f'resource "{name}" of container {container!a}: {_text(limit)} is not integral'
            )
        numbers[name] = number
    return numbers.get(EPC) or None


def _number(name: str, quantity: Quantity | None) -> Fraction | None:
    """Raises `_InvalidResourcesError`."""
    try:
        return None if quantity is None else parse(quantity)
    except QuantityError as error:
        raise _InvalidResourcesError(f'resource "{name}": {error}') from None


def _text(quantity: Quantity | None) -> str:
    return "none" if quantity is None else str(quantity)[:40]


def _is_one(resources: Mapping[str, Quantity] | None, name: str) -> bool:
    return resources is not None and name in resources and parse(resources[name]) == 1


def _devices(place: Place, requests: _Requests, *, is_provider: bool) -> Iterator[Operation]:
    """Adds the enclave device, and the provision device for the quote provider."""
    names = [PROVISION, ENCLAVE] if is_provider else [ENCLAVE]
    for key, current in (("limits", requests.limits), ("requests", requests.requests)):
        desired = {name: "1" for name in names if not _is_one(current, name)}
        yield from put((*place.path, "resources", key), current, desired)


def _current(array: Raw) -> Sequence[object] | None:
    """The array as `append` expects it: None if there is none."""
    return None if is_null(array) else _PRESENT
