"""The Pod Security Standards for pods of manifests: https://kubernetes.io/docs/concepts/security/pod-security-standards.

A test compares these rules with those of a real API server. Windows and ephemeral containers are not covered.
"""

from collections.abc import Iterator
from typing import Any

ENFORCE = "pod-security.kubernetes.io/enforce"
LEVELS = ("privileged", "baseline", "restricted")

_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_CAPABILITIES = frozenset(
    ("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP",
     "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT")
)  # fmt: skip
_SELINUX = frozenset(("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"))
_VOLUMES = frozenset(
    ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
)
_SECCOMP = frozenset(("RuntimeDefault", "Localhost"))


def violations(level: str, template: dict[str, Any]) -> list[str]:
    """Returns the rules that a pod template violates."""
    if level == "privileged":
        return []
    found = [*_baseline(template)]
    return found if level == "baseline" else [*found, *_restricted(template["spec"])]


def pod_template(document: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the pod template of a workload, None for other kinds."""
    if document["kind"] == "Pod":
        return document
    template = document.get("spec", {}).get("template")
    return template if template and "containers" in template.get("spec", {}) else None


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _contexts(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [spec.get("securityContext", {}), *(each.get("securityContext", {}) for each in _containers(spec))]


def _baseline(template: dict[str, Any]) -> Iterator[str]:
    spec = template["spec"]
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if spec.get(name))
    yield from (f"hostPath {each['name']}" for each in spec.get("volumes", ()) if "hostPath" in each)
    for name, profile in template.get("metadata", {}).get("annotations", {}).items():
        if (
            name.startswith(_APPARMOR)
            and profile not in ("", "runtime/default")
            and not profile.startswith("localhost/")
        ):
            yield f"AppArmor {profile}"
    for context in _contexts(spec):
        selinux = context.get("seLinuxOptions", {})
        if selinux.get("type", "") not in _SELINUX or selinux.get("user") or selinux.get("role"):
            yield f"SELinux {selinux}"
        if context.get("seccompProfile", {}).get("type") == "Unconfined":
            yield "seccomp Unconfined"
        if context.get("appArmorProfile", {}).get("type") == "Unconfined":
            yield "AppArmor Unconfined"
        if context.get("procMount", "Default") != "Default":
            yield "procMount"
        if context.get("privileged"):
            yield "privileged"
        if added := {*context.get("capabilities", {}).get("add", ())} - _CAPABILITIES:
            yield f"capabilities {sorted(added)}"
    if any(port.get("hostPort") for each in _containers(spec) for port in each.get("ports", ())):
        yield "hostPort"
    if spec.get("securityContext", {}).get("sysctls"):
        yield "sysctls"


def _restricted(spec: dict[str, Any]) -> Iterator[str]:
    for volume in spec.get("volumes", ()):
        yield from (f"volume {kind}" for kind in {*volume} - {"name"} - _VOLUMES)
    pod = spec.get("securityContext", {})
    for container in _containers(spec):
        context = pod | container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation"
        if not context.get("runAsNonRoot"):
            yield "runAsNonRoot"
        if context.get("runAsUser") == 0:
            yield "runAsUser"
        if context.get("seccompProfile", {}).get("type") not in _SECCOMP:
            yield "seccompProfile"
        capabilities = context.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or {*capabilities.get("add", ())} - {"NET_BIND_SERVICE"}:
            yield "capabilities"
