"""`onload-operator`: the Onload operator, with the flags of the Go program `/manager`.

The webhook is served if there is a certificate: `-certificate-secret` or `-cert-dir` is set.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from accelplane.cli import logflags
from accelplane.cli.clusterprogram import Values, address_of, check_name, port_of, run_in_cluster, shutdown_delay_of
from accelplane.cli.goflags import Flag, Value

if TYPE_CHECKING:
    from accelplane.kube.webhooks import Certificate
    from accelplane.onload.program import Options

PROGRAM = "onload-operator"
IMAGE_VARIABLE = "DEVICE_PLUGIN_IMG"
# Prefix of the names of objects of an installation.
_PREFIX = "onload-operator-"

_ENCODERS = {"": "", "console": "text", "json": "json"}
_LEVELS = {"": 0, "panic": 0, "error": 0, "info": 0, "debug": 1}

FLAGS = (
    Flag("metrics-bind-address", ":8080", "address of /metrics as host:port or :port; 0 disables it"),
    Flag("health-probe-bind-address", ":8081", "address of /healthz and /readyz; 0 disables them"),
    Flag("leader-elect", False, "elect a leader among several operators; only the leader runs the controller"),
    Flag("kubeconfig", "", "kubeconfig file, only required outside a cluster"),
    Flag("profiling", False, "serve /debug/tasks and /debug/profile on the address of the probes"),
    Flag("certificate-secret", "", "Secret in the operator's namespace for a certificate that the operator creates",
         environment="CERTIFICATE_SECRET"),
    Flag("cert-dir", "", "directory of tls.crt and tls.key, in place of -certificate-secret; changes are loaded "
         "without a restart"),
    Flag("port", 9443, "port of the webhook"),
    Flag("tls-1.3", False, "allow TLS 1.3 in addition to TLS 1.2"),
    Flag("metrics-secure", False, "serve metrics over HTTPS with the webhook's certificate, to clients that may get "
         "/metrics in the cluster"),
    Flag("shutdown-delay", 3.0, "seconds for which the webhook is served after SIGTERM"),
    Flag("zap-devel", True, "accepted, no effect"),
    Flag("zap-encoder", "", "format of log messages: console or json; as -log-format"),
    Flag("zap-log-level", "", "log level: debug, info, error, panic, or a number as -v"),
    Flag("zap-stacktrace-level", "", "accepted, no effect: internal errors are logged with a traceback"),
    Flag("zap-time-encoding", "", "accepted, no effect"),
    *logflags.FLAGS,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the program. Returns 1 for a fatal error and 2 for a wrong flag."""
    return run_in_cluster(PROGRAM, FLAGS, arguments, _run, lenient=True, translate=translated)


async def _run(values: Values) -> None:
    from accelplane.kube.client import load_config  # noqa: PLC0415
    from accelplane.onload.program import run  # noqa: PLC0415

    chosen = options(values, os.environ)
    await run(chosen, load_config(str(values["kubeconfig"])))


def options(values: Mapping[str, Value], environment: Mapping[str, str]) -> "Options":
    """The options of the flags and the environment. Raises `ValueError` naming the wrong flag or variable."""
    from accelplane.onload.program import Options  # noqa: PLC0415

    certificate = _certificate(values, environment)
    if values["metrics-secure"] and certificate is None:
        raise ValueError("-metrics-secure: found no certificate, expected -certificate-secret or -cert-dir")
    return Options(
        image=plugin_image(environment),
        certificate=certificate,
        webhook_port=port_of(values),
        allow_tls13=bool(values["tls-1.3"]),
        metrics_secure=bool(values["metrics-secure"]),
        shutdown_delay=shutdown_delay_of(values),
        metrics_address=address_of(values, "metrics-bind-address"),
        health_address=address_of(values, "health-probe-bind-address"),
        leader_elect=bool(values["leader-elect"]),
        profiling=bool(values["profiling"]),
    )


def _certificate(values: Mapping[str, Value], environment: Mapping[str, str]) -> "Certificate | None":
    """The certificate of the webhook, if there is one. Raises `ValueError`."""
    from accelplane.kube.webhooks import Certificate  # noqa: PLC0415

    secret, directory = str(values["certificate-secret"]), str(values["cert-dir"])
    if not secret:
        return Certificate(directory=directory) if directory else None
    service = environment.get("WEBHOOK_SERVICE") or f"{_PREFIX}webhook-service"
    configuration = environment.get("VALIDATING_WEBHOOK_CONFIGURATION") or f"{_PREFIX}validating-webhook-configuration"
    return Certificate(
        secret=check_name("-certificate-secret", secret),
        service=check_name("WEBHOOK_SERVICE", service),
        configurations={
            "ValidatingWebhookConfiguration": [check_name("VALIDATING_WEBHOOK_CONFIGURATION", configuration)]
        },
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


if __name__ == "__main__":
    sys.exit(main())
