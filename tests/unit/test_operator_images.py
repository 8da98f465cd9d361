"""Image references: accepted and replaced ones."""

import pytest
from customresources import plugin
from hypothesis import given
from hypothesis import strategies as st

from accelplane.operator import images, versions
from accelplane.operator.settings import PLACEHOLDER, RELEASE, ImagePolicy, overrides

POLICY = ImagePolicy(release="1.2.0", vendor="accelplane")
DIGEST = "sha256:" + "0123456789abcdef" * 4
NAMES = ("intel-gpu-plugin",)


@pytest.mark.parametrize(
    "reference",
    [
        "intel/intel-gpu-plugin:0.31.1",
        f"accelplane/intel-gpu-plugin:{RELEASE}",
        "accelplane/intel-gpu-plugin:devel",
        "intel-gpu-plugin:0.31.1",
        "intel-gpu-plugin:v0.32.0",
        "registry.example/deep/path/intel-gpu-plugin:1.0.0",
        "intel/intel-gpu-plugin:0.32.0-rc.1+build.7",
        f"intel/intel-gpu-plugin@{DIGEST}",
        f"intel-gpu-plugin@{DIGEST}",
        f"foo-intel-gpu-plugin@{DIGEST}",
        # The Go operator rejects these.
        "host:5000/intel/intel-gpu-plugin:0.31.1",
        f"host:5000/intel/intel-gpu-plugin@{DIGEST}",
        f"intel/intel-gpu-plugin:0.31.1@{DIGEST}",
    ],
)
def test_an_image_of_the_plugin_is_accepted(reference: str) -> None:
    assert images.reference_error(reference, NAMES) is None
    assert images.version_error(reference, POLICY) is None


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("intel/intel-gpu-plugin", "field is incorrect: found 'intel/intel-gpu-plugin', expected a tag or a digest"),
        ("", "expected a tag or a digest"),
        ("host:5000/intel-gpu-plugin", "expected a tag or a digest"),
        ("intel/intel-sgx-plugin:0.31.1", "incorrect image name: found 'intel-sgx-plugin'"),
        ("intel/intel-sgx-plugin:0.31.1", "expected <vendor>/intel-gpu-plugin"),
        (f"intel/intel-sgx-plugin@{DIGEST}", "incorrect image name"),
        ("foo-intel-gpu-plugin:0.31.1", "incorrect image name"),
        ("intel/intel-gpu-plugin:latest", "semver tag"),
        ("intel/intel-gpu-plugin:0.31", "semver tag"),
        ("intel/intel-gpu-plugin:0.31.01", "semver tag"),
        ("intel/intel-gpu-plugin:0.31.1.1", "semver tag"),
        ("intel/intel-gpu-plugin:devel2", "semver tag"),
        ("intel/intel-gpu-plugin:", "expected a tag or a digest"),
        ("intel/intel-gpu-plugin@sha256:abc", "'sha256:abc'"),
        (f"intel/intel-gpu-plugin@{DIGEST.upper()}", "valid SHA digest"),
        (f"intel/intel-gpu-plugin@{DIGEST}0", "valid SHA digest"),
        (f"intel/intel-gpu-plugin@{DIGEST}\n", "valid SHA digest"),
        ("intel/intel-gpu-plugin:devel@sha256:abc", "'sha256:abc'"),
    ],
)
def test_another_reference_is_an_error_with_what_was_found_and_expected(reference: str, words: str) -> None:
    assert words in (images.reference_error(reference, NAMES) or "")


@pytest.mark.parametrize("tag", ["0.31.0", "0.31.1-ubi", "v0.30.9", "0.31.1-rc.2+x", "0.9.100"])
def test_a_version_below_the_minimum_is_an_error_with_both_versions(tag: str) -> None:
    error = images.version_error(f"host:5000/intel-gpu-plugin:{tag}", POLICY)
    assert error == (f"version is too low: found {tag} in 'host:5000/intel-gpu-plugin:{tag}', expected 0.31.1 or newer")


# The order that semver.org gives as an example.
ORDERED = (
    "1.0.0-alpha 1.0.0-alpha.1 1.0.0-alpha.beta 1.0.0-beta 1.0.0-beta.2 1.0.0-beta.11 1.0.0-rc.1 1.0.0 1.0.1 1.10.0"
)


def test_versions_have_the_order_of_semver() -> None:
    ordered = ORDERED.split()
    for position, low in enumerate(ordered):
        assert [each for each in ordered if versions.is_below(low, each)] == ordered[position + 1 :]


@pytest.mark.parametrize(("length", "accepted"), [(256, True), (257, False)])
def test_a_version_has_at_most_256_characters(length: int, accepted: bool) -> None:
    assert (versions.parse("1.0.0-".ljust(length, "a")) is not None) == accepted


SHA = {"INTEL_GPU_PLUGIN_SHA": f"docker.example/accelplane/intel-gpu-plugin@{DIGEST}"}
OVERRIDDEN = SHA["INTEL_GPU_PLUGIN_SHA"]


@pytest.mark.parametrize(
    ("reference", "upgraded", "overridden"),
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
        # The Go operator does not parse these.
        ("host:5000/intel-gpu-plugin:0.30.0", "host:5000/intel-gpu-plugin:0.31.1", OVERRIDDEN),
        (f"intel-gpu-plugin:0.30.0@{DIGEST}", f"intel-gpu-plugin:0.30.0@{DIGEST}", OVERRIDDEN),
        # Images of this project follow the release of the operator, as those of the Go project do.
        ("accelplane/intel-gpu-plugin:1.0.0", "accelplane/intel-gpu-plugin:1.2.0", OVERRIDDEN),
        ("accelplane/intel-gpu-plugin:0.1.0", "accelplane/intel-gpu-plugin:1.2.0", OVERRIDDEN),
        ("accelplane/intel-gpu-plugin:1.2.0-rc.1", "accelplane/intel-gpu-plugin:1.2.0", OVERRIDDEN),
        ("accelplane/intel-gpu-plugin:1.2.0", "accelplane/intel-gpu-plugin:1.2.0", OVERRIDDEN),
        ("accelplane/intel-gpu-plugin:1.3.0", "accelplane/intel-gpu-plugin:1.3.0", OVERRIDDEN),
        ("intel/intel-gpu-plugin:1.0.0", "intel/intel-gpu-plugin:1.0.0", OVERRIDDEN),
        ("mirror:5000/all/intel-gpu-plugin:1.0.0", "mirror:5000/all/intel-gpu-plugin:1.2.0", OVERRIDDEN),
    ],
)
def test_a_reference_is_upgraded_or_overridden(reference: str, upgraded: str, overridden: str) -> None:
    assert images.upgrade_reference(reference, POLICY) == upgraded
    assert images.upgrade_reference(reference, ImagePolicy(overrides=SHA)) == overridden
    assert images.upgrade_reference(reference, ImagePolicy(overrides=SHA, upgrade="off")) == reference


@pytest.mark.parametrize(
    ("target", "original", "image"),
    [("", "0.31.1", "1.2.0"), ("0.36.0", "0.36.0", "1.2.0"), ("1.1.0", "0.31.1", "1.1.0")],
)
def test_a_target_concerns_the_images_of_its_own_project(target: str, original: str, image: str) -> None:
    policy = ImagePolicy(release="1.2.0", target=target)
    assert images.upgrade_reference("intel/intel-gpu-plugin:0.30.0", policy) == f"intel/intel-gpu-plugin:{original}"
    assert (
        images.upgrade_reference("accelplane/intel-gpu-plugin:1.0.0", policy) == f"accelplane/intel-gpu-plugin:{image}"
    )


@pytest.mark.parametrize(
    ("settings", "name", "reference"),
    [
        ({}, "intel-gpu-plugin", f"{PLACEHOLDER}/intel-gpu-plugin:{RELEASE}"),
        ({}, "intel-gpu-levelzero", f"{PLACEHOLDER}/intel-gpu-levelzero:{RELEASE}"),
        (
            {"vendor": "docker.io/accelplane"},
            "intel-gpu-initcontainer",
            f"docker.io/accelplane/intel-gpu-initcontainer:{RELEASE}",
        ),
        ({"target": "0.36.0"}, "intel-gpu-plugin", f"{PLACEHOLDER}/intel-gpu-plugin:{RELEASE}"),
        ({"vendor": "intel"}, "intel-gpu-plugin", "intel/intel-gpu-plugin:0.31.1"),
        ({"vendor": "intel", "target": "0.36.0"}, "intel-gpu-plugin", "intel/intel-gpu-plugin:0.36.0"),
        ({"vendor": "mirror.example/a"}, "intel-gpu-plugin", f"mirror.example/a/intel-gpu-plugin:{RELEASE}"),
        ({"vendor": "mirror.example/a"}, "intel-gpu-levelzero", f"mirror.example/a/intel-gpu-levelzero:{RELEASE}"),
        ({"vendor": "mirror.example/intel", "target": "1.0.0"}, "x", "mirror.example/intel/x:1.0.0"),
        ({"overrides": SHA}, "intel-gpu-plugin", OVERRIDDEN),
        ({"overrides": SHA, "upgrade": "off"}, "intel-gpu-plugin", f"{PLACEHOLDER}/intel-gpu-plugin:{RELEASE}"),
    ],
)
def test_an_unset_image_is_the_release_image_or_its_override(
    settings: dict[str, object], name: str, reference: str
) -> None:
    assert ImagePolicy(**settings).reference(name) == reference  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("intel-sgx-plugin", "INTEL_SGX_PLUGIN_SHA"),
        ("intel-qat-initcontainer", "INTEL_QAT_INITCONTAINER_SHA"),
        ("intel-idxd-config-initcontainer", "INTEL_IDXD_CONFIG_INITCONTAINER_SHA"),
    ],
)
def test_the_variable_of_an_image_has_its_name(name: str, variable: str) -> None:
    policy = ImagePolicy(overrides={variable: "x"})
    for reference in (f"intel/{name}:1.0.0", f"a:1/b/{name}@{DIGEST}"):
        assert images.upgrade_reference(reference, policy) == "x"


def test_overrides_are_the_non_empty_variables_with_the_suffix() -> None:
    environment = SHA | {"PATH": "/bin", "INTEL_SGX_PLUGIN_SHA": ""}
    assert overrides(environment) == SHA


RELATED = {
    "RELATED_IMAGE_INTEL_SGX_PLUGIN": f"docker.io/accelplane/intel-sgx-plugin:1.2.0@{DIGEST}",
    "RELATED_IMAGE_INTEL_GPU_PLUGIN": f"mirror:5000/a/intel-gpu-plugin:1.2.0@{DIGEST}",
    # Without a digest, as in a clone, or without a tag.
    "RELATED_IMAGE_INTEL_QAT_PLUGIN": "accelplane/intel-qat-plugin:1.2.0",
    "RELATED_IMAGE_INTEL_DLB_PLUGIN": f"accelplane/intel-dlb-plugin@{DIGEST}",
    "OTHER_INTEL_DSA_PLUGIN": f"accelplane/intel-dsa-plugin:1.2.0@{DIGEST}",
}


@pytest.mark.parametrize(
    ("reference", "pinned"),
    [
        ("accelplane/intel-sgx-plugin:1.2.0", True),
        ("docker.io/accelplane/intel-sgx-plugin:1.2.0", True),
        ("mirror:5000/a/intel-gpu-plugin:1.2.0", True),
        ("mirror:5000/a/intel-gpu-plugin:1.2.1", False),
        ("mirror:5000/a/intel-gpu-plugin", False),
        ("a/intel-gpu-plugin:1.2.0", False),
        (f"accelplane/intel-sgx-plugin:1.2.0@sha256:{'0' * 64}", False),
        ("accelplane/intel-qat-plugin:1.2.0", False),
        ("accelplane/intel-dlb-plugin:1.2.0", False),
        ("accelplane/intel-dsa-plugin:1.2.0", False),
        ("", False),
    ],
)
def test_an_image_of_this_name_and_tag_is_pinned_by_its_variable(reference: str, *, pinned: bool) -> None:
    policy = ImagePolicy(digests=images.digests(RELATED))
    assert images.pin_digest(reference, policy) == (f"{reference}@{DIGEST}" if pinned else reference)


@pytest.mark.parametrize("value", ["a/b:1@sha256:12", "a/b:1@md5:12", f"@{DIGEST}", f"a/b:1@{DIGEST}0"])
def test_a_variable_with_an_invalid_digest_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=r"^RELATED_IMAGE_X: found '.*', expected an image with :TAG@sha256: and 64"):
        images.digests({"RELATED_IMAGE_X": value})


@given(st.text(), st.text())
def test_a_pinned_image_keeps_its_name_and_tag(value: str, reference: str) -> None:
    try:
        digests = images.digests({"RELATED_IMAGE_X": value, "RELATED_IMAGE_Y": f"{reference}@{DIGEST}"})
    except ValueError:
        return
    found = images.pin_digest(reference, ImagePolicy(digests=digests))
    assert found in (reference, f"{reference}@{DIGEST}", *(f"{reference}@{each}" for each in digests.values()))


def test_a_resource_is_upgraded_in_all_its_images() -> None:
    old = plugin("gpu", image="a/intel-gpu-plugin:0.30.0", initImage="b/intel-gpu-initcontainer:0.30.0",
                 levelZeroImage="intel-gpu-levelzero:devel", logLevel=4)  # fmt: skip
    policy = ImagePolicy(overrides=SHA, target="0.36.0")
    new, replaced = images.upgrade(old, policy)
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
    assert images.upgrade(new, policy) == (new, ())


@pytest.mark.parametrize(
    ("spec", "policy", "found"),
    [
        (
            {"image": "intel/intel-dlb-plugin:0.31.1"}, POLICY,
            ("image is intel/intel-dlb-plugin:0.31.1, an image of the Go project; "
            "set image to accelplane/intel-dlb-plugin:1.2.0"),
        ),
        (
            {"image": "accelplane/intel-dlb-plugin:1.2.0", "initImage": "mirror/x/intel-dlb-initimage:0.36.0"}, POLICY,
            ("initImage is mirror/x/intel-dlb-initimage:0.36.0, an image of the Go project; "
            "set initImage to accelplane/intel-dlb-initcontainer:1.2.0"),
        ),
        (
            {"image": f"docker.io/intel/intel-dlb-plugin@{DIGEST}"}, ImagePolicy(vendor="mirror/ours"),
            (f"image is docker.io/intel/intel-dlb-plugin@{DIGEST}, an image of the Go project; "
            f"set image to mirror/ours/intel-dlb-plugin:{RELEASE}"),
        ),
        ({"image": "mirror/intel-dlb-plugin:1.0.0"}, POLICY, ""),
        ({"image": "mirror/intel-dlb-plugin:latest"}, POLICY, ""),
        ({"image": "accelplane/intel-dlb-plugin:devel"}, POLICY, ""),
        ({"image": "accelplane/intel-dlb-plugin:0.1.0"}, POLICY, ""),
        ({"image": f"mine/intel-dlb-plugin@{DIGEST}"}, POLICY, ""),
        ({"image": "intel/intel-dlb-plugin:0.31.1"}, ImagePolicy(vendor="intel"), ""),
        ({"image": "intel/intel-dlb-plugin:0.31.1"}, ImagePolicy(overrides={"INTEL_DLB_PLUGIN_SHA": "x"}), ""),
    ],
)  # fmt: skip
def test_images_of_the_go_project_are_reported_with_the_image_to_use(
    spec: dict[str, str], policy: ImagePolicy, found: str
) -> None:
    assert images.original_images(plugin("dlb", **spec), policy) == found


def test_all_images_of_the_go_project_in_a_resource_are_reported() -> None:
    found = plugin("gpu", image="accelplane/intel-gpu-plugin:1.2.0", levelZeroImage="intel/intel-gpu-levelzero:0.31.1",
                   initImage="intel/intel-gpu-initcontainer:0.31.1")  # fmt: skip
    report = images.original_images(found, POLICY)
    for name in ("initcontainer", "levelzero"):
        assert f"is intel/intel-gpu-{name}:0.31.1, an image of the Go project" in report
        assert f"to accelplane/intel-gpu-{name}:1.2.0" in report


@given(st.text(alphabet="abc:/@-.0123456789sha256 vintelgpuplugin\n", max_size=60) | st.text(max_size=40))
def test_any_text_is_parsed_and_an_upgrade_is_stable(text: str) -> None:
    images.reference_error(text, NAMES)
    images.version_error(text, POLICY)
    once = images.upgrade_reference(text, POLICY)
    assert images.upgrade_reference(once, POLICY) == once
