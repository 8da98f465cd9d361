"""`onload-worker` as a process, and the API server that has the ID of its container."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import Process
from tls_peer import Request, document, response, serving
from trees import write

from accelplane.apiserver import ApiServer, NoCredentials
from accelplane.host.files import HostFiles
from accelplane.onloadworker.configuration import Configuration, WorkerError
from accelplane.onloadworker.container_id import find_container_id

ID = "3b" * 32
ENVIRONMENT = {
    "POD_NAME": "plugin-x7",
    "POD_NAMESPACE": "onload",
    "CONTAINER_NAME": "onload-worker",
    "ONLOAD_CP_SERVER_PATH": "/mnt/onload/sbin/onload_cp_server",
    "ONLOAD_CP_SERVER_PARAMS": "-K",
}
PARAMETERS = "sys/module/onload/parameters"
CONFIGURATION = Configuration.of(ENVIRONMENT)


def pod(**changes: Any) -> dict[str, Any]:
    status = {"name": "onload-worker", "ready": True, "started": True, "state": {"running": {}}}
    return {"status": {"containerStatuses": [{**status, "containerID": f"containerd://{ID}", **changes}]}}


def tree(root: Path, *, cgroup: str = f"0::/kubepods.slice/crio-{ID}.scope\n") -> Path:
    write(root / "dev/onload", "")
    write(root / "sys/module/onload/initstate", "live\n")
    for name in ("cplane_server_path", "cplane_server_params"):
        write(root / PARAMETERS / name, "\n")
    write(root / "proc/self/cgroup", cgroup)
    return root


def parameter(root: Path, name: str) -> str:
    return (root / PARAMETERS / f"cplane_server_{name}").read_text()


async def found(root: Path, api: ApiServer, deadline: float = 5.0) -> str:
    return await find_container_id(CONFIGURATION, HostFiles(root), lambda: api, deadline=deadline)


# The API server


async def test_the_id_is_that_of_the_own_container_in_the_own_pod(tmp_path: Path) -> None:
    async with serving(tmp_path, document(pod())) as peer:
        assert await found(tmp_path, peer.api) == ID
    assert [request.path for request in peer.requests] == ["/api/v1/namespaces/onload/pods/plugin-x7"]


async def test_a_container_that_has_not_started_is_waited_for(tmp_path: Path) -> None:
    answers = [pod(started=None), pod(ready=False), {"status": {}}, pod()]

    async def answer(_request: Request, writer: Any) -> None:
        writer.write(response("200 OK", json.dumps(answers.pop(0)).encode()))

    async with serving(tmp_path, answer) as peer:
        assert await found(tmp_path, peer.api) == ID
    assert len(peer.requests) == 4


async def test_a_container_that_does_not_start_in_time_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, document(pod(started=None))) as peer:
        with pytest.raises(
            WorkerError, match="pod onload/plugin-x7: deadline exceeded: container onload-worker is not"
        ):
            await found(tmp_path, peer.api, deadline=2.0)


async def test_another_runtime_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, document(pod(containerID=f"docker://{ID}"))) as peer:
        assert await found(tmp_path, peer.api) == ID
    assert "container runtime 'docker' is untested, expected one of cri-o, containerd" in caplog.text


async def test_an_unexpected_id_is_an_error(tmp_path: Path) -> None:
    async with serving(tmp_path, document(pod(containerID=ID))) as peer:
        with pytest.raises(WorkerError, match="unexpected format of containerID"):
            await found(tmp_path, peer.api)


async def test_without_permission_the_id_is_from_the_own_cgroup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, document({"kind": "Status", "message": "no"}, "403 Forbidden")) as peer:
        assert await found(tree(tmp_path), peer.api) == ID
        assert len(peer.requests) == 1
        assert "is from /proc/self/cgroup: GET /api/v1/namespaces/onload/pods/plugin-x7" in caplog.text
        write(tmp_path / "proc/self/cgroup", "0::/\n")
        with pytest.raises(WorkerError, match=r"has no container ID either\. Permit the service account to get pods"):
            await found(tmp_path, peer.api)


async def test_without_a_cluster_and_without_a_cgroup_there_is_no_id(tmp_path: Path) -> None:
    def connect() -> ApiServer:
        raise NoCredentials("not in a cluster", "no variables")

    with pytest.raises(WorkerError, match="ID of this container unknown: not in a cluster: no variables"):
        await find_container_id(CONFIGURATION, HostFiles(tmp_path), connect)


# The process


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    before = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("KUBERNETES_")}
    yield dict(ENVIRONMENT)
    os.environ.update(before)


async def test_the_command_writes_the_parameters_and_resets_them_at_the_end(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    root = tree(tmp_path / "root")
    worker = Process("onload-worker", f"-root={root}", "-crictl-path=/x/crictl", log=tmp_path / "log", env=environment)
    await worker.wait_for_log("the control plane server is /x/crictl")
    assert parameter(root, "path") == "/x/crictl"
    assert parameter(root, "params") == f"exec {ID} /mnt/onload/sbin/onload_cp_server -K"
    assert await worker.terminate() == 0
    assert (parameter(root, "path"), parameter(root, "params")) == ("\n", "\n")


async def test_the_path_of_crictl_may_be_in_the_environment(tmp_path: Path, environment: dict[str, str]) -> None:
    root = tree(tmp_path / "root")
    environment["ONLOAD_CRICTL_PATH"] = "/y/crictl"
    worker = Process("onload-worker", f"-root={root}", log=tmp_path / "log", env=environment)
    await worker.wait_for_log("the control plane server is /y/crictl")
    worker.send(signal.SIGINT)
    assert await worker.exit_code() == 0


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["-h"], 0, "Usage of onload-worker"),
        (["-nonsense"], 2, "flag provided but not defined: -nonsense"),
        (["-log-format=xml"], 1, "onload-worker: -log-format: found 'xml'"),
        (["-crictl-path=x"], 1, "-crictl-path: found 'x', expected an absolute path"),
    ],
)
async def test_invalid_flags_end_the_command(
    tmp_path: Path, environment: dict[str, str], arguments: list[str], status: int, message: str
) -> None:
    words = [f"-root={tree(tmp_path / 'root')}", "-v=1", *arguments]
    worker = Process("onload-worker", *words, log=tmp_path / "log", env=environment)
    assert await worker.exit_code() == status
    assert message in worker.log()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("dev/onload", "/dev/onload is not available: no such file"),
        ("proc/self/cgroup", "ID of this container unknown: not in a cluster"),
        (f"{PARAMETERS}/cplane_server_params", "cplane_server_params: No such file"),
    ],
)
async def test_a_missing_file_ends_the_command(
    tmp_path: Path, environment: dict[str, str], path: str, message: str
) -> None:
    root = tree(tmp_path / "root")
    os.unlink(root / path)
    # A path that exists on every host, should that of this machine be visible.
    words = (f"-root={root}", "-crictl-path=/bin/sh")
    worker = Process("onload-worker", *words, log=tmp_path / "log", env=environment)
    assert await worker.exit_code() == 1
    assert message in worker.log()
