"""Configuration files and command lines of a cluster's programs, as pure functions of a plan.

All differences from a production cluster are in this module; docs/cluster-harness.md lists them for users.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

from .pki import Credentials

SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
PODS = "10.244.0.0/16"
_KWOK_NODES = IPv4Network("198.18.0.0/15")
API_PORT = 6443
SCHEDULER_PORT = 10259
KUBELET_HEALTH_PORT = 10248
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"
# Tests can write certs.d/HOST/hosts.toml, which containerd reads with each pull.
REGISTRIES = "/etc/containerd/certs.d"
CRIO_SOCKET = "/run/crio/crio.sock"
CRIO_STORAGE = "/var/lib/containers/storage"
CRIO_STATE = "/run/containers/storage"
CONMON = "/usr/bin/conmon"
PAUSE_IMAGE = "localhost/accelplane-test/pause:1"
BUSYBOX_IMAGE = "localhost/accelplane-test/busybox:1"
PKI = "/etc/kubernetes/pki"
_SYS_OPTIONS = ("rbind", "ro", "nosuid", "noexec", "nodev")
# The node monitor grace period in seconds: shorter than the default.
NODE_MONITOR_GRACE_PERIOD = 12
# `fs.inotify.max_user_instances`, whose usual value is 128. A node takes about 20.
INOTIFY_INSTANCES = 1024
# With the default 20 requests a second the controllers alone take five seconds to start.
_UNTHROTTLED = ("--kube-api-qps=500", "--kube-api-burst=1000")


@dataclass(frozen=True)
class Addresses:
    """The network of the cluster with this number. All addresses are private to the cluster, except one of the host."""

    number: int

    @property
    def host(self) -> str:
        return f"198.18.{self.number}.1"

    @property
    def control(self) -> str:
        return f"198.18.{self.number}.2"

    def node(self, position: int) -> str:
        return f"198.18.{self.number}.{10 + position}"

    def pods(self, position: int) -> str:
        return f"10.244.{position}.0/24"

    def hardware(self, position: int) -> str:
        # The same address after a reboot, because neighbours cache the old one.
        return f"02:ac:ce:{self.number:02x}:00:{position:02x}"


def kubeconfig(server: str, authority: bytes, user: Credentials) -> str:
    """A kubeconfig with embedded certificates, as JSON, which is valid YAML."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": server, "certificate-authority-data": _base64(authority)}}],
        "users": [
            {
                "name": "test",
                "user": {
                    "client-certificate-data": _base64(user.certificate),
                    "client-key-data": _base64(user.key),
                },
            }
        ],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "current-context": "test",
    }
    return json.dumps(document, indent=1)


def etcd() -> list[str]:
    client = "http://127.0.0.1:2379"
    return [
        "etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}", "--listen-peer-urls=http://127.0.0.1:2380", "--log-level=warn",
    ]  # fmt: skip


def apiserver(address: str, extra: list[str]) -> list[str]:
    return [
        "kube-apiserver", "--etcd-servers=http://127.0.0.1:2379", f"--advertise-address={address}",
        f"--secure-port={API_PORT}", f"--service-cluster-ip-range={SERVICES}", "--allow-privileged=true",
        "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
        f"--client-ca-file={PKI}/ca.crt", f"--tls-cert-file={PKI}/apiserver.crt",
        f"--tls-private-key-file={PKI}/apiserver.key",
        f"--kubelet-certificate-authority={PKI}/ca.crt", f"--kubelet-client-certificate={PKI}/kubelet-client.crt",
        f"--kubelet-client-key={PKI}/kubelet-client.key", "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={PKI}/service-account.pub",
        f"--service-account-signing-key-file={PKI}/service-account.key",
        # Debian's etcd is too old for it; with it the API server rejects the first watches of kwok and others,
        # and some of them retry only after half a minute.
        "--feature-gates=WatchList=false",
        # Webhooks are called at their pods' addresses: the control machine runs no kube-proxy.
        "--enable-aggregator-routing=true",
        *extra,
    ]  # fmt: skip


def feature_gates(enabled: Sequence[str]) -> list[str]:
    return [f"--feature-gates={','.join(f'{gate}=true' for gate in enabled)}"] if enabled else []


def controller_manager(silence: int) -> list[str]:
    return [
        "kube-controller-manager", "--kubeconfig=/etc/kubernetes/controller-manager.conf", "--leader-elect=false",
        "--use-service-account-credentials=true", f"--root-ca-file={PKI}/ca.crt",
        f"--service-account-private-key-file={PKI}/service-account.key",
        f"--cluster-signing-cert-file={PKI}/ca.crt", f"--cluster-signing-key-file={PKI}/ca.key",
        "--node-monitor-period=1s", f"--node-monitor-grace-period={silence}s", *_UNTHROTTLED,
    ]  # fmt: skip


def scheduler() -> list[str]:
    return [
        "kube-scheduler", "--kubeconfig=/etc/kubernetes/scheduler.conf", "--leader-elect=false",
        # Benchmarks read its metrics and memory.
        "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics,/debug/pprof/heap", *_UNTHROTTLED,
    ]  # fmt: skip


def kwok(silence: int) -> list[str]:
    # With leases kwok writes each node's status three times a minute; without, every ten minutes.
    lease = 40 if silence <= 1200 else 0
    return [
        "kwok", "--kubeconfig=/etc/kubernetes/admin.conf", "--manage-all-nodes=false",
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake", f"--node-lease-duration-seconds={lease}",
        # The status of these objects is set by a test.
        "--disregard-status-with-annotation-selector=kwok.x-k8s.io/status=custom",
    ]  # fmt: skip


def kube_proxy(name: str) -> list[str]:
    return [
        "kube-proxy", "--kubeconfig=/etc/kubernetes/kube-proxy.conf", f"--hostname-override={name}",
        "--proxy-mode=iptables", f"--cluster-cidr={PODS}", "--conntrack-max-per-core=0", "--oom-score-adj=0",
    ]  # fmt: skip


def kubelet(name: str, address: str, labels: Mapping[str, str]) -> list[str]:
    pairs = ",".join(f"{key}={value}" for key, value in labels.items())
    return [
        "kubelet", "--config=/etc/kubernetes/kubelet.yaml", "--kubeconfig=/etc/kubernetes/kubelet.conf",
        f"--hostname-override={name}", f"--node-ip={address}", "--v=2", f"--node-labels={pairs}",
    ]  # fmt: skip


def kubelet_configuration(cgroup: str, overrides: Mapping[str, object]) -> str:
    document: dict[str, object] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",  # noqa: S104  the machine's own network
        "healthzBindAddress": "0.0.0.0",  # noqa: S104
        "healthzPort": KUBELET_HEALTH_PORT,
        "authentication": {
            "x509": {"clientCAFile": f"{PKI}/ca.crt"},
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{PKI}/kubelet.crt",
        "tlsPrivateKeyFile": f"{PKI}/kubelet.key",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDomain": "cluster.local",
        "clusterDNS": [DNS_SERVICE],
        "resolvConf": "/etc/resolv.conf",
        # The disk is shared with the computer: its usage is not that of the node.
        "evictionHard": {"memory.available": "50Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        # Changes of devices and the loss of a node show within seconds instead of most of a minute.
        "nodeStatusUpdateFrequency": "1s",
        "nodeStatusReportFrequency": "1m",
        "nodeLeaseDurationSeconds": 8,
    }
    return json.dumps(document | dict(overrides), indent=1)


def containerd(cni_directory: str) -> str:
    return f"""\
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins.'io.containerd.cri.v1.images']
  snapshotter = "overlayfs"
  [plugins.'io.containerd.cri.v1.images'.pinned_images]
    sandbox = "{PAUSE_IMAGE}"
  [plugins.'io.containerd.cri.v1.images'.registry]
    config_path = "{REGISTRIES}"

[plugins.'io.containerd.cri.v1.runtime']
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
  [plugins.'io.containerd.cri.v1.runtime'.cni]
    bin_dirs = ["{cni_directory}"]
    conf_dir = "/etc/cni/net.d"
  [plugins.'io.containerd.cri.v1.runtime'.containerd]
    default_runtime_name = "runc"
    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "/etc/containerd/base-spec.json"
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
        BinaryName = "/etc/containerd/runc"
"""


def containerd_1(cni_directory: str) -> str:
    """The same for containerd 1: CDI exists in 1.7 only, and is disabled by default."""
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_directory}"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "/etc/containerd/base-spec.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "/etc/containerd/runc"
"""


def base_runtime_spec(default: str) -> str:
    """containerd's default container, with the node's simulated /sys in it instead of the kernel's.

    The mount keeps the type sysfs, which runc ignores for a bind mount: by it containerd finds what it has to make
    writable in privileged containers. `runc` below handles the mounts inside it.
    """
    spec = json.loads(default)
    for entry in spec["mounts"]:
        if entry["destination"] == "/sys":
            entry |= {"source": "/sys", "options": list(_SYS_OPTIONS)}
    # Raising limits needs a capability that containers and sandboxes often lack.
    spec["process"]["rlimits"] = []
    return json.dumps(spec)


def runc() -> str:
    """The script that containerd starts as runc: it adds an option to the container's configuration and runs runc.

    A bind mount is read-only only at its top, and emulated hardware consists of mounts in /sys. containerd can
    remove `ro` for privileged containers, but not `rro`, so `rro` cannot be in the base.
    """
    options = ",".join(f'"{option}"' for option in _SYS_OPTIONS)
    return f"""\
#!/bin/sh
bundle= process=
for word; do
    case "$last" in
    --bundle) bundle=$word ;;
    --process) process=$word ;;
    esac
    last=$word
done
[ -z "$process" ] || sed -z -E -i -e 's/"CAP_SYS_RESOURCE",\\s*|,\\s*"CAP_SYS_RESOURCE"//g' "$process"
[ -z "$bundle" ] || sed -i 's/{options}/&,"rro"/' "$bundle/config.json"
exec runc "$@"
"""


def crio(cni_directory: str, programs: str) -> str:
    """CRI-O with the cgroups of the kubelet, and without registries. It reads hooks from both usual directories."""
    return f"""\
[crio]
root = "{CRIO_STORAGE}"
runroot = "{CRIO_STATE}"
storage_driver = "overlay"

[crio.api]
listen = "{CRIO_SOCKET}"

[crio.runtime]
cgroup_manager = "cgroupfs"
default_runtime = "runc"
pinns_path = "{programs}/pinns"
apparmor_profile = "unconfined"
hooks_dir = ["/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"]
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[crio.runtime.runtimes.runc]
runtime_path = "/etc/crio/runc"
runtime_type = "oci"
runtime_root = "/run/runc"
monitor_path = "{CONMON}"
monitor_cgroup = "pod"
monitor_env = ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]

[crio.image]
pause_image = "{PAUSE_IMAGE}"
pause_command = "/bin/pause"

[crio.network]
network_dir = "/etc/cni/net.d"
plugin_dirs = ["{cni_directory}"]

[crio.nri]
enable_nri = false
"""


def crio_runc() -> str:
    """The script that CRI-O starts as runc. CRI-O has no base configuration, so it also changes the source of /sys.

    A mount that is read-only becomes so with all mounts in it. Sandboxes often lack the capability for limits and the
    OOM score, which CRI-O gives to privileged containers, and the hugetlb cgroup.
    """
    return """\
#!/bin/sh
bundle= process=
for word; do
    case "$last" in
    --bundle) bundle=$word ;;
    --process) process=$word ;;
    esac
    last=$word
done
[ -z "$process" ] || sed -z -E -i -e 's/"CAP_SYS_RESOURCE",\\s*|,\\s*"CAP_SYS_RESOURCE"//g' "$process"
[ -z "$bundle" ] || sed -z -E -i \\
    -e 's/"type":\\s*"sysfs",\\s*"source":\\s*"sysfs",\\s*/"type":"bind","source":"\\/sys",/g' \\
    -e 's/("source":"\\/sys",)"options":\\s*\\[/\\1"options":["rbind",/g' \\
    -e 's/("source":"\\/sys","options":\\["rbind",[^]]*"ro")/\\1,"rro"/g' \\
    -e 's/"CAP_SYS_RESOURCE",\\s*|,\\s*"CAP_SYS_RESOURCE"//g' \\
    -e 's/"hugepageLimits":\\s*\\[[^]]*\\]/"hugepageLimits":[]/' \\
    -e 's/"oomScoreAdj":\\s*-[0-9]+/"oomScoreAdj":0/' "$bundle/config.json"
exec runc "$@"
"""


def cni(pods: str) -> str:
    ranges = [[{"subnet": pods}]]
    return json.dumps(
        {
            "cniVersion": "1.0.0",
            "name": "test",
            "plugins": [
                {
                    "type": "ptp",
                    "ipMasq": False,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni/networks",
                        "ranges": ranges,
                        "routes": [{"dst": "0.0.0.0/0"}],
                    },
                },
                {"type": "portmap", "capabilities": {"portMappings": True}},
            ],
        }
    )


def kwok_node(name: str, index: int, resources: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, object]:
    """A node object managed by kwok, with an address of the range for benchmarks (RFC 2544).

    Without an address, kwok sets the status of each pod with the host's network again every few seconds.
    """
    amounts = {"cpu": "32", "memory": "256Gi", "pods": "110", **resources}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "type": "kwok", **labels},
        },
        "status": {
            "allocatable": amounts,
            "capacity": amounts,
            "addresses": [{"type": "InternalIP", "address": str(_KWOK_NODES[index + 1])}],
        },
    }


def _base64(content: bytes) -> str:
    return b64encode(content).decode()
