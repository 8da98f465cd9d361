"""Kustomize trees as objects, rendered by kubectl, and the common parts of the expected objects."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import memorydirectory
import pytest
import yaml
from cluster.build import assets

import accelplane
from accelplane.cli.goflags import Flag, Value, parse, with_defaults
from accelplane.operator.settings import PLACEHOLDER

REPOSITORY = Path(__file__).parents[1]
DEPLOY = REPOSITORY / "deploy"
Object = dict[str, Any]

# Volume -> (path, mode, type). A mount is at the same path in the container.
Volumes = dict[str, tuple[str, str, str]]

# The Secret of the authority for certificates of cert-manager.
CA = "webhook-ca-cert"

APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
UNCONFINED = {"type": "Unconfined"}

SOCKETS: Volumes = {"kubeletsockets": ("/var/lib/kubelet/device-plugins", "rw", "")}


@cache
def kubectl() -> str:
    found = assets().find("kubectl")
    if not found:
        pytest.skip("no kubectl to render kustomizations with: make kube, or put one in PATH")
    return str(found)


def run_kubectl(*words: str | Path, text: str = "") -> str:
    # With less garbage collection, a rendering takes a fifth less processor time.
    environment = {"GOGC": "400", **os.environ}
    result = subprocess.run(
        [kubectl(), *words], input=text, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def trees() -> list[str]:
    """The paths of all trees below `deploy`, except components, and those of NFD and XPU Manager, which include
    another repository."""
    files = (file for file in DEPLOY.rglob("kustomization.yaml") if file.parent.parts[-2:] != ("nfd", "base"))
    found = (file.parent for file in files if yaml.load(file.read_text(), yaml.CSafeLoader)["kind"] == "Kustomization")
    paths = {str(directory.relative_to(DEPLOY)) for directory in found} - {"nfd"}
    return sorted(path for path in paths if not path.startswith("xpumanager_sidecar"))


def overlay(directory: Path, **fields: object) -> list[Object]:
    """Renders a kustomization with these fields, written to `directory`. The path of the trees is `deploy`."""
    write_overlay(directory, **fields)
    return list(yaml.load_all(run_kubectl("kustomize", directory), yaml.CSafeLoader))


def write_overlay(directory: Path, **fields: object) -> None:
    """Writes a kustomization with these fields, for which the path of the trees is `deploy`."""
    (directory / "deploy").symlink_to(DEPLOY)
    (directory / "kustomization.yaml").write_text(json.dumps(fields))


def render(directory: Path) -> list[Object]:
    """Renders a kustomization. Trees of `deploy` are rendered once for all test processes, until one changes."""
    return json.loads(_rendered(directory))


@cache
def _rendered(directory: Path) -> str:
    if not directory.is_relative_to(DEPLOY):
        return _render(directory)
    file = _store() / str(directory.relative_to(DEPLOY)).replace("/", "_")
    if not file.exists():
        part = file.with_name(f".{file.name}.{os.getpid()}")
        part.write_text(_render(directory))
        part.rename(file)
    return file.read_text()


def _render(directory: Path) -> str:
    return json.dumps(list(yaml.load_all(run_kubectl("kustomize", directory), yaml.CSafeLoader)))


@cache
def _store() -> Path:
    store = REPOSITORY / "build" / (memorydirectory.build_once("manifests", _write_digest) / "digest").read_text()
    for other in store.parent.glob("rendered-*"):
        if other != store:
            shutil.rmtree(other, ignore_errors=True)
    store.mkdir(parents=True, exist_ok=True)
    return store


def _write_digest(directory: Path) -> None:
    """Writes the name of the store, which changes with all files that renderings depend on."""
    digest = hashlib.sha256(kubectl().encode())
    for file in sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        digest.update(f"{file.relative_to(DEPLOY)}\0".encode() + file.read_bytes() + b"\0")
    (directory / "digest").write_text(f"rendered-{digest.hexdigest()[:12]}")


def in_order(value: Any) -> Any:
    """Sorts lists of named items by their names, because their order has no meaning."""
    if isinstance(value, dict):
        return {key: in_order(each) for key, each in value.items()}
    if isinstance(value, list):
        ordered = [in_order(each) for each in value]
        named = all(isinstance(each, dict) and "name" in each for each in ordered)
        return sorted(ordered, key=lambda each: each["name"]) if named else ordered
    return value


def mounts(volumes: Volumes) -> list[Object]:
    return [
        {"name": name, "mountPath": path} | ({"readOnly": True} if mode == "ro" else {})
        for name, (path, mode, _) in volumes.items()
    ]


def host_paths(volumes: Volumes) -> list[Object]:
    return [
        {"name": name, "hostPath": {"path": path} | ({"type": kind} if kind else {})}
        for name, (path, _, kind) in volumes.items()
    ]


def from_fields(**paths: str) -> list[Object]:
    """Variables that hold a field of the pod."""
    return [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in paths.items()]


def resources(requests: tuple[str, str], limits: tuple[str, str]) -> Object:
    """Memory and CPU."""
    return {"requests": dict(zip(("memory", "cpu"), requests, strict=True)),
            "limits": dict(zip(("memory", "cpu"), limits, strict=True))}  # fmt: skip


def own_image(name: str) -> str:
    """The reference of an image that this repository builds, as manifests name it."""
    return f"{PLACEHOLDER}/{name}:{accelplane.__version__}"


def plugin_container(name: str, volumes: Volumes, amounts: Object, *, selinux: bool = True) -> Object:
    security: Object = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if selinux:
        security["seLinuxOptions"] = {"type": "container_device_plugin_t"}
    return {
        "name": name,
        "image": own_image(name),
        "imagePullPolicy": "IfNotPresent",
        "securityContext": security,
        "resources": amounts,
        "volumeMounts": mounts(volumes),
    }


def plugin_daemonset(name: str, pod: Object, *, label: str = "") -> Object:
    selector = {"kubernetes.io/arch": "amd64"}
    if label:
        selector[f"intel.feature.node.kubernetes.io/{label}"] = "true"
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "selector": {"matchLabels": {"app": name}},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": {"app": name}}, "spec": {"nodeSelector": selector, **pod}},
        },
    }


# Admission webhooks: objects that the trees of operator, SGX and FPGA share.

RBAC = "rbac.authorization.k8s.io"


def one(api: str, kind: str, name: str, namespace: str = "", **fields: object) -> Object:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": api, "kind": kind, "metadata": metadata, **fields}


def role(kind: str, names: tuple[str, str], rules: list[Object], account: tuple[str, str]) -> list[Object]:
    """A role and the binding to an account, which is a namespace and a name."""
    namespace = account[0] if kind == "Role" else ""
    reference = {"apiGroup": RBAC, "kind": kind, "name": names[0]}
    subject = {"kind": "ServiceAccount", "namespace": account[0], "name": account[1]}
    return [
        one(f"{RBAC}/v1", kind, names[0], namespace, rules=rules),
        one(f"{RBAC}/v1", f"{kind}Binding", names[1], namespace, roleRef=reference, subjects=[subject]),
    ]


def object_names(prefix: str, *, own_certificate: bool) -> list[Object]:
    """Variables of a webhook with the names of its objects."""
    names = {"CERTIFICATE_SECRET": "own-certificate"} if own_certificate else {}
    names |= {
        "WEBHOOK_SERVICE": "webhook-service",
        "MUTATING_WEBHOOK_CONFIGURATION": "mutating-webhook-configuration",
    }
    return [{"name": variable, "value": f"{prefix}{name}"} for variable, name in names.items()]


def flag_values(flags: Sequence[Flag], container: Object) -> dict[str, Value]:
    """The values of all flags of the program in a container, from its arguments and variables."""
    values, others = parse(flags, container["args"])
    assert others == []
    environment = {each["name"]: each["value"] for each in container.get("env", ()) if "value" in each}
    return with_defaults(flags, values, environment)


def own_certificate(namespace: str, prefix: str) -> list[Object]:
    """The Secret for the certificate of a webhook, and the rights to write it and to inject it."""
    name, account = f"{prefix}own-certificate", (namespace, f"{prefix}webhook")
    verbs = ["get", "list", "patch", "watch"]
    secret = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": verbs}
    configuration = {
        "apiGroups": ["admissionregistration.k8s.io"],
        "resources": ["mutatingwebhookconfigurations"],
        "resourceNames": [f"{prefix}mutating-webhook-configuration"],
        "verbs": verbs,
    }
    return [
        one("v1", "Secret", name, namespace, type="Opaque"),
        *role("Role", (name, name), [secret], account),
        *role("ClusterRole", (name, name), [configuration], account),
    ]


def certificate_request(namespace: str, prefix: str) -> list[Object]:
    """The objects for cert-manager: an authority with a key that stays, and the certificate."""
    host = f"{prefix}webhook-service.{namespace}.svc"
    issuers = {f"{prefix}selfsigned-issuer": {"selfSigned": {}}, f"{prefix}ca-issuer": {"ca": {"secretName": CA}}}
    root, authority = issuers
    certificates: Object = {
        f"{prefix}ca-cert": {
            "commonName": "webhook-ca",
            "duration": "87600h",
            "isCA": True,
            "issuerRef": {"kind": "Issuer", "name": root},
            "privateKey": {"algorithm": "ECDSA", "rotationPolicy": "Never", "size": 256},
            "secretName": CA,
        },
        f"{prefix}serving-cert": {
            "dnsNames": [host, f"{host}.cluster.local"],
            "issuerRef": {"kind": "Issuer", "name": authority},
            "privateKey": {"rotationPolicy": "Always"},
            "secretName": "webhook-server-cert",
        },
    }
    return [
        *(one("cert-manager.io/v1", "Issuer", name, namespace, spec=spec) for name, spec in issuers.items()),
        *(one("cert-manager.io/v1", "Certificate", name, namespace, spec=spec) for name, spec in certificates.items()),
    ]
