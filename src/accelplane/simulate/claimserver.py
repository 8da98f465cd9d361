"""A small API server for one simulated node: its Node, ResourceSlices, and allocated ResourceClaims.

It has what the DRA drivers of an agent request: versions, dry runs, watches, and optimistic locking of slices. All
objects are in memory, and every client may do everything. `allocate` takes the place of a scheduler.
"""

import asyncio
import re
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from accelplane.dra.resourceslice import GROUP, PLURAL, Device, ResourceSlice
from accelplane.http.messages import HttpError, HttpLimits, Request, Response
from accelplane.http.server import HttpServer
from accelplane.kubelet.embedded import AllocatedClaim, ClaimApiError

_SLICES = f"/apis/{GROUP}/v1/{PLURAL}"
_CLAIM = re.compile(rf"/apis/{GROUP}/v1/namespaces/([^/]+)/resourceclaims/([^/]+)")
_RELEASE = "v1.37.2"
_LIMITS = HttpLimits(answer=600, connections=16)  # watches last up to ten minutes


class _Event(Struct):
    type: str
    object: ResourceSlice


class ClaimServer:
    """Serves on a port of the loopback interface between `start` and `stop`. It is also the kubelet's `ClaimApi`."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.port = 0
        self._uid = str(uuid.uuid4())
        self._version = 1
        self._slices: dict[str, ResourceSlice] = {}
        self._claims: dict[tuple[str, str], tuple[AllocatedClaim, object]] = {}
        self._taken = Counter[tuple[str, str, str]]()
        self._holdings: dict[tuple[str, str], tuple[str, str, str]] = {}
        self._watches: set[asyncio.Queue[bytes]] = set()
        self._server = HttpServer(self._respond, _LIMITS, methods=("GET", "POST", "PUT", "DELETE"))

    async def start(self) -> None:
        """Raises `OSError`."""
        self.port = await self._server.start("127.0.0.1", 0)

    async def stop(self) -> None:
        await self._server.stop(0)

    def kubeconfig(self) -> str:
        """The content of a kubeconfig file for clients of this server."""
        cluster = f'{{"name": "demo", "cluster": {{"server": "http://127.0.0.1:{self.port}"}}}}'
        context = '{"name": "demo", "context": {"cluster": "demo", "user": "demo"}}'
        users = '[{"name": "demo", "user": {}}]'
        return f'{{"current-context": "demo", "clusters": [{cluster}], "contexts": [{context}], "users": {users}}}\n'

    def devices(self, driver: str) -> Sequence[Device]:
        """The devices in the slices of a driver."""
        return [
            device for each in self._slices.values() if each.spec.driver == driver for device in each.spec.devices or ()
        ]

    def allocate(self, name: str, driver: str, *, pod: str, namespace: str = "default", device: str = "") -> str:
        """Adds a claim for a pod that has a free device of the driver without taints, the one named `device` if given.

        Returns the device's name. Raises `LookupError` without such a device.
        """
        for each in self._slices.values():
            for found in each.spec.devices or ():
                key = driver, each.spec.pool.name, found.name
                is_wanted = each.spec.driver == driver and device in ("", found.name) and not found.taints
                if is_wanted and self._taken[key] < _shares(found):
                    self._taken[key] += 1
                    self._holdings[namespace, name] = key
                    share = {"shareID": str(uuid.uuid4())} if found.allow_multiple_allocations else {}
                    self._add_claim(namespace, name, pod, key, share)
                    return found.name
        problem = f"{device} is not free" if device else "no free device"
        raise LookupError(f"{driver}: {problem} in {len(self._slices)} slices")

    def release(self, name: str, namespace: str = "default") -> None:
        """Makes the device of a claim free. The claim stays until another one has its name."""
        if taken := self._holdings.pop((namespace, name), None):
            self._taken[taken] -= 1

    # `ClaimApi`

    async def claim(self, namespace: str, name: str) -> AllocatedClaim:
        try:
            return self._claims[namespace, name][0]
        except KeyError:
            raise ClaimApiError(f'resourceclaims.{GROUP} "{name}" not found') from None

    async def delete_slices(self, driver: str) -> None:
        for each in [one for one in self._slices.values() if not driver or one.spec.driver == driver]:
            self._delete(each)

    # Requests

    def _respond(self, request: Request) -> Response:
        query = {name: values[-1] for name, values in parse_qs(request.query).items()}
        if request.path == "/version":
            return _json({"major": "1", "minor": _RELEASE.split(".")[1], "gitVersion": _RELEASE})
        if request.path == f"/apis/{GROUP}":
            return _json({"versions": [{"groupVersion": f"{GROUP}/v1", "version": "v1"}]})
        if request.path == f"/api/v1/nodes/{self.node}":
            status = {"nodeInfo": {"kubeletVersion": _RELEASE}}
            return _json({"metadata": {"name": self.node, "uid": self._uid}, "status": status})
        if found := _CLAIM.fullmatch(request.path):
            if claim := self._claims.get((found[1], found[2])):
                return _json(claim[1])
        elif request.path == _SLICES:
            return self._create(request, query) if request.method == "POST" else self._list(query)
        elif existing := self._slices.get(request.path.removeprefix(f"{_SLICES}/")):
            return self._change(request, existing)
        raise HttpError(404, _status(404, "NotFound", f"{request.path} not found"))

    def _list(self, query: Mapping[str, str]) -> Response:
        selector = dict(part.split("=", 1) for part in query.get("fieldSelector", "").split(",") if "=" in part)
        driver = selector.get("spec.driver", "")
        if "watch" in query:
            return Response(200, b"", stream=self._watch(driver))
        items = [each for each in self._slices.values() if each.spec.driver == driver or not driver]
        return _json({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, driver: str) -> AsyncGenerator[bytes, None]:
        """The changes from now on. Clients list first, and nothing changes between the two requests of the demo."""
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._watches.add(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watches.discard(queue)

    def _create(self, request: Request, query: Mapping[str, str]) -> Response:
        body = _slice(request)
        name = body.metadata.name
        if "dryRun" in query:
            return _json(body, 201)
        if name in self._slices:
            raise HttpError(409, _status(409, "AlreadyExists", f"{name} already exists"))
        return _json(self._store("ADDED", body, str(uuid.uuid4())), 201)

    def _change(self, request: Request, existing: ResourceSlice) -> Response:
        if request.method == "GET":
            return _json(existing)
        if request.method == "DELETE":
            self._delete(existing)
            return _json({"kind": "Status", "status": "Success"})
        body = _slice(request)
        if body.metadata.resource_version not in ("", existing.metadata.resource_version):
            raise HttpError(409, _status(409, "Conflict", f"{existing.metadata.name} has been modified"))
        return _json(self._store("MODIFIED", body, existing.metadata.uid))

    def _store(self, event: str, body: ResourceSlice, uid: str) -> ResourceSlice:
        self._version += 1
        stored = replace(body, metadata=replace(body.metadata, uid=uid, resource_version=str(self._version)))
        self._slices[stored.metadata.name] = stored
        self._report(event, stored)
        return stored

    def _delete(self, existing: ResourceSlice) -> None:
        self._version += 1
        del self._slices[existing.metadata.name]
        self._report(
            "DELETED", replace(existing, metadata=replace(existing.metadata, resource_version=str(self._version)))
        )

    def _report(self, event: str, changed: ResourceSlice) -> None:
        line = msgspec.json.encode(_Event(event, changed)) + b"\n"
        for queue in self._watches:
            queue.put_nowait(line)

    def _add_claim(
        self, namespace: str, name: str, pod: str, key: tuple[str, str, str], share: Mapping[str, str]
    ) -> None:
        driver, pool, device = key
        uid = str(uuid.uuid4())
        claim = AllocatedClaim(namespace=namespace, name=name, uid=uid, drivers=(driver,), reserved_for=(pod,))
        request = {"name": "device", "exactly": {"deviceClassName": driver}}
        result = {"request": "device", "driver": driver, "pool": pool, "device": device, **share}
        status = {
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": str(uuid.uuid4())}],
        }
        metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(self._version)}
        document = {"metadata": metadata, "spec": {"devices": {"requests": [request]}}, "status": status}
        self._claims[namespace, name] = claim, document


def _shares(device: Device) -> int:
    """How many claims may have the device."""
    capacity = (device.capacity or {}).get("shares") if device.allow_multiple_allocations else None
    return int(capacity.value) if capacity is not None else 1


def _slice(request: Request) -> ResourceSlice:
    try:
        return msgspec.json.decode(bytes(request.body), type=ResourceSlice)
    except msgspec.MsgspecError as error:
        raise HttpError(400, _status(400, "BadRequest", f"expected a ResourceSlice: {error}")) from error


def _json(content: object, status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(content))


def _status(code: int, reason: str, message: str) -> str:
    document = {"kind": "Status", "status": "Failure", "reason": reason, "code": code, "message": message}
    return msgspec.json.encode(document).decode()
