"""What authors of pods can use against FPGA ports: block volumes, variables, annotations and runtime classes.

The node has three cards, two of them with the same region. A pod, the victim, holds one of these.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitstreams import INTERFACE, NLB0, NLB3

from accelplane.fpga.ids import region_type
from accelplane.simulate.offload import FpgaSpec

from .cluster import Cluster
from .emulated import kernel_of
from .fpgas import ORCHESTRATED, REGION, TEAM, Fpga, bitstream, requesting_pod
from .images import ImageConfig, images_from_directory
from .node import Node
from .objects import SLEEP, Object, pod
from .runtimes import CRIO, Runtime

OTHER = "ce48969398f05f33946d560708be108a"
ATTACKED_CARDS = [
    FpgaSpec(bdf="0000:63:00.0", interface=INTERFACE, afus=[NLB0]),
    FpgaSpec(bdf="0000:67:00.0", interface=INTERFACE, afus=[NLB0]),
    FpgaSpec(bdf="0000:6b:00.0", interface=OTHER, afus=[NLB0]),
]
OTHER_REGION = f"fpga.intel.com/{region_type(OTHER)}"
ATTACKED = [REGION, REGION, OTHER_REGION]
OTHER_PORT = "dfl-port.2"
_PORTS = ("dfl-port.0", "dfl-port.1", OTHER_PORT)

# A pair after that of the webhook, and the first one of a container without a function.
SECOND = {"FPGA_REGION_2": INTERFACE, "FPGA_AFU_2": NLB3}
FIRST = {"FPGA_REGIONS": "1", "FPGA_REGION_1": INTERFACE, "FPGA_AFU_1": NLB3}
# Images with these variables. In all images, /x is a link to /dev.
IMAGE = "localhost/accelplane-test/attack:1"
IMAGES = {"second": "localhost/accelplane-test/attack-second:1", "first": "localhost/accelplane-test/attack-first:1"}
DEMO_IMAGE = "docker.io/intel/opae-nlb-demo:devel"

# Prints the device nodes of the container, and the functions of its ports.
_AFU = "/sys/class/fpga_region/*/$port/afu_id"
SHOW = f"cd /dev; for port in $(find * -name 'dfl-*' -type c); do echo $port $(cat {_AFU}); done"

PERMISSIVE = "permissive"
_BLOCK_MAJOR = "7"
_CONTAINERD = "plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes"
_HANDLERS = {
    CRIO: (
        "crio/crio.conf",
        f"""
[crio.runtime.runtimes.{PERMISSIVE}]
runtime_path = "/etc/crio/runc"
runtime_root = "/run/runc"
monitor_path = "/usr/bin/conmon"
monitor_cgroup = "pod"
monitor_env = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]
allowed_annotations = ["io.kubernetes.cri-o.Devices"]
""",
    ),
    "containerd": (
        "containerd/config.toml",
        f"""
[{_CONTAINERD}.{PERMISSIVE}]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "/etc/containerd/base-spec.json"
  pod_annotations = ["*"]
  [{_CONTAINERD}.{PERMISSIVE}.options]
    BinaryName = "/etc/containerd/runc"
""",
    ),
}

# The kubelet takes a loop device of the computer for each block volume, only to keep it open. This one takes none.
_LOSETUP = """#!/bin/sh
[ "$1" = -f ] || exit 0
mkdir -p "/sys/block/loop$$/loop"
echo "$2" >"/sys/block/loop$$/loop/backing_file"
"""


def with_permissive_handler(runtime: Runtime) -> Runtime:
    """The same runtime with a handler for runtime classes that copies annotations of pods to containers.

    That of CRI-O adds devices by an annotation.
    """
    file, text = _HANDLERS[runtime.name]
    allowed = "".join(f', "/dev/{port}"' for port in _PORTS)

    def extended(content: bytes) -> bytes:
        before = content.decode().replace("[crio.runtime]", f'[crio.runtime]\nallowed_devices = ["/dev/fuse"{allowed}]')
        return f"{before}{text}".encode()

    def files(assets: Any) -> Mapping[str, bytes]:
        original = runtime.files(assets)
        return {**original, file: extended(original[file])}

    return replace(runtime, files=files)


def install_losetup(node: Node) -> None:
    """Hardware of a node: a program with which its kubelet supports block volumes."""
    program = node.path("/usr/local/sbin/losetup")
    program.write_text(_LOSETUP)
    program.chmod(0o755)


class Attack:
    """The node with the victim; `own` is the port that the next pod for the same region gets."""

    def __init__(self, fpga: Fpga) -> None:
        self.fpga = fpga
        self.cluster = fpga.cluster
        _import_images(self.cluster)
        for interface in (INTERFACE, OTHER):
            for afu in (NLB0, NLB3):
                fpga.install(afu, interface)
        runtime_class = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "handler": PERMISSIVE}
        victim = requesting_pod("victim", ORCHESTRATED[NLB0], "sh", "-c", f"{SHOW}; {' '.join(SLEEP)}")
        self.cluster.apply({**runtime_class, "metadata": {"name": PERMISSIVE}}, victim)
        self.cluster.wait_pod("victim", namespace=TEAM)
        self.victim = self.cluster.kubectl("logs", "victim", f"--namespace={TEAM}").split()[0]
        self.own = "dfl-port.1" if self.victim == "dfl-port.0" else "dfl-port.0"
        found = fpga.node.run("sh", "-c", "ls -d /sys/class/fpga_region/*/dfl-port.*").stdout.split()
        self._files = {name: f"{path}/afu_id" for name in _PORTS for path in found if path.endswith(name)}

    def programmed(self) -> dict[str, str]:
        """The functions of the ports that do not have the first one, NLB0."""
        found = {name: kernel_of(self.fpga.node).read(path).strip() for name, path in self._files.items()}
        return {name: afu for name, afu in found.items() if afu != NLB0}

    def reset(self) -> None:
        """Deletes all pods but the victim, and programs the ports with NLB0 again."""
        others = "--field-selector=metadata.name!=victim"
        self.cluster.kubectl("delete", "pods", others, "--force", "--grace-period=0", f"--namespace={TEAM}")
        for name in self.programmed():
            self.program(name, NLB0)

    def program(self, port: str, afu: str) -> None:
        """Programs a port with the tool."""
        path = self.fpga.write("/root/bitstream.gbs", bitstream(afu, OTHER if port == OTHER_PORT else INTERFACE))
        self.fpga.tool("-b", path, "-d", port, "pr")

    @contextmanager
    def without_review(self) -> Iterator[None]:
        """Deletes the configuration of the webhook: all variables are of the authors of pods."""
        path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
        items: list[Any] = (self.cluster.get(path) or {"items": ()})["items"]
        saved = [each for each in items if "fpga" in each["metadata"]["name"]]
        assert saved
        for each in saved:
            self.cluster.kubectl("delete", "mutatingwebhookconfiguration", each["metadata"]["name"])
        try:
            yield
        finally:
            kind = {"apiVersion": "admissionregistration.k8s.io/v1", "kind": "MutatingWebhookConfiguration"}
            for each in saved:
                metadata = {key: each["metadata"].get(key) for key in ("name", "labels", "annotations")}
                self.cluster.apply({**kind, "metadata": metadata, "webhooks": each["webhooks"]})

    def pod(self, name: str, resource: str = "", variables: Mapping[str, str] | None = None, **more: Any) -> Object:
        """A pod that shows its ports, with these variables in `env`."""
        resources = {"resources": {resource: "1"}} if resource else {}
        manifest = pod(name, "sh", "-c", SHOW, namespace=TEAM, **{"image": IMAGE, **resources, **more})
        (container,) = manifest["spec"]["containers"]
        container["env"] = [{"name": key, "value": value} for key, value in (variables or {}).items()]
        return manifest

    def with_env_from(self, manifest: Object, variables: Mapping[str, str]) -> None:
        """Adds variables of a ConfigMap."""
        name = manifest["metadata"]["name"]
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": TEAM}}
        self.cluster.apply({**config, "data": dict(variables)})
        manifest["spec"]["containers"][0]["envFrom"] = [{"configMapRef": {"name": name}}]

    def with_block_volumes(self, manifest: Object, *paths: str) -> None:
        """Adds block volumes at these paths of the container, from disks with names of ports.

        The pod fails if one is missing.
        """
        devices: list[Object] = []
        volumes: list[Object] = manifest["spec"]["volumes"]
        for number, path in enumerate(paths):
            name = f"{manifest['metadata']['name']}-{number}"
            disk = f"/dev/disks/{name}/{self.victim}"
            self.fpga.node.run("mkdir", "-p", str(Path(disk).parent))
            self.fpga.node.run("mknod", disk, "b", _BLOCK_MAJOR, str(200 + number))
            self.cluster.apply(*_claimed_disk(name, disk, self.fpga.node.name))
            devices.append({"name": name, "devicePath": path})
            volumes.append({"name": name, "persistentVolumeClaim": {"claimName": name}})
        (container,) = manifest["spec"]["containers"]
        container["volumeDevices"] = devices
        container["command"][-1] = f"{''.join(f'test -b {path} && ' for path in paths)}{SHOW}"

    def forged_annotations(self, port: str) -> dict[str, str]:
        """All annotations with which a pod could pretend that this port was allocated to it."""
        record = f'{{"com.intel.fpga.ports/x": "{port}", "com.intel.fpga.ports/y": "any"}}'
        return {
            "com.intel.fpga.mode": "fpga.intel.com/region",
            f"com.intel.fpga.ports/{port.replace('port', 'fme')}": port,
            "com.intel.fpga.ports/x": "any",
            "io.kubernetes.cri-o.Annotations": record,
            "io.kubernetes.cri-o.Devices": f"/dev/{port}:/dev/{port}:rwm",
            "cdi.k8s.io/x": f"intel.cdi.k8s.io/fpga={port.replace('port', 'fme')}",
        }

    def expect_rejection(self, name: str, words: str) -> None:
        """Waits for the message of the hook. The container does not run, and no port has changed."""
        self.fpga.wait_for_event(name, words)
        status = (self.cluster.pod(name, TEAM) or {})["status"]
        assert status["phase"] in ("Pending", "Failed"), status
        assert self.programmed() == {}


def _claimed_disk(name: str, disk: str, node: str) -> Iterator[Object]:
    common = {"volumeMode": "Block", "accessModes": ["ReadWriteOnce"], "storageClassName": ""}
    terms = [{"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}]}]
    volume = {
        **common,
        "capacity": {"storage": "1Gi"},
        "local": {"path": disk},
        "nodeAffinity": {"required": {"nodeSelectorTerms": terms}},
    }
    claim = {**common, "resources": {"requests": {"storage": "1Gi"}}, "volumeName": name}
    yield {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume}
    metadata = {"name": name, "namespace": TEAM}
    yield {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim}


def _import_images(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch, "root")
        programs = root / "bin"
        programs.mkdir(parents=True)
        shutil.copy(cluster.assets.program("busybox"), programs / "busybox")
        for tool in ("sh", "find", "cat", "sleep"):
            (programs / tool).symlink_to("busybox")
        (root / "x").symlink_to("dev")
        (programs / "nlb0").write_text(f"#!/bin/sh\n{SHOW}\n")
        (programs / "nlb0").chmod(0o755)
        path = ImageConfig().environment
        configs = {
            IMAGE: ImageConfig(),
            DEMO_IMAGE: ImageConfig(entrypoint=["/bin/nlb0"]),
            **{
                IMAGES[name]: ImageConfig(environment=[*path, *(f"{key}={value}" for key, value in variables.items())])
                for name, variables in (("second", SECOND), ("first", FIRST))
            },
        }
        cluster.import_image(images_from_directory(Path(scratch, "images.tar"), configs, root))
