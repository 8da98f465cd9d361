"""`accelplane webhook fpga` and `intel_fpga_admissionwebhook` (the Go program's name): the pod webhook for FPGAs.

It watches the AcceleratorFunctions and FpgaRegions of all namespaces and is ready after the initial lists. Every
replica serves requests, without leader election. It updates statuses if the service account's role permits.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_args

from accelplane.cli import logflags
from accelplane.cli.clusterprogram import Values, address_of, port_of, run_in_cluster, shutdown_delay_of
from accelplane.cli.goflags import Flag
from accelplane.fpga.ids import Naming

if TYPE_CHECKING:
    from accelplane.kube.client import Client
    from accelplane.kube.manager import Manager

PROGRAM = "intel_fpga_admissionwebhook"

FLAGS = (
    Flag("kubeconfig", "", "kubeconfig file, outside a cluster"),
    Flag("leader-elect", False, "ignored; every replica serves requests"),
    Flag("resource-naming", "default", "resource names of programmed functions: default, or legacy63 as in "
         "April 2020; the plugins must use the same"),
    Flag("port", 9443, "port of the webhook"),
    Flag("shutdown-delay", 3.0, "seconds for which the webhook is served after SIGTERM"),
    Flag("cert-dir", "/tmp/k8s-webhook-server/serving-certs",  # noqa: S108 - where existing manifests mount it
         "directory of tls.crt and tls.key, which are reloaded when they change"),
    Flag("tls-1.3", False, "also allow TLS 1.3; the default is TLS 1.2 with two cipher suites only"),
    Flag("health-probe-bind-address", "0", "address of /healthz and /readyz, as host:port or :port; 0 disables them",
         environment="HEALTH_PROBE_BIND_ADDRESS"),
    Flag("metrics-bind-address", "0", "address of /metrics, as host:port or :port; 0 disables it"),
    Flag("certificate-secret", "", "Secret in the pod's namespace for a self-signed certificate",
         environment="CERTIFICATE_SECRET"),
    Flag("service", "intelfpgawebhook-webhook-service", "Service of the webhook, for -certificate-secret",
         environment="WEBHOOK_SERVICE"),
    Flag("webhook-configuration", "intelfpgawebhook-mutating-webhook-configuration",
         "MutatingWebhookConfiguration whose caBundle is set to the self-signed certificate",
         environment="MUTATING_WEBHOOK_CONFIGURATION"),
    *logflags.FLAGS,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Returns the exit status: 1 for a fatal error, 2 for invalid flags."""
    return run_in_cluster(program, FLAGS, arguments, _run, lenient=True)


def naming_of(text: str, flag: str = "-resource-naming") -> Naming:
    """Validates the value of a flag. Raises `ValueError`."""
    known: Mapping[str, Naming] = {one: one for one in get_args(Naming)}
    if text not in known:
        raise ValueError(f"{flag}: {text!a}: expected one of {', '.join(known)}")
    return known[text]


async def _run(values: Values) -> None:
    from accelplane.kube.client import Client, load_config  # noqa: PLC0415

    _check_flags(values)
    client = Client(load_config(str(values["kubeconfig"])), field_manager="accelplane-fpga-webhook")
    try:
        await _manager(client, values).run()
    finally:
        await client.close()


def _check_flags(values: Values) -> None:
    """Raises `ValueError` naming the flag that is wrong, before any file is read."""
    port_of(values)
    for flag in ("health-probe-bind-address", "metrics-bind-address"):
        address_of(values, flag)
    shutdown_delay_of(values)
    naming_of(str(values["resource-naming"]))


def _manager(client: "Client", values: Values) -> "Manager":
    """Raises `CertificateError` and `ValueError`."""
    from accelplane.admission.mapping_controller import add_fpga_admission  # noqa: PLC0415
    from accelplane.http.servingtls import ServingTls, TlsSettings  # noqa: PLC0415
    from accelplane.kube.manager import Manager  # noqa: PLC0415
    from accelplane.kube.webhooks import Certificate, serve  # noqa: PLC0415

    manager = Manager(
        client,
        health_address=str(values["health-probe-bind-address"]),
        metrics_address=str(values["metrics-bind-address"]),
        shutdown_delay=shutdown_delay_of(values),
        # The manifests give the pod 10 s: the delay, 5 s for the last requests, and this for events.
        graceful_shutdown_timeout=2.0,
    )
    naming = naming_of(str(values["resource-naming"]))
    certificate = Certificate(
        directory=str(values["cert-dir"]),
        secret=str(values["certificate-secret"]),
        service=str(values["service"]),
        configurations={"MutatingWebhookConfiguration": [str(values["webhook-configuration"])]},
    )
    tls = ServingTls(TlsSettings(allow_tls13=bool(values["tls-1.3"])))
    serve(manager, add_fpga_admission(manager, naming), certificate, tls, port=port_of(values))
    return manager


if __name__ == "__main__":
    sys.exit(main())
