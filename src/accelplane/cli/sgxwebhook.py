"""`accelplane webhook sgx` and `intel_sgx_admissionwebhook` (the Go program's name): the pod webhook for SGX.

The certificate comes from files, and no request is sent to the API server. With `-certificate-secret` the webhook
issues and renews its own certificate, keeps it in that Secret and sets the caBundle of its configuration.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import get_args

from accelplane.admission.sgx import SgxOptions, SocketVolume, mutator
from accelplane.apiserver import SERVICE_ACCOUNT, ApiError, ApiServer
from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit, with_defaults
from accelplane.http.listening import split_address
from accelplane.http.malloc import release_freed_memory
from accelplane.http.messages import PAGE_LIMITS, HttpError, Request, Response
from accelplane.http.server import HttpServer
from accelplane.http.servingtls import CertificateError, ServingTls, TlsSettings
from accelplane.http.validity import HELP, Validity
from accelplane.kube.admission import AdmissionServer

log = logging.getLogger(__name__)

PROGRAM = "intel_sgx_admissionwebhook"

FLAGS = (
    Flag("kubeconfig", "", "ignored; the API server is used only with -certificate-secret, and only in a cluster"),
    Flag("port", 9443, "port of the webhook"),
    Flag("cert-dir", "/tmp/k8s-webhook-server/serving-certs",  # noqa: S108 - where existing manifests mount it
         "directory of tls.crt and tls.key, which are reloaded when they change"),
    Flag("tls-1.3", False, "also allow TLS 1.3; the default is TLS 1.2 with two cipher suites only"),
    Flag("metrics-bind-address", "0", "address of /metrics, as host:port or :port; 0 disables it"),
    Flag("aesmd-name", "aesmd", "name of the quoting daemon as quote provider, and of its container"),
    Flag("aesmd-socket-dir", "/var/run/aesmd", "directory of the daemon's socket"),
    Flag("aesmd-volume", "auto", "volume of that directory: hostPath (the node's), emptyDir (the pod's), or auto: the "
         "pod's if the daemon is one of its containers"),
    Flag("aesmd-sidecar-without-epc", False, "treat a container with the daemon's name as a sidecar even without EPC"),
    Flag("epc-whole-pages", False, "round the annotation sgx.intel.com/epc up to pages of 4 KiB, for Kata Containers"),
    Flag("epc-required", False, "deny pods that request sgx.intel.com/enclave or sgx.intel.com/provision themselves, "
         "which quotas of sgx.intel.com/epc do not count"),
    Flag("certificate-secret", "", "Secret in the pod's namespace for a self-signed certificate; it has to exist, "
         "empty at first", environment="CERTIFICATE_SECRET"),
    Flag("service", "intelsgxwebhook-webhook-service", "Service of the webhook, for -certificate-secret",
         environment="WEBHOOK_SERVICE"),
    Flag("webhook-configuration", "intelsgxwebhook-mutating-webhook-configuration",
         "MutatingWebhookConfiguration whose caBundle is set to the self-signed certificate",
         environment="MUTATING_WEBHOOK_CONFIGURATION"),
    Flag("shutdown-delay", 3, "seconds to serve after SIGTERM, while /readyz fails and endpoints are updated"),
    *logflags.FLAGS,
)  # fmt: skip


_MAX_SHUTDOWN_DELAY = 60


class Fatal(Exception):
    """An error that ends the command with status 1."""


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Returns the exit status: 1 for a fatal error, 2 for invalid flags."""
    signals.end_at_once()
    given = parse_or_exit(program, FLAGS, arguments, lenient=True)
    values = with_defaults(FLAGS, given, os.environ)
    try:
        logflags.start(given, program.replace(" ", "-"))
        options = sgx_options(values)
        _check_flags(values)
        asyncio.run(_serve(values, options))
    except (Fatal, CertificateError, ApiError, ValueError, OSError) as error:
        log.critical("%s", logflags.message_of(error))
        return 1
    return 0


def sgx_options(values: Mapping[str, Value]) -> SgxOptions:
    """Raises `ValueError` naming the flag that is wrong."""
    volumes: Mapping[str, SocketVolume] = {one: one for one in get_args(SocketVolume)}
    volume = volumes.get(str(values["aesmd-volume"]))
    if volume is None:
        raise ValueError(f"-aesmd-volume: {values['aesmd-volume']!a}: expected one of {', '.join(volumes)}")
    directory = str(values["aesmd-socket-dir"])
    if not directory.startswith("/"):
        raise ValueError(f"-aesmd-socket-dir: {directory!a}: expected an absolute path")
    if not values["aesmd-name"]:
        raise ValueError("-aesmd-name: is empty, expected the name of a container")
    return SgxOptions(
        aesmd_name=str(values["aesmd-name"]),
        socket_directory=directory,
        socket_volume=volume,
        sidecar_without_epc=bool(values["aesmd-sidecar-without-epc"]),
        whole_pages=bool(values["epc-whole-pages"]),
        epc_required=bool(values["epc-required"]),
    )


def _check_flags(values: Mapping[str, Value]) -> None:
    """Raises `ValueError` naming the flag that is wrong, before any file is read."""
    limits = {"port": 65535, "shutdown-delay": _MAX_SHUTDOWN_DELAY}
    for name, limit in limits.items():
        if not 0 <= int(values[name]) <= limit:
            raise ValueError(f"-{name}: {values[name]}: expected 0 to {limit}")


async def _serve(values: Mapping[str, Value], options: SgxOptions) -> None:
    """Runs until SIGTERM or SIGINT; a second signal ends the delay of the shutdown."""
    release_freed_memory()
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    for number in signals.ENDING:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    tls = ServingTls(TlsSettings(allow_tls13=bool(values["tls-1.3"])))

    def readyz() -> tuple[int, str]:
        return (200, "ok\n") if tls.ready and not stop.is_set() else (503, "no\n")

    server = AdmissionServer([mutator(options)], {"/healthz": lambda: (200, "ok\n"), "/readyz": readyz})
    async with _certified(values, tls), _metrics(str(values["metrics-bind-address"]), server, tls):
        port = await _listening(server, int(values["port"]), tls)
        log.info("serving at port %d", port)
        await stop.wait()
        delay = int(values["shutdown-delay"])
        log.info("stopping in %d s", delay)
        server.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay):
                await stop_now.wait()
        await server.stop()


async def _listening(server: AdmissionServer, port: int, tls: ServingTls) -> int:
    """Raises `Fatal`."""
    try:
        return await server.start(None, port, tls.connection_context)
    except (OSError, OverflowError) as error:
        raise Fatal(f"-port: {port}: {error}") from error


@contextlib.asynccontextmanager
async def _certified(values: Mapping[str, Value], tls: ServingTls) -> AsyncGenerator[None]:
    """A certificate for the server while entered. Raises `CertificateError`, `ApiError` and `Fatal`."""
    secret = str(values["certificate-secret"])
    if not secret:
        tls.follow(str(values["cert-dir"]))
        yield
        return
    # Imported here: the library for certificates is as large as the rest of this process. A memory limit of 30 MiB has
    # no room for a subprocess that imports it.
    from accelplane.cli.ownsecret import SecretStore  # noqa: PLC0415
    from accelplane.kube.authority import plan_renewal_in_process  # noqa: PLC0415
    from accelplane.kube.trust import Trust, TrustSettings  # noqa: PLC0415

    namespace = _own_namespace()
    store = SecretStore(ApiServer.in_cluster(), namespace, secret, str(values["webhook-configuration"]))
    settings = TrustSettings(service=str(values["service"]), namespace=namespace)
    trust = Trust(store, tls, settings, planner=plan_renewal_in_process)
    task = asyncio.create_task(trust.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def _metrics(address: str, server: AdmissionServer, tls: ServingTls) -> AsyncGenerator[None]:
    """Serves /metrics at `address` while entered. Raises `Fatal`."""
    if address == "0":
        yield
        return

    def page(request: Request) -> Response:
        if request.path != "/metrics":
            raise HttpError(404, "no such page; expected /metrics")
        return Response(200, metrics_text(server, tls.validity()).encode(), "text/plain; version=0.0.4; charset=utf-8")

    pages = HttpServer(page, PAGE_LIMITS)
    try:
        await pages.start(*split_address(address))
    except ValueError:
        raise Fatal(f"-metrics-bind-address: found {address!a}, expected host:port, :port or 0") from None
    except OSError as error:
        raise Fatal(f"-metrics-bind-address: {address!a}: {error}") from error
    try:
        yield
    finally:
        await pages.stop()


def metrics_text(server: AdmissionServer, certificate: Validity | None = None) -> str:
    """The metrics as text for Prometheus; prometheus-client would be the largest part of this process."""
    requests, latency = "controller_runtime_webhook_requests_total", "controller_runtime_webhook_latency_seconds"
    reviews = "accelplane_webhook_reviews_total"
    lines = [f"# HELP {requests} Admission requests by status.", f"# TYPE {requests} counter"]
    for path, stats in server.stats.items():
        lines += [f'{requests}{{webhook="{path}",code="{code}"}} {stats.codes[code]}' for code in sorted(stats.codes)]
    lines += [f"# HELP {latency} How long admission requests take.", f"# TYPE {latency} summary"]
    for path, stats in server.stats.items():
        lines.append(f'{latency}_sum{{webhook="{path}"}} {stats.seconds:.6f}')
        lines.append(f'{latency}_count{{webhook="{path}"}} {stats.codes.total()}')
    lines += [f"# HELP {reviews} Reviews by outcome.", f"# TYPE {reviews} counter"]
    for path, stats in server.stats.items():
        found = sorted(stats.outcomes.items())
        lines += [f'{reviews}{{webhook="{path}",outcome="{outcome}"}} {count}' for outcome, count in found]
    in_flight = "controller_runtime_webhook_requests_in_flight"
    lines += [f"# HELP {in_flight} Admission requests in flight.", f"# TYPE {in_flight} gauge"]
    lines += [f'{in_flight}{{webhook="{path}"}} {server.in_flight(path)}' for path in server.webhooks]
    for name, seconds in (certificate.samples() if certificate is not None else {}).items():
        lines += [f"# HELP {name} {HELP[name]}.", f"# TYPE {name} gauge", f"{name} {seconds:.0f}"]
    return "\n".join(lines) + "\n"


def _own_namespace() -> str:
    """Raises `Fatal`."""
    path = f"{SERVICE_ACCOUNT}/namespace"
    try:
        with open(path, encoding="ascii") as file:
            return file.read(254).strip()
    except (OSError, ValueError) as error:
        raise Fatal(f"-certificate-secret: the pod's namespace is unknown: {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
