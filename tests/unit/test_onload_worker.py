"""The Onload worker: its environment, the ID of its container, crictl on the host, and the parameters of the module."""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write
from waiting import until

from accelplane.host import HostError
from accelplane.host.files import HostFiles
from accelplane.onloadworker import parameters
from accelplane.onloadworker.configuration import Configuration, WorkerError, absolute_path, split_container_id
from accelplane.onloadworker.container_id import Pod, id_in_cgroup, process_start, started_container
from accelplane.onloadworker.crictl import USUAL_PATHS, find_crictl
from accelplane.onloadworker.parameters import DEFAULTS, Values
from accelplane.onloadworker.worker import Worker, require_device

ID = "3b" * 32
SERVER = "/mnt/onload/sbin/onload_cp_server"
ENVIRONMENT = {
    "POD_NAME": "plugin-x7",
    "POD_NAMESPACE": "onload",
    "CONTAINER_NAME": "onload-worker",
    "ONLOAD_CP_SERVER_PATH": SERVER,
    "ONLOAD_CP_SERVER_PARAMS": "-K",
}
VALUES = Values("/usr/bin/crictl", f"exec {ID} {SERVER} -K")


def load(root: Path, values: Values = DEFAULTS, *, state: str = "live") -> None:
    """The module is loaded, with these parameters; a second time it is another instance."""
    directory = root / "sys/module/onload"
    result = root / "sys/module/.new"
    write(result / "initstate", f"{state}\n")
    write(result / "parameters/cplane_server_path", f"{values.path}\n")
    write(result / "parameters/cplane_server_params", f"{values.arguments}\n")
    if directory.exists():
        directory.rename(root / f"sys/module/.old{len(os.listdir(directory.parent))}")
    result.rename(directory)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    load(tmp_path)
    write(tmp_path / "dev/onload", "")
    return tmp_path


def current(root: Path) -> Values:
    return parameters.read(str(root))


# The environment


def test_the_arguments_execute_the_server_in_the_container() -> None:
    assert Configuration.of(ENVIRONMENT).arguments(ID) == f"exec {ID} {SERVER} -K"


@pytest.mark.parametrize(("value", "expected"), [("", ""), ("  ", ""), (" -K  -l 7 ", " -K  -l 7")])
def test_parameters_of_the_server_follow_its_path(value: str, expected: str) -> None:
    configuration = Configuration.of({**ENVIRONMENT, "ONLOAD_CP_SERVER_PARAMS": value})
    assert configuration.arguments(ID) == f"exec {ID} {SERVER}{expected}"


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("POD_NAME", ""),
        ("POD_NAME", "a/b"),
        ("POD_NAMESPACE", "../x"),
        ("CONTAINER_NAME", "-x"),
        ("ONLOAD_CP_SERVER_PATH", ""),
        ("ONLOAD_CP_SERVER_PATH", "sbin/server"),
        ("ONLOAD_CP_SERVER_PATH", "/a b"),
        ("ONLOAD_CP_SERVER_PATH", "/a\n"),
        ("ONLOAD_CP_SERVER_PARAMS", "-K\n-l"),
        ("ONLOAD_CP_SERVER_PARAMS", "é"),
    ],
)
def test_an_invalid_variable_is_reported(variable: str, text: str) -> None:
    with pytest.raises(WorkerError, match=f"^{variable}: found "):
        Configuration.of({**ENVIRONMENT, variable: text})


def test_arguments_that_the_kernel_would_reject_are_an_error() -> None:
    configuration = Configuration.of({**ENVIRONMENT, "ONLOAD_CP_SERVER_PARAMS": "-K " * 400})
    with pytest.raises(WorkerError, match=r"cplane_server_params: found 1[0-9]{3} characters, expected 1024 or less"):
        configuration.arguments(ID)


@given(st.dictionaries(st.sampled_from(sorted(ENVIRONMENT)), st.text(max_size=30)))
def test_any_environment_gives_words_for_the_kernel_or_an_error(changes: Mapping[str, str]) -> None:
    with contextlib.suppress(WorkerError):
        words = Configuration.of({**ENVIRONMENT, **changes}).arguments(ID).split(" ")
        assert words[:2] == ["exec", ID]
        assert words[2].startswith("/")


# The ID of the container


def status(**changes: Any) -> dict[str, Any]:
    running: dict[str, Any] = {"running": {"startedAt": "2024-01-01T00:00:00Z"}}
    ready = {"name": "onload-worker", "ready": True, "started": True, "state": running, "containerID": f"cri-o://{ID}"}
    return {**ready, **changes}


def started(*statuses: object) -> str:
    document = msgspec.json.encode({"status": {"containerStatuses": statuses}})
    return started_container(msgspec.json.decode(document, type=Pod), "onload-worker")


def test_a_running_container_has_its_id_in_the_status() -> None:
    assert started(status(name="device-plugin", containerID="x"), status()) == f"cri-o://{ID}"


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"ready": False},
        {"started": False},
        {"started": None},
        {"state": {"waiting": {}}},
        {"state": {"running": None}},
        {"state": None},
    ],
)
def test_a_container_that_is_not_started_ready_and_running_has_no_id(changes: Mapping[str, object]) -> None:
    assert started(status(**changes)) == ""


@pytest.mark.parametrize(
    ("at", "found"),
    [("2024-01-01T00:00:00Z", True), ("2024-01-01T01:59:59+02:00", True), ("2023-12-31T23:59:57Z", False)]
    + [(text, True) for text in (None, "", "yesterday", "9999-99-99T00:00:00Z")],
)
def test_a_container_started_before_this_process_is_a_former_one(at: str | None, found: bool) -> None:
    document = msgspec.json.encode({"status": {"containerStatuses": [status(state={"running": {"startedAt": at}})]}})
    pod = msgspec.json.decode(document, type=Pod)
    assert bool(started_container(pod, "onload-worker", 1704067200.9)) == found


@given(st.text(max_size=30))
def test_any_time_of_a_start_is_accepted(at: str) -> None:
    started(status(state={"running": {"startedAt": at}}))


def test_the_start_of_this_process_is_known(tmp_path: Path) -> None:
    assert 0 <= time.time() - process_start(HostFiles("/")) < 24 * 3600
    write(tmp_path / "proc/self/stat", "1 (x")
    assert process_start(HostFiles(tmp_path)) == 0


@pytest.mark.parametrize("missing", ["started", "ready", "state"])
def test_an_absent_field_means_not_started(missing: str) -> None:
    assert started({key: value for key, value in status().items() if key != missing}) == ""


@pytest.mark.parametrize(
    "document", ["{}", '{"status":{}}', '{"status":{"containerStatuses":null}}', '{"status":null}']
)
def test_a_pod_without_statuses_has_no_started_container(document: str) -> None:
    assert started_container(msgspec.json.decode(document, type=Pod), "a") == ""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (f"cri-o://{ID}", ("cri-o", ID)),
        (f"containerd://{ID}", ("containerd", ID)),
        *((text, None) for text in ("", ID, f"a://{ID}://b", "cri-o://", "cri-o://-it", "cri-o://a b", "cri-o://a/b")),
    ],
)
def test_a_container_id_has_a_runtime_and_an_id(text: str, found: tuple[str, str] | None) -> None:
    if found:
        assert split_container_id(text) == found
    else:
        with pytest.raises(WorkerError, match=r"^unexpected format of containerID "):
            split_container_id(text)


@given(st.text(max_size=80))
def test_any_text_is_split_or_rejected(text: str) -> None:
    with contextlib.suppress(WorkerError):
        runtime, id_ = split_container_id(text)
        assert text == f"{runtime}://{id_}"
        assert not id_.startswith("-")
        assert len(id_.split()) == 1


@pytest.mark.parametrize(
    "line",
    [
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1_2.slice/cri-containerd-{ID}.scope",
        f"0::/kubepods.slice/kubepods-pod1_2.slice/crio-{ID}.scope",
        f"12:memory:/kubepods/besteffort/pod1-2/{ID}\n11:cpu,cpuacct:/kubepods/besteffort/pod1-2/{ID}\n0::/",
        f"0::/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}",
        f"0::/../../kubepods-pod1.slice/crio-{ID}.scope/",
    ],
)
def test_the_cgroup_of_both_runtimes_has_the_id(line: str) -> None:
    assert id_in_cgroup(line + "\n") == ID


@pytest.mark.parametrize("text", ["", "0::/\n", f"0::/{ID[:-1]}", f"0::/{ID}/x", f"1:a:/{ID}\n2:b:/{'4c' * 32}"])
def test_a_cgroup_without_a_container_id_has_none(text: str) -> None:
    assert id_in_cgroup(text) == ""


@given(st.text(max_size=300))
def test_any_cgroup_file_gives_an_id_or_nothing(text: str) -> None:
    found = id_in_cgroup(text)
    assert found == "" or (len(found) == 64 and found in text)


# crictl


def executable(root: Path, path: str, mode: int = 0o755) -> None:
    write(root / path[1:], "").chmod(mode)


def test_the_first_default_path_with_a_program_is_used(tmp_path: Path) -> None:
    for path in reversed(USUAL_PATHS):
        executable(tmp_path, path)
        assert find_crictl("", HostFiles(tmp_path)) == path


def test_links_of_the_host_are_resolved_in_the_root_of_the_host(tmp_path: Path) -> None:
    executable(tmp_path, "/var/lib/k3s/bin/k3s")
    link(tmp_path / "usr/local/bin/crictl", "/var/lib/k3s/bin/k3s")
    assert find_crictl("", HostFiles(tmp_path)) == "/usr/local/bin/crictl"


def test_the_path_is_configurable(tmp_path: Path) -> None:
    executable(tmp_path, "/opt/cri/crictl")
    assert find_crictl("/opt/cri/crictl", HostFiles(tmp_path)) == "/opt/cri/crictl"
    with pytest.raises(WorkerError, match="-crictl-path: found 'cri ctl', expected an absolute path"):
        find_crictl("cri ctl", HostFiles(tmp_path))


def test_without_a_program_the_error_names_what_was_searched(tmp_path: Path) -> None:
    executable(tmp_path, "/usr/bin/crictl", 0o644)
    (tmp_path / "usr/local/bin/crictl").mkdir(parents=True)
    link(tmp_path / "opt/bin/crictl", "crictl")
    with pytest.raises(WorkerError) as raised:
        find_crictl("", HostFiles(tmp_path))
    assert str(raised.value).startswith("crictl: found no executable file on the host, searched /usr/bin/crictl, /usr/")
    assert "set -crictl-path or ONLOAD_CRICTL_PATH" in str(raised.value)
    with pytest.raises(WorkerError, match="searched /x/crictl; install"):
        find_crictl("/x/crictl", HostFiles(tmp_path))


def test_a_host_that_is_not_visible_gets_the_original_path(caplog: pytest.LogCaptureFixture) -> None:
    assert find_crictl("", None) == "/usr/bin/crictl"
    assert find_crictl("/x/crictl", None) == "/x/crictl"
    assert "/x/crictl is not checked: the file system of the host is not visible" in caplog.text


def test_the_root_link_of_a_process_is_not_resolved() -> None:
    host = HostFiles(f"/proc/{os.getpid()}/root")
    assert host.root == f"/proc/{os.getpid()}/root/."
    assert "self" in host.names("/proc")
    assert host.text("/proc/self/comm") == Path("/proc/self/comm").read_text().strip()


@given(st.text(max_size=40))
def test_any_path_is_accepted_or_rejected(text: str) -> None:
    with contextlib.suppress(WorkerError):
        assert absolute_path("x", text) == text
        assert text.startswith("/")
        assert text.split() == [text]


# The parameters


def test_values_are_written_and_read_again(root: Path) -> None:
    parameters.write(str(root), VALUES)
    assert current(root) == VALUES
    parameters.write(str(root), DEFAULTS)
    assert current(root) == DEFAULTS


def test_a_parameter_that_cannot_be_written_is_an_error(root: Path) -> None:
    os.unlink(root / "sys/module/onload/parameters/cplane_server_path")
    (root / "sys/module/onload/parameters/cplane_server_path").mkdir()
    with pytest.raises(HostError, match="cplane_server_path"):
        parameters.write(str(root), VALUES)


def test_a_parameter_without_a_value_is_empty(root: Path) -> None:
    load(root, Values("(null)", "(null)"))
    assert current(root) == DEFAULTS


def test_values_without_effect_are_an_error(root: Path) -> None:
    directory = root / "sys/module/onload/parameters"
    os.unlink(directory / "cplane_server_path")
    link(directory / "cplane_server_path", "cplane_server_params")
    with pytest.raises(WorkerError, match="parameters: found '/usr/bin/crictl' with '/usr/bin/crictl' after a write"):
        parameters.write(str(root), VALUES)


def test_a_module_is_identified_once_it_is_live(tmp_path: Path) -> None:
    assert parameters.module_instance(str(tmp_path)) is None
    load(tmp_path, state="coming")
    assert parameters.module_instance(str(tmp_path)) is None
    load(tmp_path)
    first = parameters.module_instance(str(tmp_path))
    assert first is not None
    load(tmp_path)
    assert parameters.module_instance(str(tmp_path)) not in (None, first)


def test_values_of_a_crashed_worker_are_not_restored() -> None:
    assert parameters.final_values(VALUES) == DEFAULTS
    assert parameters.final_values(Values("/sbin/server", "-K")) == Values("/sbin/server", "-K")


def test_the_device_node_must_exist(root: Path) -> None:
    require_device(str(root))
    os.unlink(root / "dev/onload")
    with pytest.raises(WorkerError, match=r"^/dev/onload is not available: "):
        require_device(str(root))


@contextlib.asynccontextmanager
async def working(root: Path, values: Values = VALUES) -> AsyncGenerator[asyncio.Task[None]]:
    task = asyncio.create_task(Worker(values, str(root), interval=0.02).run())
    try:
        await until(lambda: task.done() or current(root) == values)
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_the_parameters_are_restored_at_the_end(root: Path) -> None:
    load(root, Values("/sbin/server", "-l 7"))
    async with working(root):
        assert current(root) == VALUES
    assert current(root) == Values("/sbin/server", "-l 7")


async def test_a_reloaded_module_gets_the_parameters_again(root: Path) -> None:
    async with working(root):
        load(root)
        await until(lambda: current(root) == VALUES)
        (root / "sys/module/onload").rename(root / "sys/module/.gone")
        load(root, state="coming")
        write(root / "sys/module/onload/initstate", "live\n")
        await until(lambda: current(root) == VALUES)
    assert current(root) == DEFAULTS


async def test_values_of_another_program_are_kept(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with working(root):
        parameters.write(str(root), Values("/other", "-x"))
        await until(lambda: "changed by another program" in caplog.text)
    assert current(root) == Values("/other", "-x")
    assert caplog.text.count("changed by another program") == 1


async def test_a_module_unloaded_at_the_end_is_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with working(root):
        (root / "sys/module/onload").rename(root / "sys/module/.gone")
        await until(lambda: "not ready, waiting for the kernel module onload" in caplog.text)
    assert "parameters not restored: /sys/module/onload/parameters/cplane_server_path" in caplog.text


async def test_a_reloaded_module_with_another_device_number_restarts_the_container(root: Path) -> None:
    os.unlink(root / "dev/onload")
    link(root / "dev/onload", "null")
    link(root / "proc/1/root/dev/onload", "zero")
    os.mknod(root / "dev/null", 0o600 | 0o020000, os.makedev(1, 3))
    os.mknod(root / "proc/1/root/dev/zero", 0o600 | 0o020000, os.makedev(1, 5))
    async with working(root) as task:
        load(root)
        await asyncio.wait([task])
        assert "the host has another device number" in str(task.exception())


async def test_parameters_that_cannot_be_written_end_the_worker(root: Path) -> None:
    (root / "sys/module/onload/parameters/cplane_server_params").unlink()
    with pytest.raises(WorkerError, match="cplane_server_params"):
        await Worker(VALUES, str(root)).run()
