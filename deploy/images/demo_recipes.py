"""Recipes of the images of demo workloads: packages, wheels, and files of vendors. demo_images.py builds them.

Packages are pinned by demo/NAME.lock, wheels by demo/NAME.wheels, and the compilers of a recipe with a build script,
demo/NAME.build, by demo/NAME.build.lock.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

DIRECTORY = Path(__file__).with_name("demo")
_SHELL = ("coreutils", "dash", "grep", "sed")


class Source(NamedTuple):
    """A file that no package registry has, and that the caller must have downloaded: `--source NAME=FILE,sha256:…`."""

    name: str
    file: str
    product: str
    publisher: str


class Demo(NamedTuple):
    """An image: packages with what they depend on, and files of packages whose dependencies it does not need."""

    name: str
    tag: str
    release: str
    packages: tuple[str, ...]
    summary: str
    entrypoint: tuple[str, ...] = ()
    files: tuple[tuple[str, tuple[str, ...]], ...] = ()
    # A newer release and packages of it, whose files replace those of the image's release.
    newer: tuple[str, tuple[str, ...]] = ("", ())
    # What Debian's alternatives would link.
    links: tuple[tuple[str, str], ...] = ()
    sources: tuple[Source, ...] = ()
    # Whether the image is useful without the sources.
    optional: bool = False
    # Packages in an archive of Debian packages, which is the only source.
    archived: tuple[str, ...] = ()
    # Compilers for demo/NAME.build, which compiles the sources.
    compilers: tuple[str, ...] = ()
    # Packages of the Python package index. An image with optional sources has them only together with the sources.
    wheels: tuple[str, ...] = ()
    # Whether the only source is an archive of the whole image.
    whole: bool = False


_DPDK = ("librte-bus-pci25", "librte-bus-vdev25", "librte-mempool-ring25")
# Libraries of dpdk-test.
_DPDK_TEST = (
    "acl", "argparse", "bitratestats", "bpf", "cfgfile", "cmdline", "compressdev", "crypto-scheduler", "dispatcher",
    "distributor", "dmadev", "efd", "eventdev", "fib", "graph", "ipsec", "latencystats", "lpm", "member", "metrics",
    "net-bond", "net-null", "net-ring", "pcapng", "pdcp", "pdump", "pipeline", "port", "power", "rawdev", "reorder",
    "rib", "sched", "stack", "table", "timer",
)  # fmt: skip
_DLB = Source(
    "dlb",
    "dlb_linux_src_release_<release>.txz",
    "Intel Dynamic Load Balancer driver for Linux",
    "https://www.intel.com/content/www/us/en/download/686372/",
)
_DPDK_SOURCE = Source(
    "dpdk",
    "dpdk-<release>.tar.xz of the release that the DLB archive has a patch for",
    "DPDK",
    "https://core.dpdk.org/download/",
)
_SGX = Source(
    "sgx",
    "sgx_debian_local_repo.tgz for Debian 12",
    "Intel SGX for Linux",
    "https://www.intel.com/content/www/us/en/developer/tools/software-guard-extensions/linux-overview.html",
)
_NPU = Source(
    "npu",
    "linux-npu-driver-<release>-ubuntu2404.tar.gz",
    "Intel NPU driver for Linux",
    "https://github.com/intel/linux-npu-driver/releases",
)
_PYTORCH = Source(
    "pytorch",
    "an OCI archive of intel/intel-extension-for-pytorch:2.3.110-xpu",
    "Intel Extension for PyTorch",
    "https://github.com/intel/intel-extension-for-pytorch",
)
_AESMD = (
    "libsgx-ae-id-enclave", "libsgx-ae-pce", "libsgx-ae-qe3", "libsgx-ae-qve", "libsgx-aesm-ecdsa-plugin",
    "libsgx-aesm-pce-plugin", "libsgx-aesm-quote-ex-plugin", "libsgx-dcap-default-qpl", "libsgx-dcap-ql",
    "libsgx-dcap-quote-verify", "libsgx-enclave-common", "libsgx-pce-logic", "libsgx-qe3-logic", "libsgx-urts",
    "sgx-aesm-service",
)  # fmt: skip
_COMPILERS = ("bash", "coreutils", "dash", "diffutils", "findutils", "gcc", "grep", "libc6-dev", "make", "patch", "sed")
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
    Demo(
        name="opae-nlb-demo",
        tag="devel",
        release="bookworm",
        packages=(*_SHELL, "python3"),
        summary="Tests of the native loopback functions NLB0 and NLB3 of FPGAs",
        entrypoint=("test_fpga.sh",),
    ),
    Demo(
        name="sgx-sdk-demo",
        tag="devel",
        release="bookworm",
        packages=(*_SHELL, "python3"),
        summary="Creates, signs, initializes and enters an SGX enclave",
        entrypoint=("/opt/intel/sgx-sample-app/sgx-sample-app",),
    ),
    Demo(
        name="sgx-aesmd-demo",
        tag="devel",
        release="bookworm",
        packages=(*_SHELL, "libcurl4", "libprotobuf32", "libssl3", "zlib1g"),
        summary="The service for architectural enclaves of SGX",
        entrypoint=("run-aesmd",),
        sources=(_SGX,),
        archived=_AESMD,
    ),
    Demo(
        name="intel-npu-demo",
        tag="devel",
        release="trixie",
        packages=(*_SHELL, "libtbb12", "libudev1", "libze1", "ocl-icd-libopencl1", "python3"),
        summary="Queries the firmware of an NPU, and runs a model on it",
        entrypoint=("npu-demo",),
        sources=(_NPU,),
        optional=True,
        archived=("intel-driver-compiler-npu", "intel-level-zero-npu"),
        wheels=("openvino",),
    ),
    Demo(
        name="dlb-libdlb-demo",
        tag="devel",
        release="trixie",
        packages=(*_SHELL, "bash"),
        summary="Sends traffic through DLB with the examples of libdlb",
        entrypoint=("test.sh",),
        sources=(_DLB,),
        compilers=(*_COMPILERS,),
    ),
    Demo(
        name="dlb-dpdk-demo",
        tag="devel",
        release="bookworm",
        packages=(*_SHELL, "bash", "libatomic1", "libnuma1"),
        summary="DPDK's tests of event devices on DLB",
        entrypoint=("test.sh",),
        sources=(_DLB, _DPDK_SOURCE),
        compilers=(*_COMPILERS, "libnuma-dev", "meson", "ninja-build", "pkgconf", "python3", "python3-pyelftools"),
    ),
    Demo(
        name="intel-extension-for-pytorch",
        tag="2.3.110-xpu",
        release="",
        packages=(),
        summary="PyTorch for Intel GPUs",
        sources=(_PYTORCH,),
        whole=True,
    ),
    Demo(
        name="intel-extension-for-tensorflow",
        tag="2.15.0.3-xpu-pip-base",
        release="bookworm",
        packages=(*_SHELL, "python3"),
        summary="TensorFlow for Intel GPUs",
        # Debian 12 and 13 have no driver of Level Zero for GPUs.
        newer=("sid", ("libigc2", "libigdfcl2", "libze-intel-gpu1", "libze1")),
        # The runtime of oneAPI that this version of the extension was built with.
        wheels=("intel-extension-for-tensorflow[xpu]==2.15.0.3", "dpcpp-cpp-rt==2025.1.*", "mkl-dpcpp==2025.1.*"),
    ),
)
