"""The demos request resources of the plugins. Those with our own image use the devices and print them."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml
from manifests import REPOSITORY, Object, own_image
from trees import link, write

DEMOS = REPOSITORY / "demo"
Find = Callable[..., tuple[int, str]]

# Programs of other projects: file -> (kind, name, container -> (resource, image, command)).
IMAGES_OF_OTHERS: dict[str, tuple[str, str, dict[str, tuple[str, str, list[str]]]]] = {
    "intelgpu-job.yaml": (
        "Job", "intelgpu-demo-job",
        {"intelgpu-demo-job-1": ("gpu.intel.com/i915", "intel/intel-opencl-icd:devel", ["clinfo"])},
    ),
    "intelgpu-job-wsl.yaml": (
        "Job", "intelgpu-demo-job",
        {"intelgpu-demo-job-1": ("gpu.intel.com/dxg", "intel/intel-opencl-icd:devel", ["Number of devices"])},
    ),
    "intel-npu-workload.yaml": (
        "Job", "npu-workload", {"npu-workload": ("npu.intel.com/accel", "intel/intel-npu-demo:devel", [])},
    ),
    "dsa-accel-config-demo-pod.yaml": (
        "Pod", "dsa-accel-config-demo",
        {
            "dsa-accel-config-demo": (
                "dsa.intel.com/wq-user-dedicated", "intel/accel-config-demo:devel",
                ["./dsa_user_test_runner.sh", "--skip-config"],
            )
        },
    ),
    "iaa-accel-config-demo-pod.yaml": (
        "Pod", "iaa-accel-config-demo",
        {
            "iaa-accel-config-demo": (
                "iaa.intel.com/wq-user-dedicated", "intel/accel-config-demo:devel",
                ["./iaa_user_test_runner.sh", "--skip-config"],
            )
        },
    ),
    "dsa-dpdk-dmadevtest.yaml": (
        "Pod", "dpdk",
        {
            "dpdk": (
                "dsa.intel.com/wq-user-dedicated", "intel/dsa-dpdk-dmadevtest:devel", ["dpdk-test", "dmadev_autotest"],
            )
        },
    ),
    "dsa-dpdk-dmadevtest-vfio.yaml": (
        "Pod", "dpdk-vfio",
        {
            "dpdk-vfio": (
                "dsa.intel.com/vfio", "intel/dsa-dpdk-dmadevtest:devel",
                ["dpdk-test", "-a", "$(VFIO_BDF0)", "dmadev_autotest"],
            )
        },
    ),
    "dlb-libdlb-demo-pod.yaml": (
        "Pod", "dlb-libdlb-demo",
        {
            "pf": (
                "dlb.intel.com/pf", "intel/dlb-libdlb-demo:devel",
                ["dir_traffic -n 8 -d $N -w epoll", "ldb_traffic -n 8 -d $N -w epoll"],
            ),
            "vf": ("dlb.intel.com/vf", "intel/dlb-libdlb-demo:devel", ["dir_traffic -n 8 -d $N -w epoll"]),
        },
    ),
    "dlb-libdlb-demo-pf-pod.yaml": (
        "Pod", "dlb-libdlb-demo-pf-pod",
        {
            "dlb-libdlb-demo-pf-pod": (
                "dlb.intel.com/pf", "intel/dlb-libdlb-demo:devel",
                ["dir_traffic -n 8 -d $N -w epoll", "ldb_traffic -n 8 -d $N -w epoll"],
            )
        },
    ),
    "dlb-libdlb-demo-vf-pod.yaml": (
        "Pod", "dlb-libdlb-demo-vf-pod",
        {
            "dlb-libdlb-demo-vf-pod": (
                "dlb.intel.com/vf", "intel/dlb-libdlb-demo:devel", ["dir_traffic -n 8 -d $N -w epoll"],
            )
        },
    ),
    "dlb-dpdk-demo-pod.yaml": (
        "Pod", "dlb-dpdk-demo",
        {
            kind: (
                f"dlb.intel.com/{kind}", "intel/dlb-dpdk-demo:devel",
                ["order_queue perf_queue order_atq perf_atq", "--no-huge --vdev=dlb2_event,hwdev_id=$N"],
            )
            for kind in ("pf", "vf")
        },
    ),
    "openssl-qat-engine-pod.yaml": (
        "Pod", "openssl-qat-engine",
        {"openssl-qat-engine": ("qat.intel.com/generic", "intel/openssl-qat-engine:devel", ["sleep"])},
    ),
    **{
        f"test-fpga-{how}.yaml": (
            "Pod", f"test-fpga-{how}",
            {"test-container": (f"fpga.intel.com/arria10.dcp1.2-nlb3-{how}", "intel/opae-nlb-demo:devel", [])},
        )
        for how in ("orchestrated", "preprogrammed")
    },
    "intelfpga-job.yaml": (
        "Job", "intelfpga-demo-job",
        {
            "intelfpga-demo-job-1": (
                "fpga.intel.com/af-695.d84.aVKNtusxV3qMNmj5-qCB9thCTcSko8QT-J5DNoP5BAs", "intel/opae-nlb-demo:devel",
                ["nlb0"],
            )
        },
    ),
}  # fmt: skip

# Our image: file -> resource and count.
OURS = {
    "qat-compress-pod.yaml": ("qat.intel.com/dc", 2),
    "dsa-copy-pod.yaml": ("dsa.intel.com/wq-user-dedicated", 1),
    "iaa-deflate-pod.yaml": ("iaa.intel.com/wq-user-dedicated", 1),
    "dlb-pipeline-pod.yaml": ("dlb.intel.com/pf", 1),
    "sgx-simulation-pod.yaml": ("sgx.intel.com/enclave", 1),
}


def objects(file: str) -> dict[str, Object]:
    return {each["kind"]: each for each in yaml.safe_load_all((DEMOS / file).read_text())}


def test_every_demo_is_in_a_table() -> None:
    assert {file.name for file in DEMOS.glob("*.yaml")} == {*IMAGES_OF_OTHERS, *OURS}


@pytest.mark.parametrize("file", IMAGES_OF_OTHERS)
def test_a_demo_requests_one_device_and_runs_its_original_program(file: str) -> None:
    kind, name, expected = IMAGES_OF_OTHERS[file]
    (found,) = objects(file).values()
    assert (found["kind"], found["metadata"]["name"]) == (kind, name)
    pod = found["spec"] if kind == "Pod" else found["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert found["spec"].get("backoffLimit") == (4 if name == "npu-workload" else None)
    containers = {each["name"]: each for each in pod["containers"]}
    assert list(containers) == list(expected)
    for container, (resource, image, words) in zip(containers.values(), expected.values(), strict=True):
        assert container["image"] == image
        limits = {key: value for key, value in container["resources"]["limits"].items() if "intel.com/" in key}
        assert {key: int(value) for key, value in limits.items()} == {resource: 1}
        assert container["resources"].get("requests", container["resources"]["limits"]).items() >= limits.items()
        command = container.get("command", [])
        assert words == command or all(word in command[-1] for word in words)


# File -> added capabilities, memory of huge pages, memory and CPU.
NEEDS = {
    "dsa-accel-config-demo-pod.yaml": ({"add": ["SYS_RAWIO"]}, {}),
    "iaa-accel-config-demo-pod.yaml": ({"add": ["SYS_RAWIO"]}, {}),
    "dsa-dpdk-dmadevtest.yaml": ({"add": ["SYS_RAWIO"]}, {"hugepages-2Mi": "64Mi", "memory": "128Mi"}),
    "dsa-dpdk-dmadevtest-vfio.yaml": (
        {"drop": ["ALL"], "add": ["IPC_LOCK"]},
        {"hugepages-2Mi": "64Mi", "memory": "128Mi"},
    ),
    "dlb-libdlb-demo-pod.yaml": (None, {"cpu": 1, "memory": "200Mi"}),
    "dlb-libdlb-demo-pf-pod.yaml": (None, {"cpu": "500m", "memory": "200Mi"}),
    "dlb-libdlb-demo-vf-pod.yaml": (None, {"cpu": "500m", "memory": "200Mi"}),
    "dlb-dpdk-demo-pod.yaml": (None, {"cpu": 1, "memory": "200Mi"}),
}


@pytest.mark.parametrize("file", NEEDS)
def test_a_demo_requests_the_rights_and_memory_of_its_program(file: str) -> None:
    capabilities, memory = NEEDS[file]
    for container in objects(file)["Pod"]["spec"]["containers"]:
        assert container.get("securityContext", {}).get("capabilities") == capabilities
        for amounts in (container["resources"]["limits"], container["resources"].get("requests", {})):
            assert not amounts or amounts.items() >= memory.items()
        if "hugepages-2Mi" in memory:
            assert container["volumeMounts"] == [{"name": "hugepage", "mountPath": "/mnt/hugepage"}]


def test_work_queue_tests_run_in_their_directory() -> None:
    for family in ("dsa", "iaa"):
        pod = objects(f"{family}-accel-config-demo-pod.yaml")["Pod"]
        assert pod["metadata"]["labels"] == {"app": f"{family}-accel-config-demo"}
        assert pod["spec"]["containers"][0]["workingDir"] == "/usr/libexec/accel-config/test/"


def test_the_virtual_machine_of_openssl_gets_its_configuration_from_the_host() -> None:
    pod = objects("openssl-qat-engine-pod.yaml")["Pod"]["spec"]
    assert pod["runtimeClassName"] == "kata-containers"
    assert [volume["hostPath"]["path"] for volume in pod["volumes"]] == ["/dev", "/etc/c6xxvf_dev0.conf"]


# Our own image.


def script_of(file: str) -> str:
    (text,) = objects(file)["ConfigMap"]["data"].values()
    return text


@pytest.mark.parametrize("file", OURS)
def test_a_demo_image_runs_its_script_for_each_requested_device(file: str) -> None:
    resource, count = OURS[file]
    found = objects(file)
    config, pod = found["ConfigMap"], found["Pod"]["spec"]
    (container,) = pod["containers"]
    (script,) = config["data"]
    assert container["image"] == own_image("accelplane")
    assert container["command"] == ["/usr/bin/python3.11", f"/demo/{script}", str(count)]
    assert container["resources"]["limits"][resource] == count
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["volumeMounts"] == [{"name": "demo", "mountPath": "/demo"}]
    assert pod["volumes"] == [{"name": "demo", "configMap": {"name": config["metadata"]["name"]}}]
    assert pod["restartPolicy"] == "Never"


@pytest.mark.parametrize("file", OURS)
def test_scripts_of_demos_follow_the_house_rules(file: str) -> None:
    name = f"demo/{Path(file).stem.replace('-', '_')}.py"
    for command in ("check", "format --diff"):
        words = [sys.executable, "-m", "ruff", *command.split(), "--stdin-filename", name, "-"]
        result = subprocess.run(
            words, cwd=REPOSITORY, input=script_of(file), capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr


def run(file: str, directory: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """Exit status and output of a demo's script in a container whose root is `directory`."""
    script = write(directory / "demo/script.py", script_of(file))
    words = [sys.executable, "-I", script, str(OURS[file][1]), directory]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("QAT", "COVERAGE_"))}
    result = subprocess.run(words, env={**environment, **variables}, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    return result.returncode, result.stdout


# /dev/null and /dev/zero, by name and number: character devices that a test need not make.
NULL, ZERO = ("/dev/null", "1:3"), ("/dev/zero", "1:5")
TWO_ADDRESSES = {"QAT0": "0000:6b:00.1", "QAT1": "0000:6b:00.2"}
GOOD: dict[str, tuple[list[str], dict[str, str]]] = {
    "qat-compress-pod.yaml": (["dev/vfio/vfio", "dev/vfio/341", "dev/vfio/342"], TWO_ADDRESSES),
    "dsa-copy-pod.yaml": (["dev/dsa/wq0.1", "dev/char/1:3"], {}),
    "iaa-deflate-pod.yaml": (["dev/iax/wq1.0", "dev/char/1:3"], {}),
    "dlb-pipeline-pod.yaml": (["dev/dlb12"], {}),
    "sgx-simulation-pod.yaml": (["dev/sgx_enclave"], {}),
}


def container_root(directory: Path, nodes: list[str]) -> Path:
    (directory / "dev").mkdir(parents=True)
    for node in nodes:
        link(directory / node, NULL[0])
    write(directory / "proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu sgx sgx_lc\n")
    return directory


@pytest.mark.parametrize("file", OURS)
def test_a_demo_succeeds_with_its_devices_and_reports_software_fallback(file: str, tmp_path: Path) -> None:
    nodes, variables = GOOD[file]
    status, output = run(file, container_root(tmp_path, nodes), variables)
    assert (status, "fault:" in output) == (0, False), output
    assert "NOT used" in output or "NOTHING was protected" in output
    assert "That takes" in output or "that takes" in output
    assert len(output.splitlines()) <= 8


def test_the_dlb_demo_passes_the_device_number_to_libraries(tmp_path: Path) -> None:
    _, output = run("dlb-pipeline-pod.yaml", container_root(tmp_path, ["dev/dlb12"]), {})
    assert "device number 12\n" in output


FAULTY: list[tuple[str, list[str], dict[str, str], str]] = [
    ("qat-compress-pod.yaml", GOOD["qat-compress-pod.yaml"][0], {}, "0 variables QAT<n>, expected 2"),
    (
        "qat-compress-pod.yaml", GOOD["qat-compress-pod.yaml"][0], TWO_ADDRESSES | {"QAT1": "0000:6b:00.1"},
        "the same function twice",
    ),
    (
        "qat-compress-pod.yaml", GOOD["qat-compress-pod.yaml"][0], TWO_ADDRESSES | {"QAT1": "6b:00.2"},
        "QAT1 is '6b:00.2', expected a PCI address",
    ),
    (
        "qat-compress-pod.yaml", GOOD["qat-compress-pod.yaml"][0], {"QAT0": "0000:6b:00.1", "QAT2": "0000:6b:00.2"},
        "QAT1 is None",
    ),
    ("qat-compress-pod.yaml", [], TWO_ADDRESSES, "/dev/vfio/vfio is missing"),
    ("qat-compress-pod.yaml", ["dev/vfio/vfio"], TWO_ADDRESSES, "0 IOMMU groups"),
    ("dsa-copy-pod.yaml", [], {}, "0 work queues in /dev/dsa, expected 1"),
    ("dsa-copy-pod.yaml", ["dev/dsa/wq0.0", "dev/dsa/wq0.1", "dev/char/1:3"], {}, "2 work queues"),
    ("dsa-copy-pod.yaml", ["dev/dsa/wq0.1"], {}, "/dev/char/1:3 is missing"),
    ("iaa-deflate-pod.yaml", [], {}, "0 work queues in /dev/iax, expected 1"),
    ("iaa-deflate-pod.yaml", ["dev/iax/strange", "dev/char/1:3"], {}, "no character device of a work queue"),
    ("dlb-pipeline-pod.yaml", [], {}, "0 nodes /dev/dlb<n>, expected 1"),
    ("dlb-pipeline-pod.yaml", ["dev/dlb0", "dev/dlb1"], {}, "2 nodes"),
    ("sgx-simulation-pod.yaml", [], {}, "/dev/sgx_enclave is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "nodes", "variables", "fault"), FAULTY)
def test_a_demo_fails_without_its_devices(
    file: str, nodes: list[str], variables: dict[str, str], fault: str, tmp_path: Path
) -> None:
    status, output = run(file, container_root(tmp_path, nodes), variables)
    assert status == 1
    assert fault in output


@pytest.mark.parametrize("file", OURS)
def test_a_demo_fails_with_plain_files_instead_of_devices(file: str, tmp_path: Path) -> None:
    nodes, variables = GOOD[file]
    root = container_root(tmp_path, [])
    for node in nodes:
        write(root / node, "")
    status, output = run(file, root, variables)
    assert status == 1
    assert "no character device" in output


def test_the_number_of_a_queue_must_lead_to_the_same_queue(tmp_path: Path) -> None:
    root = container_root(tmp_path, ["dev/dsa/wq0.1"])
    link(root / "dev/char" / NULL[1], ZERO[0])
    status, output = run("dsa-copy-pod.yaml", root, {})
    assert status == 1
    assert f"/dev/char/{NULL[1]} is another device than wq0.1" in output


@pytest.mark.parametrize("name", ["dsa.conf", "iaa.conf"])
def test_the_example_profiles_are_those_of_the_init_images(name: str) -> None:
    assert (DEMOS / name).read_bytes() == (REPOSITORY / "src/accelplane/provision/profiles" / name).read_bytes()


def test_demos_have_the_paths_of_the_original_and_their_former_paths() -> None:
    paths = {*IMAGES_OF_OTHERS, "dsa.conf", "iaa.conf"}
    for directory in ("demo", "demos"):
        assert paths <= {file.name for file in (REPOSITORY / directory).iterdir()}


# The script that workloads find their render device with.


@pytest.fixture
def find(tmp_path: Path) -> Find:
    """`find("2", "echo", "-x")` with three render devices of Intel, of which the second one is not writable."""
    for number, vendor in ((128, "0x8086"), (129, "0x8086"), (130, "0x10de"), (131, "0x8086")):
        write(tmp_path / f"drm/renderD{number}/device/vendor", f"{vendor}\n")
        if number != 129:
            write(tmp_path / f"dri/renderD{number}", "")
    text = (DEMOS / "render-device.sh").read_text()
    script = tmp_path / "render-device.sh"
    for original, own in (("=/sys/class/drm", f"={tmp_path}/drm"), ("=/dev/dri", f"={tmp_path}/dri")):
        assert original in text
        text = text.replace(original, own)
    script.write_text(text)

    def call(*words: str) -> tuple[int, str]:
        result = subprocess.run(["/bin/sh", script, *words], capture_output=True, text=True, check=False)
        assert result.stderr == ""
        return result.returncode, result.stdout.replace(str(tmp_path), "")

    return call


def test_render_devices_are_listed_with_the_user(find: Find) -> None:
    status, output = find()
    first, *others = output.splitlines()
    assert status == 0
    assert first == "3 Intel GPU render device(s) listed in sysfs, 2 writable one(s) in devfs:"
    assert any(line.endswith("renderD128") for line in others)
    assert others[-1].startswith(f"User: uid={os.getuid()}")


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["1"], "/dri/renderD128\n"),
        (["2"], "/dri/renderD131\n"),
        (["echo", "-x"], "Running: echo -x /dri/renderD128\n-x /dri/renderD128\n"),
        (["2", "echo", "a b", "-x"], "Running: echo a b -x /dri/renderD131\na b -x /dri/renderD131\n"),
    ],
)
def test_a_command_gets_the_path_of_a_writable_render_device(find: Find, words: list[str], output: str) -> None:
    assert find(*words) == (0, output)


def test_the_exit_status_is_that_of_the_command(find: Find) -> None:
    assert find("sh", "-c", "exit 7")[0] == 7


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["0"], "found 0, expected 1 to 127"),
        (["128"], "found 128, expected 1 to 127"),
        (["99999999999999999999"], "expected 1 to 127"),
        (["3"], "found 2, expected at least 3"),
        (["echo"], "found 'echo', expected a command and the option"),
        (["1", "echo"], "found 'echo'"),
        (["-1"], "found '-1'"),
        ([""], "found ''"),
    ],
)
def test_an_invalid_call_prints_the_usage_and_the_reason(find: Find, words: list[str], reason: str) -> None:
    status, output = find(*words)
    assert status == 1
    assert output.startswith("Finds the Intel GPU render devices")
    assert reason in output.splitlines()[-1]
