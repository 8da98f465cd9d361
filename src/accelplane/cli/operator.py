"""`accelplane operator` and, with the name of the Go program, `intel_deviceplugin_operator`: its flags and more.

accelplane operator …            runs the operator
accelplane operator render FILE  prints the DaemonSets that it creates for custom resources, without a cluster
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accelplane.cli import fpgawebhook, logflags, sgxwebhook
from accelplane.cli.clusterprogram import Values, address_of, check_name, port_of, run_in_cluster, shutdown_delay_of
from accelplane.cli.goflags import Flag, Value
from accelplane.operator.models import KINDS
from accelplane.operator.settings import OLDEST, PLACEHOLDER, RELEASE, ImagePolicy, Settings, Upgrade, overrides

if TYPE_CHECKING:
    from accelplane.operator.program import Extension, Options

PROGRAM = "intel_deviceplugin_operator"

_PREFIX = re.compile(r"([a-z0-9][a-z0-9.-]{0,200})?")
_VENDOR = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?")
_UPGRADES: Mapping[str, Upgrade] = {"spec": "spec", "daemonset": "daemonset", "off": "off"}

# Objects of the installation: environment variable -> name behind -name-prefix, which is the default.
_OBJECTS = {
    "WEBHOOK_SERVICE": "webhook-service",
    "MUTATING_WEBHOOK_CONFIGURATION": "mutating-webhook-configuration",
    "VALIDATING_WEBHOOK_CONFIGURATION": "validating-webhook-configuration",
    "GPU_MANAGER_ROLE": "gpu-manager-role",
}

FLAGS = (
    Flag("metrics-bind-address", ":8080", "address of /metrics as host:port or :port; 0 disables it"),
    Flag("health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0 disables them"),
    Flag("deviceplugin-namespace", "kube-system",
         "namespace of the plugin pods; the variable DEVICEPLUGIN_NAMESPACE takes precedence"),
    Flag("leader-elect", False, "elect a leader among several operators; only the leader runs the controllers"),
    Flag("devices", "", f"kinds to manage, of {', '.join(KINDS)}; repeated or with commas; default all", repeated=True),
    Flag("kubeconfig", "", "kubeconfig file, only required outside a cluster"),
    Flag("metrics-secure", False, "serve metrics over HTTPS with the webhooks' certificate, to clients that may get "
         "/metrics in the cluster"),
    Flag("enable-http2", False, "accepted; webhooks and metrics use HTTP/1.1"),
    Flag("image-upgrade", "spec", "where older images are replaced: spec (in the resource), daemonset, or off"),
    Flag("image-minimum", OLDEST, "oldest version of images that is accepted"),
    Flag("image-target", "", f"version that older images are replaced by; default {RELEASE}, and -image-minimum for "
         "images of the Go project"),
    Flag("image-vendor", PLACEHOLDER, "registry and path of images that are filled in"),
    Flag("image-older-warns", False, "admit images below -image-minimum with a warning, because they are replaced"),
    Flag("plugin-service-account", "", "service account of the plugin pods; default is that of the namespace",
         environment="PLUGIN_SERVICE_ACCOUNT"),
    Flag("fpga-resource-naming", "default", "names of programmed FPGA functions: default, or legacy63 as in April "
         "2020; passed to the plugins"),
    Flag("port", 9443, "port of the webhooks"),
    Flag("shutdown-delay", 3.0, "seconds for which the webhooks are served after SIGTERM"),
    Flag("cert-dir", "/tmp/k8s-webhook-server/serving-certs",  # noqa: S108 - where existing manifests mount it
         "directory of tls.crt and tls.key; changes are loaded without a restart"),
    Flag("certificate-secret", "", "Secret in the operator's namespace for a certificate that the operator creates",
         environment="CERTIFICATE_SECRET"),
    Flag("name-prefix", "inteldeviceplugins-",
         "name prefix of the installation's service, webhook configurations and cluster roles"),
    Flag("tls-1.3", False, "allow TLS 1.3 in addition to TLS 1.2"),
    Flag("profiling", False, "serve /debug/tasks and /debug/profile on the address of the probes"),
    Flag("onload", False, "also manage Onload resources, with the device plugin image of DEVICE_PLUGIN_IMG"),
    *(flag for flag in sgxwebhook.FLAGS if flag.name.startswith(("aesmd-", "epc-"))),
    *logflags.FLAGS,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Entry point of the `program`. Returns 1 for a fatal error and 2 for a wrong flag."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["render"]:
        from accelplane.cli.operator_render import main as render  # noqa: PLC0415 - it needs no API server

        return render(words[1:])
    # The Go program ignores further arguments. An argument of our own command is an unknown subcommand.
    return run_in_cluster(program, FLAGS, words, _run, lenient=program == PROGRAM)


async def _run(values: Values) -> None:
    from accelplane.kube.client import load_config  # noqa: PLC0415
    from accelplane.operator.program import run  # noqa: PLC0415

    chosen = options(values, os.environ)
    await run(chosen, load_config(str(values["kubeconfig"])), _onload(os.environ) if values["onload"] else None)


def _onload(environment: Mapping[str, str]) -> "Extension":
    """The Onload operator as a part of this one. Raises `ValueError` naming the variable that is not set."""
    from accelplane.cli.onloadoperator import plugin_image  # noqa: PLC0415
    from accelplane.onload.program import add  # noqa: PLC0415

    image = plugin_image(environment)
    return lambda manager: [add(manager, image)]


def options(values: Mapping[str, Value], environment: Mapping[str, str]) -> "Options":
    """The options of the flags and the environment. Raises `ValueError` naming the wrong flag."""
    from accelplane.kube.webhooks import Certificate  # noqa: PLC0415
    from accelplane.operator.program import Options  # noqa: PLC0415

    prefix = str(values["name-prefix"])
    if not _PREFIX.fullmatch(prefix):
        raise ValueError(f"-name-prefix: {prefix!a}: expected the beginning of a name of a-z, 0-9, - and .")
    named = {variable: f"{prefix}{name}" for variable, name in _OBJECTS.items()}
    named |= {variable: name for variable in _OBJECTS if (name := environment.get(variable))}
    given = {**environment, **named, **{f"-{name}": str(value) for name, value in values.items()}}
    namespace = "DEVICEPLUGIN_NAMESPACE" if environment.get("DEVICEPLUGIN_NAMESPACE") else "-deviceplugin-namespace"
    return Options(
        families=families(str(values["devices"])),
        settings=Settings(
            namespace=_name(given, namespace),
            pull_secret=_name(given, "DEVICEPLUGIN_SECRET"),
            service_account=_name(given, "-plugin-service-account"),
            gpu_manager_role=_name(given, "GPU_MANAGER_ROLE"),
            dra_role=_name(given, "DRA_ROLE"),
            dra_status_role=_name(given, "DRA_STATUS_ROLE"),
            images=_images(values, environment),
            fpga_naming=fpgawebhook.naming_of(given["-fpga-resource-naming"], "-fpga-resource-naming"),
        ),
        certificate=Certificate(
            directory=str(values["cert-dir"]),
            secret=_name(given, "-certificate-secret"),
            service=_name(given, "WEBHOOK_SERVICE"),
            configurations={
                "MutatingWebhookConfiguration": [_name(given, "MUTATING_WEBHOOK_CONFIGURATION")],
                "ValidatingWebhookConfiguration": [_name(given, "VALIDATING_WEBHOOK_CONFIGURATION")],
            },
        ),
        sgx=sgxwebhook.sgx_options(values),
        webhook_port=port_of(values),
        allow_tls13=bool(values["tls-1.3"]),
        metrics_address=address_of(values, "metrics-bind-address"),
        metrics_secure=bool(values["metrics-secure"]),
        health_address=address_of(values, "health-probe-bind-address"),
        shutdown_delay=shutdown_delay_of(values),
        leader_elect=bool(values["leader-elect"]),
        profiling=bool(values["profiling"]),
    )


def families(text: str) -> list[str]:
    """The kinds of a comma-separated list; all kinds if it is empty. Raises `ValueError`."""
    if not text:
        return list(KINDS)
    found: list[str] = []
    for name in text.split(","):
        if name not in KINDS:
            raise ValueError(f"-devices: {name!a}: expected one of {', '.join(KINDS)}")
        if name in found:
            raise ValueError(f"-devices: {name!a}: found twice, expected once")
        found.append(name)
    return found


def _name(given: Mapping[str, str], source: str) -> str:
    """The name of an object from a flag or a variable. Raises `ValueError`."""
    name = given.get(source, "")
    return check_name(source, name) if name else ""


def _images(values: Mapping[str, Value], environment: Mapping[str, str]) -> ImagePolicy:
    from accelplane.operator import versions  # noqa: PLC0415
    from accelplane.operator.images import digests  # noqa: PLC0415

    upgrade = _UPGRADES.get(str(values["image-upgrade"]))
    if upgrade is None:
        raise ValueError(f"-image-upgrade: {values['image-upgrade']!a}: expected one of {', '.join(_UPGRADES)}")
    for name in ("image-minimum", "image-target"):
        if values[name] and versions.parse(str(values[name])) is None:
            raise ValueError(f"-{name}: {values[name]!a}: expected a version such as {RELEASE}")
    vendor = str(values["image-vendor"])
    if not _VENDOR.fullmatch(vendor):
        raise ValueError(f"-image-vendor: {vendor!a}: expected a registry and path such as quay.io/mine")
    policy = ImagePolicy(
        minimum=str(values["image-minimum"]),
        target=str(values["image-target"]),
        vendor=vendor,
        overrides=overrides(environment),
        digests=digests(environment),
        upgrade=upgrade,
        older="warn" if values["image-older-warns"] else "refuse",
    )
    for used in {policy.target or policy.release, *(policy.version(original=original) for original in (True, False))}:
        if versions.is_below(used, policy.minimum):
            raise ValueError(
                f"-image-minimum: {policy.minimum}: expected at most {used}, which older images are replaced by; "
                "change -image-target"
            )
    return policy


if __name__ == "__main__":
    sys.exit(main())
