"""`python -m benchmarks.reviewer PORT SGX|FPGA CONNECTIONS REVIEWS`: asks a webhook as the API server would, without a
pause.

Each connection sends its next review as soon as it has the answer to the last. It does the least that TLS asks for, so
that it takes little of the time that it measures. Standard output: how long each review took, and all of them.
"""

import json
import selectors
import socket
import ssl
import sys
import time

import msgspec

from benchmarks.figures import Rounds

NAMESPACE = "default"
# Where reviews are sent, and what the pod asks for.
ASKED = {
    "SGX": ("/mutate--v1-pod", {"sgx.intel.com/epc": "512Ki"}),
    "FPGA": ("/pods", {"fpga.intel.com/arria10.dcp1.1-nlb0-orchestrated": "1"}),
}


def main() -> None:
    port, connections, reviews = (int(sys.argv[place]) for place in (1, 3, 4))
    message = request(sys.argv[2])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The server is a process of the benchmark.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    sockets = [context.wrap_socket(socket.create_connection(("127.0.0.1", port))) for _ in range(connections)]
    ask(sockets, message, max(200, connections))
    took, seconds = ask(sockets, message, reviews)
    sys.stdout.buffer.write(msgspec.json.encode(Rounds(took=took, seconds=seconds)))


def ask(sockets: list[ssl.SSLSocket], message: bytes, reviews: int) -> tuple[list[float], float]:
    """Microseconds of each review, and the seconds of all."""
    took: list[float] = []
    begun: dict[ssl.SSLSocket, float] = {}
    selector = selectors.DefaultSelector()
    start = time.perf_counter()
    for one in sockets:
        selector.register(one, selectors.EVENT_READ)
        begun[one] = time.perf_counter()
        one.sendall(message)
    while len(took) < reviews:
        for key, _events in selector.select():
            one = key.fileobj
            assert isinstance(one, ssl.SSLSocket)
            answer = one.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200 "), answer[:200]
            assert b"JSONPatch" in answer, answer
            now = time.perf_counter()
            took.append((now - begun[one]) * 1e6)
            begun[one] = now
            one.sendall(message)
    seconds = time.perf_counter() - start
    for one in sockets:
        one.recv(65536)
    selector.close()
    return took, seconds


def request(what: str) -> bytes:
    """A pod that uses an accelerator, created by a controller, as the API server asks about it."""
    path, asked_for = ASKED[what]
    names = {f"f:field{number}": {} for number in range(30)}
    resources = {**asked_for, "cpu": "500m", "memory": "256Mi"}
    token = {"name": "kube-api-access-abcde", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "enclave-5d59d67564-",
            "namespace": NAMESPACE,
            "labels": {"app": "enclave", "pod-template-hash": "5d59d67564"},
            "managedFields": [{"manager": "kube-controller-manager", "operation": "Update", "fieldsV1": names}],
        },
        "spec": {
            "containers": [
                {
                    "name": "enclave",
                    "image": "registry.example/enclave:1",
                    "resources": {"limits": resources, "requests": resources},
                    "volumeMounts": [token],
                    "terminationMessagePath": "/dev/termination-log",
                    "imagePullPolicy": "IfNotPresent",
                }
            ],
            "volumes": [{"name": token["name"], "projected": {"sources": [{"configMap": {"name": "ca"}}]}}],
            "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute"}],
            "schedulerName": "default-scheduler",
        },
    }
    asked = {
        "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
        "kind": {"group": "", "version": "v1", "kind": "Pod"},
        "resource": {"group": "", "version": "v1", "resource": "pods"},
        "namespace": NAMESPACE,
        "operation": "CREATE",
        "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
        "object": pod,
        "oldObject": None,
        "dryRun": False,
    }
    body = json.dumps({"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": asked}).encode()
    head = (
        f"POST {path}?timeout=10s HTTP/1.1\r\nHost: hooks.system.svc:443\r\nUser-Agent: kube-apiserver-admission"
        f"\r\nContent-Length: {len(body)}\r\nAccept: application/json, */*\r\nContent-Type: application/json\r\n"
        "Accept-Encoding: gzip\r\n\r\n"
    )
    return head.encode() + body


if __name__ == "__main__":
    main()
