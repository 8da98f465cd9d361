"""The kubelet's calls to prepare and unprepare claims, and their messages.

A call of the kubelet may end early: its connection is lost, or its time is over. The preparation goes on, because it
changes devices; the next call finds its result. Each UID of a request is a key of the response, and no other.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from accelplane import rpc
from accelplane.dra.events import Reason
from accelplane.dra.journal import valid_uid
from accelplane.dra.model import ClaimError, ClaimPreparer, ClaimRef, PreparedDevice, error_line
from accelplane.kubelet import dra_v1_pb2 as pb

log = logging.getLogger(__name__)

MAX_CLAIMS = 1000
# Namespaces and names are parts of URLs.
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_VERSIONS = ("v1", "v1beta1")

_REASONS: Mapping[str, Reason] = {"prepare": "PrepareFailed", "unprepare": "UnprepareFailed"}

_Result = TypeVar("_Result")
_Call = Callable[[Sequence[ClaimRef]], Awaitable[Mapping[str, _Result]]]


class Counters:
    """Claims of the kubelet's calls since the start."""

    def __init__(self) -> None:
        self.prepared = 0
        self.prepare_failures = 0
        self.unprepared = 0
        self.unprepare_failures = 0


class ClaimCalls:
    """Answers NodePrepareResources and NodeUnprepareResources for one driver."""

    def __init__(
        self,
        driver: str,
        preparer: ClaimPreparer,
        on_event: Callable[[Reason, str, ClaimRef], None] = lambda _reason, _text, _claim: None,
    ) -> None:
        """`on_event` gets reason, text and claim of each failure."""
        self._driver = driver
        self._on_event = on_event
        self._preparer = preparer
        self._tasks: set[object] = set()  # strong references
        self.counters = Counters()

    @property
    def running(self) -> int:
        """The number of calls whose work has not ended, also those that the kubelet no longer waits for."""
        return len(self._tasks)

    def methods(self) -> Mapping[str, rpc.Method]:
        methods: dict[str, rpc.Method] = {}
        for version in _VERSIONS:
            service = f"/k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin"
            methods[f"{service}/NodePrepareResources"] = rpc.unary(
                pb.NodePrepareResourcesRequest,
                pb.NodePrepareResourcesResponse,
                self._prepare if version == "v1" else self._prepare_without_shares,
            )
            methods[f"{service}/NodeUnprepareResources"] = rpc.unary(
                pb.NodeUnprepareResourcesRequest, pb.NodeUnprepareResourcesResponse, self._unprepare
            )
        return methods

    async def _prepare(self, request: pb.NodePrepareResourcesRequest) -> pb.NodePrepareResourcesResponse:
        response = pb.NodePrepareResourcesResponse()
        for uid, result in (await self._answer("prepare", self._preparer.prepare, request.claims)).items():
            entry = response.claims[uid]
            if isinstance(result, ClaimError):
                self.counters.prepare_failures += 1
                entry.error = error_line(str(result))
            else:
                self.counters.prepared += 1
                entry.devices.extend(_device(each) for each in result)
        return response

    async def _prepare_without_shares(self, request: pb.NodePrepareResourcesRequest) -> pb.NodePrepareResourcesResponse:
        """As `_prepare`, for v1beta1."""
        response = await self._prepare(request)
        for entry in response.claims.values():
            for device in entry.devices:
                device.ClearField("share_id")
        return response

    async def _unprepare(self, request: pb.NodeUnprepareResourcesRequest) -> pb.NodeUnprepareResourcesResponse:
        response = pb.NodeUnprepareResourcesResponse()
        for uid, error in (await self._answer("unprepare", self._preparer.unprepare, request.claims)).items():
            entry = response.claims[uid]
            if error is None:
                self.counters.unprepared += 1
            else:
                self.counters.unprepare_failures += 1
                entry.error = error_line(str(error))
                # The kubelet makes no event of it.
                log.warning("%s: cannot unprepare the claim with UID %s: %s", self._driver, uid, entry.error)
        return response

    async def _answer(
        self, what: str, call: _Call[_Result], claims: Sequence[pb.Claim]
    ) -> dict[str, _Result | ClaimError]:
        """The result for each UID of the request. Raises `rpc.RpcError` if the request is invalid."""
        if len(claims) > MAX_CLAIMS:
            raise rpc.RpcError("INVALID_ARGUMENT", f"found {len(claims)} claims, expected at most {MAX_CLAIMS}")
        if not all(claim.uid for claim in claims):
            raise rpc.RpcError("INVALID_ARGUMENT", "found a claim without UID")
        results: dict[str, _Result | ClaimError] = {}
        valid: dict[str, ClaimRef] = {}
        for claim in claims:
            reference = ClaimRef(claim.namespace, claim.uid, claim.name)
            if problem := _problem(reference, valid.get(claim.uid)):
                valid.pop(claim.uid, None)
                results[claim.uid] = ClaimError(problem)
            elif claim.uid not in results:
                valid[claim.uid] = reference
        if valid:
            task = asyncio.ensure_future(self._run(what, call, tuple(valid.values())))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            results |= await asyncio.shield(task)
        return results

    async def _run(
        self, what: str, call: _Call[_Result], claims: Sequence[ClaimRef]
    ) -> dict[str, _Result | ClaimError]:
        try:
            found = await call(claims)
        except Exception as error:  # a preparer must not raise; the text goes to the pods' events
            log.exception("%s: cannot %s claims", self._driver, what)
            return {claim.uid: ClaimError(f"internal error: {type(error).__name__}: {error}") for claim in claims}
        missing = ClaimError(f"internal error: no result, cannot {what} the claim")
        results = {claim.uid: found.get(claim.uid, missing) for claim in claims}
        for claim in claims:
            if isinstance(error := results[claim.uid], ClaimError):
                self._on_event(_REASONS[what], error_line(str(error)), claim)
        return results


def _problem(claim: ClaimRef, earlier: ClaimRef | None) -> str:
    """What is wrong with a claim of a request. Empty if it is valid."""
    if not valid_uid(claim.uid):
        return "invalid UID of the claim, expected at most 64 letters, digits and hyphens"
    if not _NAME.fullmatch(claim.namespace) or not _NAME.fullmatch(claim.name):
        return f"invalid namespace or name of the claim: found {claim.namespace[:80]!r} and {claim.name[:80]!r}"
    if earlier is not None and earlier != claim:
        return f"the request has two claims with this UID, {earlier.name} and {claim.name}"
    return ""


def _device(device: PreparedDevice) -> pb.Device:
    return pb.Device(
        # An empty list would be all requests. A subrequest, `main/sub`, is named by its main request.
        request_names=tuple(dict.fromkeys(request.partition("/")[0] for request in device.requests)),
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_ids,
        share_id=device.share_id or None,
    )
