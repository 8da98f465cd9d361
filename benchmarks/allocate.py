"""The latency of `Allocate` for GPUs, whose CDI files are checked in each call, and for devices without CDI.

One agent runs all families. Each client also measures a grpcio server that returns the same bytes without any work, in
turns with the agent, so that both times include the costs of client and machine.
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
# Latency of the Go plugins with a Go client on this kind of machine, in microseconds by quantile.
_GO_SMALL = {0.5: 75.0, 0.99: 370.0}
_GO = {GPU: {0.5: 560.0, 0.99: 1900.0}, NPU: _GO_SMALL, ENCLAVE: _GO_SMALL, DLB: _GO_SMALL}
# GPUs no slower than the Go plugin, the others at most twice as slow.
_BUDGET = {name: {share: value * (1 if name == GPU else 2) for share, value in go.items()} for name, go in _GO.items()}
_NAMES = {GPU: "GPU, with CDI", NPU: "NPU, without CDI", ENCLAVE: "SGX, without CDI", DLB: "DLB, without CDI"}

Call = Callable[[], object]


def measure(scale: Scale) -> Result:
    count = scale.of(5000, 500) // _ROUNDS
    with large_node() as setup, ReferenceKubelet(setup.kubelet_dir) as kubelet, agent(setup), ExitStack() as stack:
        sockets = {
            name: registration.socket
            for name, registration in kubelet.registrations(setup.resources).items()
            if name in _GO
        }
        lists = {}
        while lists.keys() != _GO.keys():
            update = kubelet.wait_for(lambda update: update.resource in _GO and bool(update.devices))
            lists[update.resource] = sorted(update.devices)
        reference: dict[str, Call] = {}
        raw: dict[str, Call] = {}
        for resource, path in sockets.items():
            request = allocate_request(lists[resource][0])
            with ReferenceClient(path) as once:
                answer = once.call(request)
            check(resource, answer)
            constant_socket = f"{setup.directory}/{len(reference)}"
            stack.enter_context(serving(constant_socket, answer.SerializeToString()))
            for key, socket in ((resource, path), (_constant(resource), constant_socket)):
                grpcio_client = stack.enter_context(ReferenceClient(socket))
                raw_client = stack.enter_context(RawGrpcClient(socket, ALLOCATE))
                data = request.SerializeToString()
                reference[key] = lambda grpcio_client=grpcio_client, request=request: grpcio_client.call(request)
                raw[key] = lambda raw_client=raw_client, data=data: raw_client.call(data)
        by_reference, by_raw = measure_in_turns(reference, count), measure_in_turns(raw, count)
    return Result(
        figures=[
            figure
            for client, rounds in (("raw gRPC client", by_raw), ("grpcio client", by_reference))
            for resource in _GO
            for figure in _figures(resource, client, rounds)
        ],
        notes=(
            "raw gRPC client: HTTP/2 frames on a blocking socket; grpcio client: the reference, blocking",
            "constant server: grpcio, blocking, returns the same bytes; measured in turns with the agent",
        ),
    )


def check(resource: str, answer: pb.AllocateResponse) -> None:
    """Raises `RuntimeError` unless the response has the expected devices and CDI names."""
    (container,) = answer.container_responses
    if not container.devices or bool(container.cdi_devices) != (resource == GPU):
        raise RuntimeError(f"{resource}: unexpected response: {answer}")


def measure_in_turns(calls: dict[str, Call], count: int) -> dict[str, Sequence[Sequence[float]]]:
    """Microseconds of `count` calls of each client, in alternating rounds."""
    for call in calls.values():
        for _ in range(_WARM_UP):
            call()
    gc.collect()
    gc.freeze()
    rounds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for _ in range(_ROUNDS):
        for name, call in calls.items():
            rounds[name].append(measure_calls(call, count))
    return dict(rounds)


def measure_calls(call: Call, count: int) -> list[float]:
    """Microseconds of `count` calls in a row."""
    times: list[float] = []
    for _ in range(count):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def _figures(resource: str, client: str, rounds: dict[str, Sequence[Sequence[float]]]) -> Sequence[Figure]:
    floor = [sample for samples in rounds[_constant(resource)] for sample in samples]
    return [
        percentile(
            f"{_NAMES[resource]}, {client}, {word}",
            rounds[resource],
            share,
            "us",
            # The budgets are from a Go client. With grpcio, even the constant server would exceed them.
            budget=_BUDGET[resource][share] if client == "raw gRPC client" else None,
            peers={"Go plugin": _GO[resource][share], "constant server": quantile(floor, share)},
        )
        for word, share in _SHARES
    ]


def _constant(resource: str) -> str:
    return f"constant server for {resource}"
