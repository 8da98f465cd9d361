"""How long the kubelet waits for `Allocate`: GPUs, whose CDI files are looked at each time, and devices without such.

All families run in the one agent.

Each method of asking is held against a server of gRPC's reference implementation that answers the same bytes at once,
in turns with the agent, so that what the client and the machine add is in both.
"""

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from benchmarks.agent import DLB, ENCLAVE, GPU, NPU, agent, large_node
from benchmarks.constant_server import serving
from benchmarks.figures import Figure, Result, Scale, percentile, quantile
from benchmarks.raw_grpc_client import RawGrpcClient
from benchmarks.reference_kubelet import ALLOCATE, ReferenceClient, ReferenceKubelet, allocate_request

_ROUNDS, _WARM_UP = 5, 200
_SHARES = (("p50", 0.5), ("p99", 0.99))
# What the Go plugins took, asked by a Go client on this kind of machine; microseconds by share.
_GO_SMALL = {0.5: 75.0, 0.99: 370.0}
_GO = {GPU: {0.5: 560.0, 0.99: 1900.0}, NPU: _GO_SMALL, ENCLAVE: _GO_SMALL, DLB: _GO_SMALL}
# A GPU no slower than Go's; the rest at most twice as slow as Go's server.
_BUDGET = {name: {share: value * (1 if name == GPU else 2) for share, value in go.items()} for name, go in _GO.items()}
_NAMES = {GPU: "GPU, with CDI", NPU: "NPU, without CDI", ENCLAVE: "SGX, without CDI", DLB: "DLB, without CDI"}

Ask = Callable[[], object]


def measure(scale: Scale) -> Result:
    count = scale.of(5000, 500) // _ROUNDS
    with large_node() as setup, ReferenceKubelet(setup.kubelet_dir) as registry, agent(setup), ExitStack() as stack:
        sockets = {name: one.socket for name, one in registry.registrations(setup.resources).items() if name in _GO}
        lists = {}
        while lists.keys() != _GO.keys():
            device_list = registry.wait_for(
                lambda device_list: device_list.resource in _GO and bool(device_list.devices)
            )
            lists[device_list.resource] = sorted(device_list.devices)
        reference: dict[str, Ask] = {}
        raw: dict[str, Ask] = {}
        for resource, path in sockets.items():
            request = allocate_request(lists[resource][0])
            with ReferenceClient(path) as once:
                answer = once.call(request)
            check(resource, answer)
            constant = f"{setup.directory}/{len(reference)}"
            stack.enter_context(serving(constant, answer.SerializeToString()))
            for key, place in ((resource, path), (_constant(resource), constant)):
                whole = stack.enter_context(ReferenceClient(place))
                bare = stack.enter_context(RawGrpcClient(place, ALLOCATE))
                data = request.SerializeToString()
                reference[key] = lambda whole=whole, request=request: whole.call(request)
                raw[key] = lambda bare=bare, data=data: bare.call(data)
        by_reference, by_raw = taken(reference, count), taken(raw, count)
    return Result(
        figures=[
            figure
            for client, rounds in (("raw gRPC client", by_raw), ("grpcio client", by_reference))
            for resource in _GO
            for figure in _figures(resource, client, rounds)
        ],
        notes=(
            "raw gRPC client: HTTP/2 frames on a blocking socket; grpcio client: the reference, blocking",
            "constant server: grpcio, blocking, answers the same bytes; measured in turns with the agent",
        ),
    )


def check(resource: str, answer: pb.AllocateResponse) -> None:
    """Raises `RuntimeError` unless the answer is of the measured kind."""
    (container,) = answer.container_responses
    if not container.devices or bool(container.cdi_devices) != (resource == GPU):
        raise RuntimeError(f"{resource}: not the answer that was to be measured: {answer}")


def taken(asks: dict[str, Ask], count: int) -> dict[str, Sequence[Sequence[float]]]:
    """Microseconds of each of `count` calls, in rounds that take turns."""
    for ask in asks.values():
        for _ in range(_WARM_UP):
            ask()
    gc.collect()
    gc.freeze()
    rounds: dict[str, list[list[float]]] = {name: [] for name in asks}
    for _ in range(_ROUNDS):
        for name, ask in asks.items():
            rounds[name].append(timed(ask, count))
    return dict(rounds)


def timed(ask: Ask, count: int) -> list[float]:
    """Microseconds of `count` calls in a row."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter_ns()
        ask()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def _figures(resource: str, client: str, rounds: dict[str, Sequence[Sequence[float]]]) -> Sequence[Figure]:
    floor = [sample for one in rounds[_constant(resource)] for sample in one]
    return [
        percentile(
            f"{_NAMES[resource]}, {client}, {word}",
            rounds[resource],
            share,
            "us",
            # The budgets come from a Go client; by grpcio's even a server that does nothing would exceed them.
            budget=_BUDGET[resource][share] if client == "raw gRPC client" else None,
            peers={"Go plugin": _GO[resource][share], "constant server": quantile(floor, share)},
        )
        for word, share in _SHARES
    ]


def _constant(resource: str) -> str:
    return f"constant server for {resource}"
