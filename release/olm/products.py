"""The operators that have bundles, and what their kustomizations do not say."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from release.errors import ReleaseError
from release.kustomize import Object, load_yaml, render

_BASES = Path(__file__).parent


class Product(msgspec.Struct, frozen=True, kw_only=True):
    """An operator.

    `tree` is its kustomization, `samples` the ones with example resources and other objects for the bundle.
    `image` is the operator's image. `operands` are the environment variables of the operator with images that it runs;
    the values are names of images. `skips` are versions of the replaced operator, which OLM updates to this one.
    """

    package: str
    tree: str
    samples: str
    image: str
    operands: Mapping[str, str]
    channels: tuple[str, ...]
    suggested_namespace: str
    skip_range: str = ""
    skips: tuple[str, ...] = ()
    required_packages: Mapping[str, str] = {}

    def base(self) -> Object:
        """The texts of the ClusterServiceVersion."""
        return load_yaml((_BASES / f"{self.package}.yaml").read_text())


# Each variable <IMAGE>_SHA of the operator replaces all images of that name (docs/operator.md).
PLUGIN_IMAGES = (
    *(f"intel-{kind}-plugin" for kind in ("dlb", "dsa", "fpga", "generic", "gpu", "iaa", "npu", "qat", "sgx")),
    *("intel-dlb-initcontainer", "intel-fpga-initcontainer", "intel-gpu-initcontainer", "intel-gpu-levelzero"),
    *("intel-idxd-config-initcontainer", "intel-qat-initcontainer", "intel-sgx-initcontainer"),
)

DEVICE_PLUGINS = Product(
    package="intel-device-plugins-operator",
    # With certificates from outside, as OLM provides them; the objects of cert-manager are left out.
    tree="operator/overlays/default-with-certmanager/installation",
    samples="operator/samples",
    image="intel-deviceplugin-operator",
    operands={f"{name.upper().replace('-', '_')}_SHA": name for name in PLUGIN_IMAGES},
    channels=("stable", "alpha"),
    suggested_namespace="inteldeviceplugins-system",
    # OLM updates the operator of the Go project, whose versions are below 1.0.0, and all older versions of this one.
    skip_range=">=0.31.0 <{version}",
)

ONLOAD = Product(
    package="onload-operator",
    tree="onload/config/default",
    samples="onload/config/samples/onload/overlays/in-cluster-build-ocp",
    image="onload-operator",
    operands={"DEVICE_PLUGIN_IMG": "onload-device-plugin"},
    channels=("alpha",),
    suggested_namespace="onload-operator-system",
    skip_range="<{version}",
    # The versions of the replaced operator are above 1.0.0, so that no range can name them.
    skips=("onload-operator.v3.0.0", "onload-operator.v3.0.1"),
    required_packages={"kernel-module-management": ">=1.1.0 <3.0.0"},
)

PRODUCTS = {product.package: product for product in (DEVICE_PLUGINS, ONLOAD)}


class Sources(msgspec.Struct, frozen=True):
    """The rendered objects of a product: of its installation, and its examples."""

    objects: tuple[Object, ...]
    samples: tuple[Object, ...]

    def of_kind(self, *kinds: str) -> list[Object]:
        """The objects of these kinds in the installation."""
        return [each for each in self.objects if each["kind"] in kinds]

    def everything(self, kind: str) -> list[Object]:
        """The objects of a kind in the installation and in the examples."""
        return [each for each in (*self.objects, *self.samples) if each["kind"] == kind]

    def one(self, kind: str) -> Object:
        """The only object of a kind. Raises `ReleaseError` if there are others."""
        found = self.of_kind(kind)
        if len(found) != 1:
            raise ReleaseError(f"found {len(found)} objects of kind {kind}, expected one")
        return found[0]


def read(product: Product, deploy: Path) -> Sources:
    """Renders the kustomizations of a product."""
    return Sources(tuple(render(deploy / product.tree)), tuple(render(deploy / product.samples)))
