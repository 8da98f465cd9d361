"""`onload-operator`: the Onload operator, with the flags of the Go program `/manager`."""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accelplane.cli import logflags
from accelplane.cli.clusterprogram import Values, run_in_cluster
from accelplane.cli.goflags import Flag, Value

if TYPE_CHECKING:
    from accelplane.kube.webhooks import Certificate
    from accelplane.onload.program import Options

PROGRAM = "onload-operator"
IMAGE_VARIABLE = "DEVICE_PLUGIN_IMG"

_ENCODERS = {"": "", "console": "text", "json": "json"}
_LEVELS = {"": 0, "panic": 0, "error": 0, "info": 0, "debug": 1}

FLAGS = (
    Flag("metrics-bind-address", ":8080", "address of /metrics as host:port or :port; 0 disables it"),
    Flag("health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0 disables them"),
    Flag("leader-elect", False, "elect a leader among several operators; only the leader runs the controller"),
    Flag("kubeconfig", "", "kubeconfig file, only required outside a cluster"),
    Flag("port", 9443, "port of the webhook"),
    Flag("cert-dir", "", "directory of tls.crt and tls.key of the webhook; the webhook is served if it is set"),
    Flag("certificate-secret", "", "Secret in the operator's namespace for a certificate that the operator creates; "
         "the webhook is served if it is set", environment="CERTIFICATE_SECRET"),
    Flag("name-prefix", "onload-operator-", "name prefix of the Service and the configuration of the webhook"),
    Flag("profiling", False, "serve /debug/tasks and /debug/profile on the address of the probes"),
    Flag("zap-devel", True, "accepted, no effect"),
    Flag("zap-encoder", "", "format of log messages: console or json; as -log-format"),
    Flag("zap-log-level", "", "log level: debug, info, error, panic, or a number as -v"),
    Flag("zap-stacktrace-level", "", "accepted, no effect: internal errors are logged with a traceback"),
    Flag("zap-time-encoding", "", "accepted, no effect"),
    *logflags.FLAGS,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the program. Returns 1 for a fatal error and 2 for a wrong flag."""
    words = sys.argv[1:] if arguments is None else arguments
    return run_in_cluster(PROGRAM, FLAGS, words, _run, lenient=True, translate=translated)


async def _run(values: Values) -> None:
    from accelplane.kube.client import load_config  # noqa: PLC0415
    from accelplane.onload.program import run  # noqa: PLC0415

    chosen = options(values, os.environ)
    await run(chosen, load_config(str(values["kubeconfig"])))


def options(values: Mapping[str, Value], environment: Mapping[str, str]) -> "Options":
    """The options of the flags and the environment. Raises `ValueError` naming the wrong flag or variable."""
    from accelplane.onload.program import Options  # noqa: PLC0415

    image = plugin_image(environment)
    port = int(values["port"])
    if not 0 <= port <= 65535:
        raise ValueError(f"-port: {port}: expected a port from 0 to 65535")
    return Options(
        image=image,
        certificate=_certificate(values, environment),
        webhook_port=port,
        metrics_address=_address(values, "metrics-bind-address"),
        health_address=_address(values, "health-probe-bind-address"),
        leader_elect=bool(values["leader-elect"]),
        profiling=bool(values["profiling"]),
    )


def plugin_image(environment: Mapping[str, str]) -> str:
    """The image of the device plugin. Raises `ValueError` if the variable is empty or not set."""
    if image := environment.get(IMAGE_VARIABLE, ""):
        return image
    raise ValueError(
        f"{IMAGE_VARIABLE}: is empty or not set, expected the image of the device plugin; set the variable in the "
        "Deployment of the operator"
    )


def translated(given: Mapping[str, Value]) -> dict[str, Value]:
    """The flags with the logging flags that correspond to zap's. Raises `ValueError` naming the wrong flag."""
    found = dict(given)
    encoder, level = str(given.get("zap-encoder", "")), str(given.get("zap-log-level", ""))
    if encoder not in _ENCODERS:
        raise ValueError(f"-zap-encoder: {encoder!a}: expected console or json")
    if level not in _LEVELS and not (level.isdecimal() and len(level) < 4):
        raise ValueError(f"-zap-log-level: {level!a}: expected debug, info, error, panic or a number")
    if _ENCODERS[encoder]:
        found.setdefault("log-format", _ENCODERS[encoder])
    if level:
        found.setdefault("v", _LEVELS[level] if level in _LEVELS else int(level))
    return found


def _certificate(values: Mapping[str, Value], environment: Mapping[str, str]) -> "Certificate | None":
    """The source of the webhook's certificate, if there is one. Raises `ValueError` naming the wrong name."""
    from accelplane.kube.names import is_dns_subdomain  # noqa: PLC0415
    from accelplane.kube.webhooks import Certificate  # noqa: PLC0415

    directory, secret = str(values["cert-dir"]), str(values["certificate-secret"])
    if not directory and not secret:
        return None
    prefix = str(values["name-prefix"])
    service = environment.get("WEBHOOK_SERVICE") or f"{prefix}webhook-service"
    configuration = environment.get("VALIDATING_WEBHOOK_CONFIGURATION") or f"{prefix}validating-webhook-configuration"
    for source, name in (
        ("-certificate-secret", secret or "unset"),
        ("WEBHOOK_SERVICE", service),
        ("VALIDATING_WEBHOOK_CONFIGURATION", configuration),
    ):
        if not is_dns_subdomain(name):
            raise ValueError(f"{source}: {name!a}: expected a name of a-z, 0-9, - and .")
    return Certificate(
        directory=directory,
        secret=secret,
        service=service,
        configurations={"ValidatingWebhookConfiguration": [configuration]},
    )


def _address(values: Mapping[str, Value], flag: str) -> str:
    from accelplane.http.server import split_address  # noqa: PLC0415
    from accelplane.kube.manager import OFF  # noqa: PLC0415

    address = str(values[flag])
    if address != OFF:
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"-{flag}: {error}, or {OFF} to disable it") from None
    return address


if __name__ == "__main__":
    sys.exit(main())
