"""For `helm test`: waits until all pods of these DaemonSets and Deployments are ready. NAMESPACE KIND/NAME..."""

import http.client
import json
import os
import ssl
import sys
import time
from typing import Any

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
SECONDS = 120


def problem(namespace: str, workload: str) -> str:
    """Why the workload is not ready, or nothing."""
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt")
    with open(f"{ACCOUNT}/token") as file:
        headers = {"Authorization": f"Bearer {file.read()}"}
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    connection = http.client.HTTPSConnection(host, int(port), context=context, timeout=30)
    try:
        connection.request("GET", f"/apis/apps/v1/namespaces/{namespace}/{workload}", headers=headers)
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        return f"found status {answer.status} of the API server, expected 200"
    return shortage(workload, json.loads(text))


def shortage(workload: str, found: dict[str, Any]) -> str:
    """Why a workload with this content is not ready, or nothing."""
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return "the controller manager has not processed the last change"
    if workload.startswith("daemonsets/"):
        wanted = status.get("desiredNumberScheduled", 0)
        counts = [status.get(name, 0) for name in ("updatedNumberScheduled", "numberReady")]
        if not wanted:
            return "found no node for its pods, expected at least one; check nodeSelector and tolerations"
    else:
        wanted = found["spec"]["replicas"]
        counts = [status.get(name, 0) for name in ("updatedReplicas", "readyReplicas")]
    return "" if min(counts) >= wanted else f"found {min(counts)} ready pods, expected {wanted}"


def main() -> int:
    namespace, *workloads = sys.argv[1:]
    deadline = time.monotonic() + SECONDS
    problems = dict.fromkeys(workloads, "")
    while True:
        for workload in workloads:
            try:
                problems[workload] = problem(namespace, workload)
            except (OSError, http.client.HTTPException) as error:
                problems[workload] = f"no answer of the API server: {error}"
        if not any(problems.values()) or time.monotonic() > deadline:
            break
        time.sleep(1)
    for workload, text in problems.items():
        print(f"{workload}: {text or 'ready'}")
    return 1 if any(problems.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
