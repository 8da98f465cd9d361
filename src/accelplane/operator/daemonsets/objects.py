"""The fields of a DaemonSet that the operator writes, as types with the encoding of the API."""

from collections.abc import Mapping

import msgspec

from accelplane.kube.jsontypes import JsonObject
from accelplane.operator.models import Resources, SecretReference, Toleration, UpdateStrategy, Wire


class FieldReference(Wire, frozen=True):
    field_path: str


class VariableSource(Wire, frozen=True):
    field_ref: FieldReference


class Variable(Wire, frozen=True):
    name: str
    value: str = ""
    value_from: VariableSource | None = None


class SELinuxOptions(Wire, frozen=True):
    type: str


class SeccompProfile(Wire, frozen=True):
    type: str


class Capabilities(Wire, frozen=True):
    drop: tuple[str, ...]


class SecurityContext(Wire, frozen=True):
    read_only_root_filesystem: bool | None = None
    allow_privilege_escalation: bool | None = None
    privileged: bool | None = None
    capabilities: Capabilities | None = None
    se_linux_options: SELinuxOptions | None = None
    seccomp_profile: SeccompProfile | None = None


class Mount(Wire, frozen=True):
    name: str
    mount_path: str
    read_only: bool = False


class Container(Wire, frozen=True):
    name: str
    image: str
    image_pull_policy: str
    security_context: SecurityContext
    args: tuple[str, ...] = ()
    env: tuple[Variable, ...] = ()
    resources: Resources | None = None
    volume_mounts: tuple[Mount, ...] = ()
    termination_message_path: str = ""


class HostPath(Wire, frozen=True):
    path: str
    type: str = ""


class ConfigMapVolume(Wire, frozen=True):
    name: str
    default_mode: int | None = None


class EmptyDir(Wire, frozen=True):
    pass


class Volume(Wire, frozen=True):
    name: str
    host_path: HostPath | None = None
    config_map: ConfigMapVolume | None = None
    empty_dir: EmptyDir | None = None


class PodSpec(Wire, frozen=True):
    containers: tuple[Container, ...]
    volumes: tuple[Volume, ...]
    node_selector: Mapping[str, str]
    init_containers: tuple[Container, ...] = ()
    tolerations: tuple[Toleration, ...] = ()
    image_pull_secrets: tuple[SecretReference, ...] = ()
    priority_class_name: str = ""
    service_account_name: str = ""
    automount_service_account_token: bool | None = None


class OwnerReference(Wire, frozen=True):
    api_version: str
    kind: str
    name: str
    uid: str
    controller: bool
    block_owner_deletion: bool


class ObjectMetadata(Wire, frozen=True):
    name: str = ""
    namespace: str = ""
    labels: Mapping[str, str] = {}
    annotations: Mapping[str, str] = {}
    owner_references: tuple[OwnerReference, ...] = ()


class PodTemplate(Wire, frozen=True):
    metadata: ObjectMetadata
    spec: PodSpec


class Selector(Wire, frozen=True):
    match_labels: Mapping[str, str]


class DaemonSetSpec(Wire, frozen=True):
    selector: Selector
    template: PodTemplate
    update_strategy: UpdateStrategy


class DaemonSet(Wire, frozen=True):
    metadata: ObjectMetadata
    spec: DaemonSetSpec

    def as_object(self) -> JsonObject:
        """The object as JSON for the API server."""
        written: JsonObject = msgspec.json.decode(msgspec.json.encode(self))
        return {"apiVersion": "apps/v1", "kind": "DaemonSet", **written}
