"""The generic plugin against a kubelet: as a command with the flags of the original, and in the agent."""

import json
import socket
import urllib.request
from pathlib import Path

import pytest
from conftest import Run
from generictrees import digest, usb
from kubelets import Kubelet, PodRejected, embedded_only
from trees import write
from waiting import until

pytestmark = pytest.mark.memory

SHOWN_BY_ANY = embedded_only("the plugin is under test, the kubelet only shows what came of it")

# The devices of the original's manifest, shortened.
MANIFEST = (
    "name: serial\ngroups:\n- paths:\n  - path: /dev/ttyUSB*\n- paths:\n  - path: /dev/ttyACM*\n",
    "name: video\ngroups:\n- paths:\n  - path: /dev/video0\n",
    "name: fuse\ngroups:\n- count: 10\n  paths:\n  - path: /dev/fuse\n",
    "name: audio\ngroups:\n- count: 10\n  paths:\n  - path: /dev/snd\n",
    """name: capture
groups:
- paths:
  - path: /dev/snd/controlC0
  - path: /dev/snd/pcmC0D0c
- paths:
  - {path: /dev/snd/controlC1, mountPath: /dev/snd/controlC0}
  - {path: /dev/snd/pcmC1D0c, mountPath: /dev/snd/pcmC0D0c}
""",
)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("ttyUSB0", "ttyACM0", "fuse", "snd/controlC1", "snd/pcmC1D0c"):
        write(root / "dev" / name, "")
    return root


@SHOWN_BY_ANY
async def test_the_manifest_of_the_original_works_unchanged(run: Run, kubelet: Kubelet, node: Path) -> None:
    flags = [word for device in MANIFEST for word in ("--device", device)]
    process = run("generic-device-plugin", *flags, "--listen=")
    expected = {"squat.ai/serial": (2, 2), "squat.ai/fuse": (10, 10), "squat.ai/audio": (10, 10)}
    expected["squat.ai/capture"] = (1, 1)
    await kubelet.until(lambda resources: resources == expected)
    sound = await kubelet.run_pod("sound", {"squat.ai/capture": 1, "squat.ai/fuse": 1})
    nodes = [(each.host_path, each.container_path, each.permissions) for each in sound.devices]
    assert sorted(nodes) == [
        ("/dev/fuse", "/dev/fuse", "mrw"),
        ("/dev/snd/controlC1", "/dev/snd/controlC0", "mrw"),
        ("/dev/snd/pcmC1D0c", "/dev/snd/pcmC0D0c", "mrw"),
    ]
    assert sound.device_ids["squat.ai/capture"] == (digest("0/dev/snd/controlC1/dev/snd/pcmC1D0c"),)
    write(node / "dev/ttyUSB1", "")
    await kubelet.until(lambda resources: resources["squat.ai/serial"] == (3, 3))
    (node / "dev/ttyACM0").unlink()
    await kubelet.until(lambda resources: resources["squat.ai/serial"] == (2, 2))
    assert await process.terminate() == 0


@SHOWN_BY_ANY
async def test_the_pages_of_the_original_answer(run: Run, kubelet: Kubelet, node: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    run("generic-device-plugin", "--device", MANIFEST[2], f"--listen=127.0.0.1:{port}")
    await kubelet.until(lambda resources: resources == {"squat.ai/fuse": (10, 10)})
    await kubelet.run_pod("a", {"squat.ai/fuse": 1})

    def get(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.read().decode()

    assert get("/health") == get("/healthz")
    lines = get("/metrics").splitlines()
    assert 'generic_device_plugin_devices{resource="squat.ai/fuse"} 10.0' in lines
    assert 'generic_device_plugin_allocations_total{resource="squat.ai/fuse"} 1.0' in lines


@SHOWN_BY_ANY
async def test_a_changed_file_changes_the_resources(run: Run, kubelet: Kubelet, node: Path, tmp_path: Path) -> None:
    config = write(tmp_path / "etc/agent.yaml", "")

    def configure(**options: object) -> None:
        config.write_text(json.dumps({"enabled": ["generic"], "plugins": {"generic": options}}))

    fuse = {"name": "fuse", "groups": [{"paths": [{"path": "/dev/fuse"}]}]}
    configure(domain="a.example", devices=[fuse])
    process = run("accelplane", "node", f"--config={config}")
    await kubelet.until(lambda resources: resources == {"a.example/fuse": (1, 1)})
    configure(domain="a.example", devices=[fuse, {**fuse, "name": "other"}])
    await kubelet.until(lambda resources: resources == {"a.example/fuse": (1, 1), "a.example/other": (1, 1)})
    configure(domain="a.example", devices=[{**fuse, "groups": []}, {"name": "b", "groups": [{}]}])
    await process.wait_for_log("plugins.generic.devices[1].groups[0]: found none of them, expected one of paths")
    assert kubelet.resources() == {"a.example/fuse": (1, 1), "a.example/other": (1, 1)}


@SHOWN_BY_ANY
async def test_a_pod_gets_the_reason_why_two_devices_do_not_fit(run: Run, kubelet: Kubelet, node: Path) -> None:
    device = "{name: serial, groups: [{paths: [{path: '/dev/tty*', mountPath: /dev/serial}]}]}"
    run("generic-device-plugin", "--device", device, "--listen=")
    await kubelet.until(lambda resources: resources == {"squat.ai/serial": (2, 2)})
    with pytest.raises(PodRejected, match="/dev/serial: found /dev/ttyACM0, /dev/ttyUSB0 for this path"):
        await kubelet.run_pod("two", {"squat.ai/serial": 2})
    assert (await kubelet.run_pod("one", {"squat.ai/serial": 1})).devices


@SHOWN_BY_ANY
async def test_a_command_decides_the_health(run: Run, kubelet: Kubelet, node: Path, tmp_path: Path) -> None:
    broken = write(tmp_path / "ttyUSB0", "")
    script = f"test ! -e {tmp_path}/$(basename {{path}}) || {{ echo no carrier; exit 1; }}"
    health = {"command": ["/bin/sh", "-c", script], "periodSeconds": 1}
    device = {"name": "serial", "groups": [{"paths": [{"path": "/dev/tty*"}], "health": health}]}
    process = run("generic-device-plugin", "--device", json.dumps(device), "--listen=")
    await kubelet.until(lambda resources: resources == {"squat.ai/serial": (2, 1)})
    await process.wait_for_log("health command /bin/sh ended with status 1: no carrier")
    pod = await kubelet.run_pod("one", {"squat.ai/serial": 1})
    assert pod.devices[0].host_path == "/dev/ttyACM0"
    broken.unlink()
    await kubelet.until(lambda resources: resources == {"squat.ai/serial": (2, 2)})
    write(tmp_path / "ttyUSB0", "")
    await kubelet.until(lambda resources: resources == {"squat.ai/serial": (2, 1)})
    assert await process.terminate() == 0


@SHOWN_BY_ANY
async def test_a_usb_device_is_found_when_it_is_plugged_in(run: Run, kubelet: Kubelet, node: Path) -> None:
    (node / "sys/bus/usb/devices").mkdir(parents=True)
    device = "{name: camera, groups: [{usb: [{vendor: 046d, subsystems: [video4linux]}], env: {CAMERA: '{path}'}}]}"
    process = run("generic-device-plugin", "--device", device, "--listen=")
    await process.wait_for_log("squat.ai/camera")
    assert kubelet.resources() == {}
    usb(node, "1-4", "046d:0825", nodes={"video0": "video4linux"})
    await kubelet.until(lambda resources: resources == {"squat.ai/camera": (1, 1)})
    pod = await kubelet.run_pod("one", {"squat.ai/camera": 1})
    assert (pod.devices[0].host_path, pod.envs) == ("/dev/video0", {"CAMERA": "/dev/video0"})


@SHOWN_BY_ANY
async def test_containers_keep_vanished_devices_and_others_do_not_get_them(
    run: Run, kubelet: Kubelet, node: Path
) -> None:
    run("generic-device-plugin", "--device", MANIFEST[0], "--listen=")
    await kubelet.until(lambda resources: resources == {"squat.ai/serial": (2, 2)})
    await kubelet.run_pod("both", {"squat.ai/serial": 2})
    for name in ("ttyUSB0", "ttyACM0"):
        (node / "dev" / name).unlink()
    await kubelet.until(lambda resources: resources == {"squat.ai/serial": (2, 0)})
    await kubelet.delete_pod("both")
    await until(lambda: kubelet.resources() == {})
