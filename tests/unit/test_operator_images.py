"""Image references: what is taken for a plugin's, and what it becomes."""

import pytest
from customresources import plugin
from hypothesis import given
from hypothesis import strategies as st

from accelplane.operator import images
from accelplane.operator.settings import ImagePolicy, overrides

POLICY = ImagePolicy(minimum="0.31.1")
DIGEST = "sha256:" + "0123456789abcdef" * 4
NAMES = ("intel-gpu-plugin",)


@pytest.mark.parametrize(
    "reference",
    [
        "intel/intel-gpu-plugin:0.31.1",
        "intel-gpu-plugin:0.31.1",
        "intel-gpu-plugin:v0.32.0",
        "registry.example/deep/path/intel-gpu-plugin:1.0.0",
        "intel/intel-gpu-plugin:0.32.0-rc.1+build.7",
        f"intel/intel-gpu-plugin@{DIGEST}",
        f"intel-gpu-plugin@{DIGEST}",
        f"foo-intel-gpu-plugin@{DIGEST}",
        # What Go's operator refuses
        "host:5000/intel/intel-gpu-plugin:0.31.1",
        f"host:5000/intel/intel-gpu-plugin@{DIGEST}",
        f"intel/intel-gpu-plugin:0.31.1@{DIGEST}",
    ],
)
def test_an_image_of_the_plugin_is_taken(reference: str) -> None:
    assert images.refusal(reference, NAMES, POLICY) is None
    assert images.below_minimum(reference, POLICY) is None


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("intel/intel-gpu-plugin", "neither a tag nor a digest"),
        ("", "neither a tag nor a digest"),
        ("host:5000/intel-gpu-plugin", "neither a tag nor a digest"),
        ("intel/intel-sgx-plugin:0.31.1", "incorrect image name: 'intel-sgx-plugin'"),
        ("intel/intel-sgx-plugin:0.31.1", "expected <vendor>/intel-gpu-plugin"),
        (f"intel/intel-sgx-plugin@{DIGEST}", "incorrect image name"),
        ("foo-intel-gpu-plugin:0.31.1", "incorrect image name"),
        ("intel/intel-gpu-plugin:devel", "valid SHA digest"),
        ("intel/intel-gpu-plugin:latest", "semver tag"),
        ("intel/intel-gpu-plugin:0.31", "semver tag"),
        ("intel/intel-gpu-plugin:0.31.01", "semver tag"),
        ("intel/intel-gpu-plugin:0.31.1.1", "semver tag"),
        ("intel/intel-gpu-plugin:", "neither"),
        ("intel/intel-gpu-plugin@sha256:abc", "'sha256:abc'"),
        (f"intel/intel-gpu-plugin@{DIGEST.upper()}", "valid SHA digest"),
        (f"intel/intel-gpu-plugin@{DIGEST}0", "valid SHA digest"),
        (f"intel/intel-gpu-plugin@{DIGEST}\n", "valid SHA digest"),
        (f"intel/intel-gpu-plugin:devel@{DIGEST}", "'devel'"),
    ],
)
def test_another_reference_is_refused_and_told_why(reference: str, said: str) -> None:
    assert said in (images.refusal(reference, NAMES, POLICY) or "")


@pytest.mark.parametrize("tag", ["0.31.0", "0.31.1-ubi", "v0.30.9", "0.31.1-rc.2+x", "0.9.100"])
def test_a_version_below_the_minimum_is_told_with_both(tag: str) -> None:
    said = images.below_minimum(f"host:5000/intel-gpu-plugin:{tag}", POLICY)
    assert said is not None
    assert tag in said
    assert "0.31.1" in said


# The order that semver.org gives as an example.
ORDERED = (
    "1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11 1.0.0-rc.1 1.0.0 1.0.1 1.10.0"
)


def test_versions_are_in_the_order_of_semver() -> None:
    versions = ORDERED.split()
    for position, low in enumerate(versions):
        assert [each for each in versions if images.is_below(low, each)] == versions[position + 1 :]


SHA = {"INTEL_GPU_PLUGIN_SHA": f"docker.example/intel/intel-gpu-plugin@{DIGEST}"}
OVERRIDDEN = SHA["INTEL_GPU_PLUGIN_SHA"]


@pytest.mark.parametrize(
    ("reference", "plain", "overridden"),
    [
        ("intel/intel-gpu-plugin:0.30.0", "intel/intel-gpu-plugin:0.31.1", OVERRIDDEN),
        ("mine/deep/intel-gpu-plugin:0.31.1-ubi", "mine/deep/intel-gpu-plugin:0.31.1", OVERRIDDEN),
        ("intel/intel-gpu-plugin:0.31.1", "intel/intel-gpu-plugin:0.31.1", OVERRIDDEN),
        ("intel/intel-gpu-plugin:0.36.0", "intel/intel-gpu-plugin:0.36.0", OVERRIDDEN),
        ("intel/intel-gpu-plugin:devel", "intel/intel-gpu-plugin:devel", OVERRIDDEN),
        ("intel/intel-gpu-plugin:latest", "intel/intel-gpu-plugin:latest", OVERRIDDEN),
        ("intel/intel-gpu-plugin", "intel/intel-gpu-plugin", "intel/intel-gpu-plugin"),
        (f"intel/intel-gpu-plugin@{DIGEST}", f"intel/intel-gpu-plugin@{DIGEST}", OVERRIDDEN),
        ("other/name:0.1.0", "other/name:0.31.1", "other/name:0.31.1"),
        (":0.1.0", ":0.1.0", ":0.1.0"),
        ("", "", ""),
        # Where Go's operator is lost
        ("host:5000/intel-gpu-plugin:0.30.0", "host:5000/intel-gpu-plugin:0.31.1", OVERRIDDEN),
        (f"intel-gpu-plugin:0.30.0@{DIGEST}", f"intel-gpu-plugin:0.30.0@{DIGEST}", OVERRIDDEN),
    ],
)
def test_a_reference_is_upgraded_or_overridden(reference: str, plain: str, overridden: str) -> None:
    assert images.upgraded(reference, POLICY) == plain
    assert images.upgraded(reference, ImagePolicy(overrides=SHA)) == overridden
    assert images.upgraded(reference, ImagePolicy(overrides=SHA, upgrade="off")) == reference


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("intel/intel-sgx-plugin:1.0.0", "INTEL_SGX_PLUGIN_SHA"),
        ("intel-qat-initcontainer:1.0.0", "INTEL_QAT_INITCONTAINER_SHA"),
        (f"a:1/b/intel-idxd-config-initcontainer@{DIGEST}", "INTEL_IDXD_CONFIG_INITCONTAINER_SHA"),
    ],
)
def test_the_variable_of_an_image_has_its_name(reference: str, name: str) -> None:
    assert images.variable(images.parse(reference)) == name


def test_the_overrides_are_the_variables_that_say_something() -> None:
    environment = SHA | {"PATH": "/bin", "INTEL_SGX_PLUGIN_SHA": ""}
    assert overrides(environment) == SHA


def test_a_resource_is_upgraded_in_all_its_images_and_it_is_told() -> None:
    old = plugin("gpu", image="a/intel-gpu-plugin:0.30.0", initImage="b/intel-gpu-initcontainer:0.30.0",
                 levelZeroImage="intel-gpu-levelzero:devel", logLevel=4)  # fmt: skip
    new, replaced = images.upgrade(old, ImagePolicy(overrides=SHA, target="0.36.0"))
    assert images.named_images(new.spec) == {
        "image": OVERRIDDEN,
        "initImage": "b/intel-gpu-initcontainer:0.36.0",
        "levelZeroImage": "intel-gpu-levelzero:devel",
    }
    assert new.spec.log_level == 4
    assert [(each.field, each.found, each.variable) for each in replaced] == [
        ("image", "a/intel-gpu-plugin:0.30.0", "INTEL_GPU_PLUGIN_SHA"),
        ("initImage", "b/intel-gpu-initcontainer:0.30.0", ""),
    ]
    assert images.upgrade(new, ImagePolicy(overrides=SHA, target="0.36.0")) == (new, ())


@given(st.text(alphabet="abc:/@-.0123456789sha256 vintelgpuplugin\n", max_size=60) | st.text(max_size=40))
def test_no_text_is_too_odd_to_be_judged(text: str) -> None:
    images.refusal(text, NAMES, POLICY)
    images.below_minimum(text, POLICY)
    once = images.upgraded(text, POLICY)
    assert images.upgraded(once, POLICY) == once
