"""Processes of containers with open GPU files, as a tree of procfs."""

from pathlib import Path

from trees import write

POD = "0f5b4d0a-7c11-4f6e-9a36-5b1f0c9e7a42"
OTHER_POD = "11111111-2222-3333-4444-555555555555"
STATIC_POD = "9d3cd3c1a4f6d87f1b62a83f7bd38a1c"
ID = "ab" * 32
BDF = "0000:03:00.0"


def cgroup(pod: str = POD, container: str = ID) -> str:
    """A path of the systemd driver on a host with cgroup v2."""
    slice_ = f"kubepods-burstable-pod{pod.replace('-', '_')}.slice"
    return f"0::/kubepods.slice/kubepods-burstable.slice/{slice_}/cri-containerd-{container}.scope\n"


def mountinfo(pod: str = POD, name: str = "main") -> str:
    return (
        "2100 1800 0:310 / / rw,relatime master:900 - overlay overlay rw,lowerdir=/a\n"
        f"2110 2100 259:1 /var/lib/kubelet/pods/{pod}/etc-hosts /etc/hosts rw - ext4 /dev/root rw\n"
        f"2111 2100 8:1 /var/lib/kubelet/pods/{pod}/containers/{name}/5f3c0a1b /dev/termination-log rw - ext4 x rw\n"
    )


def i915(client: int = 7, *, bdf: str = BDF, render: int = 0, copy: int = 0, memory: int = 0) -> str:
    """A GPU file of i915; `memory` is in KiB."""
    return (
        "pos:\t0\nflags:\t02100002\nmnt_id:\t25\nino:\t1203\n"
        f"drm-driver:\ti915\ndrm-client-id:\t{client}\ndrm-pdev:\t{bdf}\n"
        "drm-total-system0:\t0\ndrm-shared-system0:\t0\ndrm-active-system0:\t0\ndrm-resident-system0:\t0\n"
        f"drm-total-local0:\t{2 * memory} KiB\ndrm-shared-local0:\t0\ndrm-resident-local0:\t{memory} KiB\n"
        f"drm-engine-render:\t{render} ns\ndrm-engine-copy:\t{copy} ns\n"
        "drm-engine-video:\t0 ns\ndrm-engine-capacity-video:\t2\n"
    )


def xe(client: int = 9, *, bdf: str = BDF, used: int = 0, total: int = 0, capacity: int = 1) -> str:
    """A GPU file of xe."""
    return (
        f"pos:\t0\nflags:\t0100002\nmnt_id:\t26\nino:\t583\ndrm-driver:\txe\ndrm-client-id:\t{client}\n"
        f"drm-pdev:\t{bdf}\ndrm-total-vram0:\t8 MiB\ndrm-shared-vram0:\t4096\ndrm-resident-vram0:\t4 MiB\n"
        f"drm-cycles-ccs:\t{used}\ndrm-total-cycles-ccs:\t{total}\ndrm-engine-capacity-ccs:\t{capacity}\n"
    )


def process(
    proc: Path, pid: int, *files: str, pod: str = POD, container: str = ID, name: str = "main", first: int = 5
) -> Path:
    """A process with an ordinary file and GPU files, the latter with descriptors from `first` on."""
    directory = proc / str(pid)
    write(directory / "cgroup", cgroup(pod, container))
    write(directory / "mountinfo", mountinfo(pod, name))
    write(directory / "fdinfo/0", "pos:\t0\nflags:\t02\nmnt_id:\t26\nino:\t5\n")
    for number, text in enumerate(files, first):
        write(directory / f"fdinfo/{number}", text)
    return directory
