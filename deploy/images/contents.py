"""What the images contain: files of Debian packages, accounts, directories and links.

`*` in patterns matches across directories. Patterns are of the files of packages, which are unpacked and not installed.
"""

from __future__ import annotations

import fpga_host
from buildroot import PYTHON, build_packages
from debian import RELEASE

STDLIB = f"usr/lib/{PYTHON}"
PACKAGES = f"usr/local/lib/{PYTHON}/dist-packages"

# The files of each Debian package in the base.
DEBIAN = {
    "base-files": ("usr/lib/os-release", "usr/share/common-licenses/*"),
    "libc6": ("lib/*/ld-linux*", *(f"lib/*/lib{name}.so.*" for name in
              ("c", "dl", "m", "pthread", "resolv", "rt", "util"))),
    # The license of the two libraries that follow it.
    "gcc-12-base": (),
    # glibc loads it when a thread is ended from outside, and aborts if it cannot.
    "libgcc-s1": ("lib/*/libgcc_s.so.*",),
    # For protobuf's own library.
    "libstdc++6": ("usr/lib/*/libstdc++.so.*",),
    "libexpat1": ("lib/*/libexpat.so.*",),
    "libffi8": ("usr/lib/*/libffi.so.*",),
    "libssl3": ("usr/lib/*/libssl.so.*", "usr/lib/*/libcrypto.so.*"),
    "zlib1g": ("lib/*/libz.so.*",),
    f"lib{PYTHON}-minimal": (f"{STDLIB}/*",),
    f"lib{PYTHON}-stdlib": (f"{STDLIB}/*",),
    f"{PYTHON}-minimal": (f"usr/bin/{PYTHON}",),
}  # fmt: skip

# The path of the dynamic loader, which every program names.
LOADERS = {"amd64": "lib64/*", "arm64": "lib/ld-linux-aarch64.so.1"}

# The hooks in the DaemonSet of the Go operator for Onload.
SHELL = {"dash": ("bin/dash",)}

# The Level-Zero loader is that of Debian 13, because that of Debian 12 lacks zesInit. It comes with the C library of
# Debian 13, on which programs for Debian 12 run as well. Debian 13 has no Level-Zero driver: it is that of the release
# after it, with the C++ library that it is compiled for. The license of the libraries of GCC is in the base.
LEVELZERO = {
    "trixie": {
        "libc6": ("usr/lib64/*", "usr/lib/*/ld-linux*", *(f"usr/lib/*/lib{name}.so.*" for name in
                  ("c", "dl", "m", "pthread", "resolv", "rt", "util"))),
        "libze1": ("usr/lib/*/libze_loader.so.*",),
    },
    "forky": {
        "libgcc-s1": ("usr/lib/*/libgcc_s.so.*",),
        "libigdgmm12": ("usr/lib/*/libigdgmm.so.*",),
        "libstdc++6": ("usr/lib/*/libstdc++.so.*",),
        "libze-intel-gpu1": ("usr/lib/*/libze_intel_gpu.so.*",),
    },
}  # fmt: skip
LEVELZERO_ARCHITECTURES = ("amd64",)
ZE_LOADER = "libze_loader.so.1"

# An emulator of the other architecture, and the headers of the Level-Zero loader.
FOR_TESTS = {"bookworm": ("qemu-user-static",), "trixie": ("libze-dev",)}

# Files of Python's library that images do not need: other front ends, compilers, tests, databases, East Asian codecs.
UNWANTED = tuple(
    f"{STDLIB}/{pattern}"
    for pattern in (
        "__phello__*", "_sysconfigdata*", "antigravity.py", "config-*", "curses/*", "dbm/*", "distutils/*",
        "doctest.py", "ensurepip/*", "idlelib/*", "lib2to3/*", "pydoc.py", "pydoc_data/*", "sitecustomize.py",
        "sqlite3/*", "test/*", "this.py", "tkinter/*", "turtle.py", "turtledemo/*", "unittest/*", "venv/*",
        *(f"encodings/{name}*.py" for name in
          ("big5", "cp932", "cp949", "cp950", "euc_", "gb", "hz", "iso2022", "johab", "shift_jis")),
        *(f"lib-dynload/{name}.*" for name in
          ("_bz2", "_codecs_*", "_crypt", "_ctypes_test", "_curses*", "_dbm", "_lzma", "_multibytecodec",
           "_sqlite3", "_test*", "_uuid", "_xx*", "audioop", "nis", "ossaudiodev", "readline", "xx*")),
    )
)  # fmt: skip

ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/:/sbin/nologin\nnonroot:x:65532:65532:nonroot:/:/sbin/nologin\n",
    "etc/group": "root:x:0:\nnonroot:x:65532:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}

# Where users' manifests and scripts look for a command besides /usr/local/bin.
ALSO_IN = {
    "intel-gpu-nfdhook": "usr/local/bin/gpu-sw",
    "intel-sgx-epchook": "usr/local/bin/sgx-sw",
    "onload-device-plugin": "usr/bin",
    "onload-worker": "usr/bin",
}

# What init containers find around them: the working directories, into which manifests mount `conf` and `scratch`, with
# the profiles that are taken where there is no configuration.
INIT_DIRECTORIES = ("qat-init/conf", "idxd-init/conf", "idxd-init/scratch")
PROFILES = {"idxd-init": ("dsa.conf", "iaa.conf")}

# Not in any image: the emulated kernel, what is for tests only, and the extra `simulate`.
EMULATED_KERNEL = "accelplane/simulate/kernel"
LEFT_OUT = (EMULATED_KERNEL, "accelplane/kube/testing", "accelplane/testing")
SIMULATE = ("grpc", "rich", EMULATED_KERNEL.replace("/", "."))
OPERATOR = ("cryptography", "prometheus_client")


def wanted_packages(*architectures: str) -> dict[tuple[str, str], set[str]]:
    """All packages that images, build roots and tests of these architectures need, by release and architecture."""
    found: dict[tuple[str, str], set[str]] = {}
    for architecture in architectures:
        names = {*DEBIAN, *SHELL, *fpga_host.DEBIAN, *build_packages(architecture)}
        found[RELEASE, architecture] = names | set(FOR_TESTS[RELEASE])
        if architecture in LEVELZERO_ARCHITECTURES:
            for release, packages in LEVELZERO.items():
                found[release, architecture] = {*packages, *FOR_TESTS.get(release, ())}
    return found
