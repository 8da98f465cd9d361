"""Finds the API server of a pod or of a kubeconfig file.

Facts: a pod finds the server in `KUBERNETES_SERVICE_HOST` and `_PORT`, and its token, namespace and certificate
authority in files of `SERVICE_ACCOUNT`; client-go's order of kubeconfig flag, `KUBECONFIG`, service account and
`~/.kube/config`.
"""

import os
from collections.abc import Mapping

from accelplane.apiserver.config import ClientConfig
from accelplane.apiserver.errors import NoCredentials

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def has_no_account(environment: Mapping[str, str] | None = None, directory: str = SERVICE_ACCOUNT) -> bool:
    """Whether this is a pod without a service account (`automountServiceAccountToken: false`)."""
    variables = os.environ if environment is None else environment
    return bool(variables.get("KUBERNETES_SERVICE_HOST")) and not os.path.isdir(directory)


def in_cluster(environment: Mapping[str, str] | None = None, directory: str = SERVICE_ACCOUNT) -> ClientConfig:
    """The server of the cluster that this pod is in. Raises `NoCredentials`."""
    variables = os.environ if environment is None else environment
    host, port = variables.get("KUBERNETES_SERVICE_HOST", ""), variables.get("KUBERNETES_SERVICE_PORT", "")
    if not host or not port:
        raise NoCredentials(
            "not in a cluster",
            "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not both set; "
            "expected to run in a pod with a service account",
        )
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 65536):
        raise NoCredentials("KUBERNETES_SERVICE_PORT", f"found {port[:40]!a}, expected a port")
    if not host.isascii() or any(character.isspace() or character in "/@?#[]" for character in host):
        raise NoCredentials("KUBERNETES_SERVICE_HOST", f"found {host[:80]!a}, expected a name or an address")
    try:
        with open(f"{directory}/namespace", encoding="ascii", errors="replace") as file:
            namespace = file.read(256).strip()
    except OSError:
        namespace = ""
    return ClientConfig(
        server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
        namespace=namespace or "default",
        authority=f"{directory}/ca.crt",
        token=f"{directory}/token",
    )


def load_config(kubeconfig: str = "") -> ClientConfig:
    """The kubeconfig file `kubeconfig`, those of `KUBECONFIG`, the service account of the pod, or `~/.kube/config`.

    Raises `NoCredentials`.
    """
    files = [kubeconfig] if kubeconfig else [each for each in os.environ.get("KUBECONFIG", "").split(":") if each]
    if not files:
        if "KUBERNETES_SERVICE_HOST" in os.environ:
            return in_cluster()
        files = [os.path.expanduser("~/.kube/config")]
    from accelplane.apiserver.kubeconfig import read_kubeconfig  # noqa: PLC0415 - it imports yaml

    return read_kubeconfig(*files)
