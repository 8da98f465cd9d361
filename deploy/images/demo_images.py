"""Builds images of the workloads that the demos name: `make demo-images`.

    python3 deploy/images/demo_images.py build OUT [--images NAME,…]
    python3 deploy/images/demo_images.py update          updates the lock files to what the mirrors have now

Writes an OCI image layout for each image, OUT/NAME, for amd64. An image consists of Debian packages, unpacked and
pinned by demo/NAME.lock, and of the files below demo/NAME. Names and tags are those of the manifests. docs/demos.md
says which images cannot be built from Debian packages, and what the exit status of each demo means.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from buildroot import BuildRoot, unpack_over
from containerfile import Image
from contents import ACCOUNTS
from debian import Package, RecipeError, default_cache, fetch, newest, read_lock, write_lock
from elf import check_libraries
from images import FILE_TIME, creation_time
from layout import LayoutWriter, make_layer
from parts import REPOSITORY, Parts

DIRECTORY = Path(__file__).with_name("demo")
ARCHITECTURE = "amd64"
_SHELL = ("coreutils", "dash", "grep", "sed")
_UNWANTED = ("usr/share/man/*", "usr/share/locale/*", "usr/share/info/*", "usr/share/lintian/*", "usr/share/bug/*")


class Demo(NamedTuple):
    """An image: packages with what they depend on, and files of packages whose dependencies it does not need."""

    name: str
    tag: str
    release: str
    packages: tuple[str, ...]
    summary: str
    entrypoint: tuple[str, ...] = ()
    files: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # What Debian's alternatives would link.
    links: tuple[tuple[str, str], ...] = ()


_DPDK = ("librte-bus-pci25", "librte-bus-vdev25", "librte-mempool-ring25")
# Libraries of dpdk-test.
_DPDK_TEST = (
    "acl", "argparse", "bitratestats", "bpf", "cfgfile", "cmdline", "compressdev", "crypto-scheduler", "dispatcher",
    "distributor", "dmadev", "efd", "eventdev", "fib", "graph", "ipsec", "latencystats", "lpm", "member", "metrics",
    "net-bond", "net-null", "net-ring", "pcapng", "pdcp", "pdump", "pipeline", "port", "power", "rawdev", "reorder",
    "rib", "sched", "stack", "table", "timer",
)  # fmt: skip
DEMOS = (
    Demo(
        name="intel-opencl-icd",
        tag="devel",
        release="bookworm",
        packages=(*_SHELL, "clinfo", "intel-opencl-icd"),
        summary="Lists OpenCL devices of Intel GPUs",
        entrypoint=("clinfo",),
    ),
    Demo(
        name="accel-config-demo",
        tag="devel",
        release="trixie",
        packages=(*_SHELL, "accel-config", "accel-config-test", "bash", "findutils", "mawk"),
        summary="Tests of work queues of DSA and IAA",
        links=(("usr/bin/awk", "mawk"),),
    ),
    Demo(
        name="crypto-perf",
        tag="0.31.1",
        release="trixie",
        packages=(*_SHELL, *_DPDK, "librte-common-qat25", "librte-compressdev25", "librte-crypto-scheduler25"),
        summary="DPDK's benchmarks of encryption and compression with QAT",
        entrypoint=("run-dpdk-test",),
        files=(("dpdk-dev", ("usr/bin/dpdk-test-crypto-perf", "usr/bin/dpdk-test-compress-perf")),),
    ),
    Demo(
        name="dsa-dpdk-dmadevtest",
        tag="devel",
        release="trixie",
        packages=(*_SHELL, *_DPDK, *(f"librte-{name}25" for name in _DPDK_TEST), "librte-dma-idxd25"),
        summary="DPDK's tests of DMA devices on work queues of DSA",
        files=(("dpdk-dev", ("usr/bin/dpdk-test",)),),
    ),
    Demo(
        name="openssl-qat-engine",
        tag="devel",
        release="trixie",
        packages=(*_SHELL, "bash", "openssl", "qatengine"),
        summary="OpenSSL with the engine of QAT",
    ),
)


def update(demo: Demo) -> list[Package]:
    """Pins the packages of a demo and everything that they depend on."""
    packages = newest({(demo.release, ARCHITECTURE): demo.packages}, dependencies=True)
    if demo.files:
        packages += newest({(demo.release, ARCHITECTURE): [name for name, _ in demo.files]})
    write_lock(packages, DIRECTORY / f"{demo.name}.lock")
    return packages


def build_root(demo: Demo, root: Path, cache: Path) -> None:
    """Makes the file system of a demo."""
    archives = fetch(read_lock(DIRECTORY / f"{demo.name}.lock").values(), cache)
    for link in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / link).mkdir(parents=True)
        (root / link).symlink_to(f"usr/{link}")
    for directory in ("dev", "etc", "proc", "run", "sys", "tmp", "var"):
        (root / directory).mkdir()
    (root / "var/run").symlink_to("../run")
    (root / "tmp").chmod(0o1777)
    partial = dict(demo.files)
    for name, archive in archives.items():
        if name not in partial:
            unpack_over(archive, root)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            unpack_over(archive, Path(scratch))
            for file in (*partial[name], f"usr/share/doc/{name}/copyright"):
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(scratch) / file, root / file)
    for file, text in ACCOUNTS.items():
        (root / file).write_text(text)
    _delete_unwanted(root)
    if (DIRECTORY / demo.name).is_dir():
        shutil.copytree(DIRECTORY / demo.name, root, dirs_exist_ok=True)
    for link, target in demo.links:
        (root / link).symlink_to(target)
    check_libraries(root, ARCHITECTURE)


def _delete_unwanted(root: Path) -> None:
    """Deletes manual pages, translations, and documentation other than licenses."""
    for file in sorted(root.rglob("*"), reverse=True):
        name = str(file.relative_to(root))
        document = fnmatch(name, "usr/share/doc/*") and file.name != "copyright"
        if file.is_dir() and not file.is_symlink():
            if name.startswith("usr/share/") and not any(file.iterdir()):
                file.rmdir()
        elif document or any(fnmatch(name, pattern) for pattern in _UNWANTED):
            file.unlink()


def build(out: Path, demos: Sequence[Demo], cache: Path) -> None:
    """Writes the layouts."""
    tools = BuildRoot(cache, read_lock())
    for demo in demos:
        labels = {"name": demo.name, "summary": demo.summary, "description": demo.summary, "vendor": "Accelplane"}
        labels |= {"version": demo.tag, "release": "1", "org.opencontainers.image.title": demo.name}
        image = Image(demo.name, demo.entrypoint, labels, parts=(demo.name,))
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            build_root(demo, root := Path(scratch) / demo.name, cache)
            layer = make_layer(root, Path(scratch), FILE_TIME, tools)
            writer = LayoutWriter(out, "docker.io/intel", demo.tag, creation_time(REPOSITORY))
            written = writer.write(image, {ARCHITECTURE: [layer]})
        print(f"{demo.name}:{demo.tag} {written.digest} {layer.size / 1e6:.1f} MB", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "update"))
    parser.add_argument("out", type=Path, nargs="?", default=Path("dist/demo-images"))
    parser.add_argument("--images", default="", help="separated by commas; default: all")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="directory of downloads")
    chosen = parser.parse_args()
    names = [each for each in chosen.images.split(",") if each]
    if unknown := sorted(set(names) - {demo.name for demo in DEMOS}):
        expected = ", ".join(demo.name for demo in DEMOS)
        parser.error(f"--images: found {', '.join(unknown)}, expected some of {expected}")
    demos = [demo for demo in DEMOS if not names or demo.name in names]
    os.umask(0o022)
    try:
        if chosen.command == "update":
            for demo in demos:
                print(f"{demo.name}: {len(update(demo))} packages")
            return 0
        chosen.cache.mkdir(parents=True, exist_ok=True)
        chosen.out.mkdir(parents=True, exist_ok=True)
        # Two builds at once would make the same build root.
        with Parts(REPOSITORY, chosen.cache.resolve(), read_lock()).locked():
            build(chosen.out, demos, chosen.cache.resolve())
    except (RecipeError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
