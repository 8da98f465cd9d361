"""Renders a DaemonSet from the skeleton of its kind and the fields of a custom resource."""

import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from accelplane.operator import images
from accelplane.operator.daemonsets import dra
from accelplane.operator.daemonsets.arguments import arguments
from accelplane.operator.daemonsets.inits import Init, init
from accelplane.operator.daemonsets.objects import (
    Capabilities,
    Container,
    DaemonSet,
    EmptyDir,
    HostPath,
    Mount,
    ObjectMetadata,
    OwnerReference,
    PodSpec,
    SecurityContext,
    Volume,
)
from accelplane.operator.daemonsets.skeletons import PULL_POLICY, Path, amounts, skeleton
from accelplane.operator.models import (
    GROUP,
    VERSION,
    DevicePlugin,
    DsaSpec,
    FpgaSpec,
    GenericSpec,
    GpuSpec,
    PluginSpec,
    QatSpec,
    SecretReference,
    effective_selector,
)
from accelplane.operator.settings import ImagePolicy, Settings
from accelplane.plugins.generic.config import binds

# An annotation of the pods: a change replaces them.
PROVISIONING_ANNOTATION = f"{GROUP}/provisioning-config-hash"
GPU_MANAGER = "gpu-manager-sa"
# Annotations of a QAT resource that configure its containers. Others, as those of Argo CD or Helm, would replace all
# pods at each change.
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_POD_ANNOTATION = re.compile(r"(container\.)?(apparmor|seccomp)\.security\.(alpha|beta)\.kubernetes\.io/")

_RESOURCE_MANAGER_PATHS = (
    Path("podresources", "/var/lib/kubelet/pod-resources", type="DirectoryOrCreate"),
    Path("kubeletcrt", "/var/lib/kubelet/pki/kubelet.crt", read_only=True, type="FileOrCreate"),
    Path("nfd-features", "/etc/kubernetes/node-feature-discovery/features.d/", type="DirectoryOrCreate"),
    Path("sysfsdevices", "/sys/devices", read_only=True, type="Directory"),
)
_LEVEL_ZERO = Mount(name="levelzerosocket", mount_path="/var/lib/levelzero")


class _Parts(NamedTuple):
    """Additions to the pod of the skeleton."""

    mounts: tuple[Mount, ...] = ()
    volumes: tuple[Volume, ...] = ()
    sidecars: tuple[Container, ...] = ()


def daemonset_name(plugin: DevicePlugin) -> str:
    """The name of a new DaemonSet. An existing one keeps its name."""
    return f"intel-{plugin.family}-plugin-{plugin.name}"


def provisioning_hash(data: Mapping[str, str], binary_data: Mapping[str, str] | None = None) -> str:
    """A short hash of a ConfigMap's content."""
    text = msgspec.json.encode((data, binary_data or {}), order="deterministic")
    return hashlib.sha256(text).hexdigest()[:16]


def render(plugin: DevicePlugin, settings: Settings, *, provisioning: str = "") -> DaemonSet:
    """The DaemonSet. `provisioning` is the hash of the ConfigMap that the resource names, empty for none."""
    made = skeleton(plugin.family, plugin.spec.image or settings.images.reference(f"intel-{plugin.family}-plugin"))
    annotations = _copied_annotations(plugin)
    for_pods = {key: value for key, value in annotations.items() if _POD_ANNOTATION.match(key)}
    on_pods = for_pods | dict(plugin.spec.pod_annotations)
    if dra.uses_dra(plugin) and plugin.spec.dra and plugin.spec.dra.manage_binding:
        # The default AppArmor profile denies writes to sysfs.
        on_pods.setdefault(f"{_APPARMOR}{made.metadata.name}", "unconfined")
    if provisioning:
        on_pods[PROVISIONING_ANNOTATION] = provisioning
    template = replace(
        made.spec.template,
        metadata=replace(made.spec.template.metadata, annotations=on_pods),
        spec=_pod(made.spec.template.spec, plugin, settings),
    )
    exclusive = plugin.spec.dra is not None and plugin.spec.dra.is_used and plugin.spec.dra.is_exclusive
    strategy = plugin.spec.update_strategy or (dra.UPDATE_STRATEGY if exclusive else made.spec.update_strategy)
    return DaemonSet(
        metadata=ObjectMetadata(
            name=daemonset_name(plugin),
            namespace=settings.namespace,
            labels=made.metadata.labels,
            annotations=annotations,
            owner_references=_owner(plugin),
        ),
        spec=replace(made.spec, template=template, update_strategy=strategy),
    )


def _pod(made: PodSpec, plugin: DevicePlugin, settings: Settings) -> PodSpec:
    spec = plugin.spec
    preparation = init(spec, settings.images)
    parts = _parts(spec, settings.images)
    (container,) = made.containers
    container, volumes = _with_driver(container, made.volumes, spec)
    container = replace(
        container,
        args=arguments(spec, settings),
        volume_mounts=(*container.volume_mounts, *parts.mounts),
        resources=spec.resources or container.resources,
    )
    volumes = (*volumes, *parts.volumes)
    claims = dra.uses_dra(plugin)
    if claims:
        container, volumes = _with_dra(container, volumes, plugin)
    manages = isinstance(spec, GpuSpec) and spec.resource_manager
    return replace(
        made,
        containers=_with_images((container, *parts.sidecars), spec, settings.images),
        init_containers=_with_images((preparation.container,), spec, settings.images) if preparation else (),
        volumes=_with_init(volumes, preparation) if preparation else volumes,
        node_selector=effective_selector(plugin),
        tolerations=spec.tolerations,
        image_pull_secrets=_pull_secrets(spec, settings),
        priority_class_name=spec.priority_class_name,
        service_account_name=_account(plugin, settings),
        # The resource manager reads the pods from the kubelet with it, and DRA uses the API server. No other plugin
        # calls an API.
        automount_service_account_token=True if claims else None if manages else False,
    )


def _account(plugin: DevicePlugin, settings: Settings) -> str:
    if dra.uses_dra(plugin):
        return dra.account(plugin)
    manages = isinstance(plugin.spec, GpuSpec) and plugin.spec.resource_manager
    return GPU_MANAGER if manages else settings.service_account


def _with_dra(
    container: Container, volumes: tuple[Volume, ...], plugin: DevicePlugin
) -> tuple[Container, tuple[Volume, ...]]:
    """With what a pod needs to prepare claims."""
    paths = dra.paths(plugin.spec, plugin.family, {each.mount_path for each in container.volume_mounts})
    container = replace(
        container,
        env=(*container.env, *dra.variables(container.env)),
        volume_mounts=(*container.volume_mounts, *(path.mount for path in paths)),
    )
    if isinstance(plugin.spec, FpgaSpec):
        # Programming opens the management devices, which other containers cannot open.
        container = replace(
            container,
            security_context=replace(container.security_context, privileged=True, allow_privilege_escalation=None),
        )
    return container, (*volumes, *(path.volume for path in paths))


def _with_init(volumes: tuple[Volume, ...], preparation: Init) -> tuple[Volume, ...]:
    """All volumes, in the order of the Go operator.

    The volume of FPGA is before the last one, as in the manifests. The order has no meaning.
    """
    if any(volume.name == "cdidir" for volume in volumes):
        return (*volumes[:-1], *preparation.volumes, volumes[-1])
    return (*volumes, *preparation.volumes)


def _with_driver(
    container: Container, volumes: tuple[Volume, ...], spec: PluginSpec
) -> tuple[Container, tuple[Volume, ...]]:
    """Mounts /dev/vfio instead of the work queues if complete DSA devices are published, and /sys writable to bind."""
    if isinstance(spec, GenericSpec) and binds(spec.devices):
        return replace(
            container,
            volume_mounts=tuple(
                replace(each, read_only=False) if each.name == "sysfs" else each for each in container.volume_mounts
            ),
        ), volumes
    if not (isinstance(spec, DsaSpec) and spec.driver == "vfio-pci"):
        return container, volumes
    path = "/dev/vfio"
    mounts = tuple(replace(each, mount_path=path) if each.name == "devfs" else each for each in container.volume_mounts)
    paths = tuple(replace(each, host_path=HostPath(path=path)) if each.name == "devfs" else each for each in volumes)
    return replace(container, volume_mounts=mounts), paths


def _parts(spec: PluginSpec, policy: ImagePolicy) -> _Parts:
    if not isinstance(spec, GpuSpec):
        return _Parts()
    paths: tuple[Path, ...] = _RESOURCE_MANAGER_PATHS if spec.resource_manager else ()
    if spec.xpumd_endpoint:
        directory = spec.xpumd_endpoint.rpartition("/")[0]
        paths = (*paths, Path("xpumdsocket", directory, read_only=True, type="DirectoryOrCreate"))
    mounts, volumes = tuple(path.mount for path in paths), tuple(path.volume for path in paths)
    if not (spec.health_management or spec.level_zero_image):
        return _Parts(mounts, volumes)
    sidecar = Container(
        name="intel-gpu-levelzero",
        image=spec.level_zero_image or policy.reference("intel-gpu-levelzero"),
        image_pull_policy=PULL_POLICY,
        args=("-v=2",),
        security_context=SecurityContext(
            privileged=True, read_only_root_filesystem=True, capabilities=Capabilities(drop=("ALL",))
        ),
        resources=amounts(cpu="25m", memory="50Mi", most_cpu="50m", most_memory="100Mi"),
        volume_mounts=(_LEVEL_ZERO,),
    )
    socket = Volume(name=_LEVEL_ZERO.name, empty_dir=EmptyDir())
    return _Parts((*mounts, _LEVEL_ZERO), (*volumes, socket), (sidecar,))


def _with_images(containers: tuple[Container, ...], spec: PluginSpec, policy: ImagePolicy) -> tuple[Container, ...]:
    """The containers with the digests of their images, as far as they are known, and with the pull policy."""
    pull_policy = spec.image_pull_policy or PULL_POLICY
    return tuple(
        replace(each, image=images.pin_digest(each.image, policy), image_pull_policy=pull_policy) for each in containers
    )


def _pull_secrets(spec: PluginSpec, settings: Settings) -> tuple[SecretReference, ...]:
    names = [settings.pull_secret] if settings.pull_secret else []
    names += [secret.name for secret in spec.image_pull_secrets]
    return tuple(SecretReference(name=name) for name in dict.fromkeys(names))


def _copied_annotations(plugin: DevicePlugin) -> dict[str, str]:
    """Annotations of a QAT resource for the DaemonSet, without those that kubectl changes at each apply."""
    if not isinstance(plugin.spec, QatSpec):
        return {}
    copied = plugin.metadata.annotations.items()
    return {key: value for key, value in copied if not key.startswith("kubectl.kubernetes.io/")}


def _owner(plugin: DevicePlugin) -> tuple[OwnerReference, ...]:
    if not plugin.metadata.uid:
        return ()
    return (
        OwnerReference(
            api_version=f"{GROUP}/{VERSION}",
            kind=plugin.kind,
            name=plugin.name,
            uid=plugin.metadata.uid,
            controller=True,
            block_owner_deletion=True,
        ),
    )
