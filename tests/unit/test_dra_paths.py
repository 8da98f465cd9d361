"""The paths of a driver's sockets, and which names are accepted."""

import re

import pytest

from accelplane.dra.driversocket import driver_paths
from accelplane.kubelet.sockets import SocketPathError

UID = "3f0c2e0e-93a2-4f2f-a1c5-0d1f7a4c2b11"
ROOT = "/var/lib/kubelet"


@pytest.mark.parametrize(
    ("instance", "registration", "service"),
    [
        ("", "gpu.intel.com-reg.sock", "dra.sock"),
        (UID, f"gpu.intel.com-{UID}-reg.sock", f"dra-{UID}.sock"),
    ],
)
def test_sockets_are_named_by_driver_and_instance(instance: str, registration: str, service: str) -> None:
    paths = driver_paths("gpu.intel.com", ROOT, instance)
    assert paths.registration == f"{ROOT}/plugins_registry/{registration}"
    assert paths.service == f"{ROOT}/plugins/gpu.intel.com/{service}"


@pytest.mark.parametrize(("length", "prefix"), [(37, "gpu.intel.com-"), (50, "dra-")])
def test_long_paths_have_a_hash_of_driver_and_instance(length: int, prefix: str) -> None:
    root = "/var/lib/" + "k" * length
    paths = driver_paths("gpu.intel.com", root, UID)
    assert re.fullmatch(rf"{root}/plugins_registry/{prefix}[0-9a-f]{{16}}-reg\.sock", paths.registration)
    assert max(len(paths.registration), len(paths.service)) <= 107
    others = [driver_paths("npu.intel.com", root, UID), driver_paths("gpu.intel.com", root, UID[::-1])]
    assert paths.registration not in {other.registration for other in others}


@pytest.mark.parametrize("instance", ["", UID])
def test_a_path_that_is_too_long_names_the_option(instance: str) -> None:
    with pytest.raises(SocketPathError, match="at most 107 are possible; use a shorter --kubelet-dir"):
        driver_paths("gpu.intel.com", "/var/lib/" + "k" * 80, instance)


@pytest.mark.parametrize("character", "%?#")
def test_characters_of_urls_are_rejected(character: str) -> None:
    with pytest.raises(SocketPathError, match=f"found '\\{character}', which the kubelet does not accept"):
        driver_paths("gpu.intel.com", f"/var/lib/kubelet{character}", "")


def test_a_relative_directory_becomes_absolute() -> None:
    assert driver_paths("gpu.intel.com", "kubelet", "").service.startswith("/")
