"""The DaemonSet of each kind without the fields of a custom resource: equal to the manifest in `deploy/`.

A test compares the two. The paths are equal on the node and in the container.
"""

from collections.abc import Mapping
from typing import NamedTuple

from accelplane.operator.daemonsets.objects import (
    Capabilities,
    Container,
    DaemonSet,
    DaemonSetSpec,
    FieldReference,
    HostPath,
    Mount,
    ObjectMetadata,
    PodSpec,
    PodTemplate,
    SeccompProfile,
    SecurityContext,
    Selector,
    SELinuxOptions,
    Variable,
    VariableSource,
    Volume,
)
from accelplane.operator.models import Resources, RollingUpdate, UpdateStrategy, default_selector

PULL_POLICY = "IfNotPresent"


class Path(NamedTuple):
    """A path of the node that is mounted into a container."""

    name: str
    path: str
    read_only: bool = False
    type: str = ""

    @property
    def mount(self) -> Mount:
        return Mount(name=self.name, mount_path=self.path, read_only=self.read_only)

    @property
    def volume(self) -> Volume:
        return Volume(name=self.name, host_path=HostPath(path=self.path, type=self.type))


SOCKETS = Path("kubeletsockets", "/var/lib/kubelet/device-plugins")
CDI = Path("cdipath", "/var/run/cdi", type="DirectoryOrCreate")


class Skeleton(NamedTuple):
    """The parts that depend on the kind: requests `cpu` and `memory`, limits `most_cpu` and `most_memory`."""

    paths: tuple[Path, ...]
    cpu: str
    memory: str
    most_cpu: str
    most_memory: str
    variables: Mapping[str, str] = {"NODE_NAME": "spec.nodeName"}
    selinux: bool = True
    # Whether the pods have no token of the account, as in the manifests.
    tokenless: bool = False
    # For kinds that mount /dev, which hides the usual directory.
    termination_message: str = ""


SKELETONS: Mapping[str, Skeleton] = {
    "dlb": Skeleton(
        (Path("devfs", "/dev", read_only=True), Path("sysfs", "/sys/class/dlb2", read_only=True), SOCKETS),
        cpu="40m", memory="15Mi", most_cpu="100m", most_memory="30Mi",
        selinux=False, tokenless=True, termination_message="/tmp/termination-log",  # noqa: S108 - in the container
    ),
    "dsa": Skeleton(
        (
            Path("devfs", "/dev/dsa", read_only=True),
            Path("chardevs", "/dev/char", read_only=True),
            Path("sysfs", "/sys/bus/dsa", read_only=True),
            SOCKETS,
        ),
        cpu="50m", memory="25Mi", most_cpu="100m", most_memory="50Mi", tokenless=True,
    ),
    "fpga": Skeleton(
        (
            Path("devfs", "/dev", read_only=True),
            Path("sysfs", "/sys/class", read_only=True),
            SOCKETS,
            Path("fpga-records", "/run/accelplane-fpga", read_only=True, type="DirectoryOrCreate"),
            Path("cdidir", "/var/run/cdi", type="DirectoryOrCreate"),
        ),
        cpu="80m", memory="30Mi", most_cpu="160m", most_memory="60Mi",
        termination_message="/tmp/termination-log",  # noqa: S108 - in the container
    ),
    "generic": Skeleton(
        (Path("devfs", "/dev", read_only=True), Path("sysfs", "/sys", read_only=True), SOCKETS, CDI),
        cpu="40m", memory="30Mi", most_cpu="100m", most_memory="60Mi", tokenless=True,
        termination_message="/tmp/termination-log",  # noqa: S108 - in the container
    ),
    "gpu": Skeleton(
        (
            Path("devfs", "/dev/dri", read_only=True),
            Path("sysfsdrm", "/sys/class/drm", read_only=True),
            SOCKETS,
            CDI,
        ),
        cpu="40m", memory="45Mi", most_cpu="100m", most_memory="90Mi",
        variables={"NODE_NAME": "spec.nodeName", "HOST_IP": "status.hostIP"},
    ),
    "iaa": Skeleton(
        (
            Path("devfs", "/dev/iax", read_only=True),
            Path("chardevs", "/dev/char", read_only=True),
            Path("sysfs", "/sys/bus/dsa/devices", read_only=True),
            SOCKETS,
        ),
        cpu="60m", memory="25Mi", most_cpu="120m", most_memory="50Mi", tokenless=True,
    ),
    "npu": Skeleton(
        (Path("devfs", "/dev/accel", read_only=True), Path("sysfsaccel", "/sys/class/accel", read_only=True), SOCKETS),
        cpu="40m", memory="45Mi", most_cpu="100m", most_memory="90Mi",
    ),
    "qat": Skeleton(
        (
            Path("devdir", "/dev/vfio", read_only=True),
            Path("debugfsdir", "/sys/kernel/debug", read_only=True),
            Path("pcidir", "/sys/bus/pci"),
            SOCKETS,
        ),
        cpu="70m", memory="15Mi", most_cpu="140m", most_memory="30Mi", tokenless=True,
    ),
    "sgx": Skeleton(
        (
            SOCKETS,
            Path("sgx-enclave", "/dev/sgx_enclave", read_only=True, type="CharDevice"),
            Path("sgx-provision", "/dev/sgx_provision", read_only=True, type="CharDevice"),
            CDI,
        ),
        cpu="40m", memory="15Mi", most_cpu="100m", most_memory="30Mi", variables={}, tokenless=True,
    ),
}  # fmt: skip


def from_fields(fields: Mapping[str, str]) -> tuple[Variable, ...]:
    """Environment variables with fields of the pod."""
    return tuple(
        Variable(name=name, value_from=VariableSource(field_ref=FieldReference(field_path=path)))
        for name, path in fields.items()
    )


def amounts(*, cpu: str, memory: str, most_cpu: str, most_memory: str) -> Resources:
    """A container's requests and limits."""
    return Resources(requests={"cpu": cpu, "memory": memory}, limits={"cpu": most_cpu, "memory": most_memory})


def skeleton(family: str, image: str) -> DaemonSet:
    """The DaemonSet of a kind with an image."""
    own = SKELETONS[family]
    name = f"intel-{family}-plugin"
    labels = {"app": name}
    container = Container(
        name=name,
        image=image,
        image_pull_policy=PULL_POLICY,
        env=from_fields(own.variables),
        security_context=SecurityContext(
            allow_privilege_escalation=False,
            read_only_root_filesystem=True,
            capabilities=Capabilities(drop=("ALL",)),
            se_linux_options=SELinuxOptions(type="container_device_plugin_t") if own.selinux else None,
            seccomp_profile=SeccompProfile(type="RuntimeDefault"),
        ),
        resources=amounts(cpu=own.cpu, memory=own.memory, most_cpu=own.most_cpu, most_memory=own.most_memory),
        volume_mounts=tuple(path.mount for path in own.paths),
        termination_message_path=own.termination_message,
    )
    pod = PodSpec(
        containers=(container,),
        volumes=tuple(path.volume for path in own.paths),
        node_selector=default_selector(family),
        automount_service_account_token=False if own.tokenless else None,
    )
    return DaemonSet(
        metadata=ObjectMetadata(name=name, labels=labels),
        spec=DaemonSetSpec(
            selector=Selector(match_labels=labels),
            template=PodTemplate(metadata=ObjectMetadata(labels=labels), spec=pod),
            update_strategy=UpdateStrategy(
                type="RollingUpdate", rolling_update=RollingUpdate(max_surge=0, max_unavailable=1)
            ),
        ),
    )
