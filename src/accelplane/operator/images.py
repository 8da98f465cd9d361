"""Image references: parsing, validation, upgrade.

    reference_error(reference, names)        why a reference is not an image of these names; None when it is
    version_error(reference, policy)         why its version is too low; None when it is not
    digests(environment)                     the digests of the variables RELATED_IMAGE_…, by name and tag
    pin_digest(reference, policy)            the reference with its digest, if one is known for its name and tag
    upgrade_reference(reference, policy)     the reference to run instead, which is often the same
    upgrade(plugin, policy)                  a custom resource with all its images upgraded, and the replacements
    original_images(plugin, policy)          its images of the Go project, with those to use instead

References are parsed as registries do: the port of a host is no tag, and a digest may follow a tag. An image with tag
and digest is validated by its tag and never upgraded. The Go operator takes the first colon as that of the tag. All
references that it accepts are accepted here, including a digest after a name that only ends in the expected one.
"""

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from accelplane.operator import versions
from accelplane.operator.models import DevicePlugin, GpuSpec, InitSpec, PluginSpec
from accelplane.operator.settings import ORIGINAL_VENDOR, VENDOR, ImagePolicy, variable_of

Plugin = TypeVar("Plugin", bound=DevicePlugin)

DEVEL = "devel"
RELATED_IMAGE = "RELATED_IMAGE_"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
# The registry of references without a host.
_DEFAULT_HOST = "docker.io/"


class Reference(msgspec.Struct, frozen=True):
    """`name` is everything before tag and digest: host, port, path and image name."""

    name: str
    tag: str = ""
    digest: str = ""

    @property
    def image(self) -> str:
        """The name without host, port and path."""
        return self.name.rpartition("/")[2]

    @property
    def repository(self) -> str:
        """Host, port and path."""
        return self.name.rpartition("/")[0]

    @property
    def original(self) -> bool:
        """Whether it is an image of the Go project: by its vendor or, under other vendors, by its version."""
        vendor = self.repository.rpartition("/")[2]
        return vendor == ORIGINAL_VENDOR or (vendor != VENDOR and versions.is_original(self.tag))


class Replacement(msgspec.Struct, frozen=True):
    """An image of a spec that was replaced. `variable` is the environment variable that overrides it, if any."""

    field: str
    found: str
    used: str
    variable: str = ""


def parse(text: str) -> Reference:
    """The parts of a reference, which are not validated."""
    rest, _, digest = text.partition("@")
    head, slash, last = rest.rpartition("/")
    name, _, tag = last.partition(":")
    return Reference(head + slash + name, tag, digest)


def reference_error(reference: str, names: Sequence[str]) -> str | None:
    """Why the reference is not an image of these names, to be read after the name of its field; None when it is."""
    if any(re.search(rf"{re.escape(name)}@sha256:[0-9a-f]{{64}}\Z", reference, re.ASCII) for name in names):
        return None
    parsed = parse(reference)
    if not parsed.tag and not parsed.digest:
        return f"field is incorrect: found {reference!a}, expected a tag or a digest"
    if parsed.image not in names:
        expected = " or ".join(f"<vendor>/{name}" for name in names)
        return f"has an incorrect image name: found {parsed.image!a} in {reference!a}, expected {expected}"
    malformed = parsed.digest and not _DIGEST.fullmatch(parsed.digest)
    if malformed or (parsed.tag != DEVEL and versions.parse(parsed.tag) is None):
        found = parsed.digest if malformed else parsed.tag
        return f"field is incorrect: found {found!a} in {reference!a}, expected a valid SHA digest or semver tag"
    return None


def version_error(reference: str, policy: ImagePolicy) -> str | None:
    """Why the version of the reference is too low, to be read after the name of its field; None when it is not."""
    tag = parse(reference).tag
    if not versions.is_below(tag, policy.minimum):
        return None
    return f"version is too low: found {tag} in {reference!a}, expected {policy.minimum} or newer"


def digests(environment: Mapping[str, str]) -> dict[str, str]:
    """The digests of the variables RELATED_IMAGE_…, by name and tag. Raises `ValueError` naming the wrong variable.

    A variable without a tag or without a digest pins nothing.
    """
    found: dict[str, str] = {}
    for variable, value in environment.items():
        parsed = parse(value)
        if not variable.startswith(RELATED_IMAGE) or not parsed.digest:
            continue
        if not parsed.image or not _DIGEST.fullmatch(parsed.digest):
            raise ValueError(f"{variable}: found {value[:300]!a}, expected an image with :TAG@sha256: and 64 digits")
        if parsed.tag:
            found[_key(parsed)] = parsed.digest
    return found


def pin_digest(reference: str, policy: ImagePolicy) -> str:
    """The reference with its digest, if one is known for its name and tag. The tag stays."""
    parsed = parse(reference)
    digest = "" if parsed.digest else policy.digests.get(_key(parsed), "")
    return f"{reference}@{digest}" if digest else reference


def _key(reference: Reference) -> str:
    return f"{reference.name.removeprefix(_DEFAULT_HOST)}:{reference.tag}"


def upgrade_reference(reference: str, policy: ImagePolicy) -> str:
    """The reference to run instead of the given one: an override, a newer version, or itself."""
    parsed = parse(reference)
    if policy.upgrade == "off" or not parsed.image or not (parsed.tag or parsed.digest):
        return reference
    if override := policy.override(parsed.image):
        return override
    desired = policy.version(original=parsed.original)
    lowest = policy.minimum if parsed.original else desired
    if not parsed.digest and versions.is_below(parsed.tag, lowest):
        return f"{parsed.name}:{desired}"
    return reference


def upgrade(plugin: Plugin, policy: ImagePolicy) -> tuple[Plugin, tuple[Replacement, ...]]:
    """The custom resource with the images to run in its spec, and the images that were replaced."""
    replaced: list[Replacement] = []
    for field, reference in named_images(plugin.spec).items():
        used = upgrade_reference(reference, policy)
        if used != reference:
            name = parse(reference).image
            replaced.append(Replacement(field, reference, used, variable_of(name) if policy.override(name) else ""))
    if not replaced:
        return plugin, ()
    spec = msgspec.structs.replace(plugin.spec, **{_ATTRIBUTES[each.field]: each.used for each in replaced})
    return msgspec.structs.replace(plugin, spec=spec), tuple(replaced)


def original_images(plugin: DevicePlugin, policy: ImagePolicy) -> str:
    """The images of the Go project in a custom resource that this project publishes as well, with those to use instead.

    Overridden images are left out: the fields of the resource have no effect on them.
    """
    found: list[str] = []
    for field, reference in named_images(plugin.spec).items():
        parsed = parse(reference)
        recommended = policy.default_reference(parsed.image.replace("-initimage", "-initcontainer"))
        if parsed.original and not policy.override(parsed.image) and not parse(recommended).original:
            found.append(f"{field} is {reference}, an image of the Go project; set {field} to {recommended}")
    return "; ".join(found)


def named_images(spec: PluginSpec) -> dict[str, str]:
    """The images that a spec names, by field."""
    images = {"image": spec.image}
    if isinstance(spec, InitSpec):
        images["initImage"] = spec.init_image
    if isinstance(spec, GpuSpec):
        images["levelZeroImage"] = spec.level_zero_image
    return {field: reference for field, reference in images.items() if reference}


_ATTRIBUTES = {"image": "image", "initImage": "init_image", "levelZeroImage": "level_zero_image"}
