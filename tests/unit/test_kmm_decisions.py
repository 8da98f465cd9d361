"""The decisions of the test double of Kernel Module Management."""

from itertools import product

import pytest
from cluster.kmm_decisions import (
    DESIRED,
    DEVICE_PLUGIN,
    LOADER,
    Entry,
    Generation,
    KernelMapping,
    LabelChange,
    Modprobe,
    ModuleKey,
    desired_entry,
    image_for,
    kernel_of,
    label_change,
    load_script,
    mapping_for,
    module_keys,
    pod_name,
    unload_script,
    worker_action,
)

KEY = ModuleKey("onload", "a-module")
KERNEL = "5.14.0-284.el9.x86_64"
OLD, NEW = "8.1", "8.2"
COMBINATIONS = list(product(("", NEW), ("", OLD, NEW), ("", OLD, NEW)))


def labels(generation: Generation, desired: str, loader: str, plugin: str) -> dict[str, str]:
    values = {DESIRED: desired, LOADER[generation]: loader, DEVICE_PLUGIN: plugin}
    return {KEY.label(prefix): value for prefix, value in values.items() if value}


# Desired version, loader version, device plugin version; then the label that changes and its value.
TABLE = {
    ("", OLD, OLD): ("plugin", None),
    ("", OLD, ""): ("loader", None),
    (NEW, "", ""): ("loader", NEW),
    (NEW, NEW, ""): ("plugin", NEW),
    (NEW, OLD, OLD): ("plugin", None),
    (NEW, OLD, ""): ("loader", None),
}


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("values", COMBINATIONS)
def test_version_labels_change_in_order(generation: Generation, values: tuple[str, str, str]) -> None:
    desired, loader, plugin = values
    # Without a desired version, every other value is old.
    key = values if desired else ("", OLD if loader else "", OLD if plugin else "")
    change = label_change(labels(generation, *values), KEY, generation, old_module=False)
    names = {"plugin": KEY.label(DEVICE_PLUGIN), "loader": KEY.label(LOADER[generation])}
    expected = TABLE.get(key)
    assert change == (LabelChange(names[expected[0]], expected[1]) if expected else None)


@pytest.mark.parametrize("generation", [1, 2])
def test_the_loader_label_waits_for_the_old_module(generation: Generation) -> None:
    assert label_change(labels(generation, NEW, "", ""), KEY, generation, old_module=True) is None


def test_the_loader_label_stays_while_a_device_plugin_runs() -> None:
    assert label_change(labels(1, "", OLD, ""), KEY, 1, old_module=False, plugin_pod=True) is None


@pytest.mark.parametrize("start", COMBINATIONS)
def test_version_labels_converge(start: tuple[str, str, str]) -> None:
    present = labels(1, *start)
    for _ in range(5):
        change = label_change(present, KEY, 1, old_module=False)
        if change is None:
            break
        present.pop(change.label, None)
        present |= {change.label: change.value} if change.value else {}
    # Combinations that KMM itself does not resolve.
    if start in {("", "", OLD), ("", "", NEW), (NEW, "", OLD), (NEW, "", NEW), (NEW, OLD, NEW), (NEW, NEW, OLD)}:
        assert present == labels(1, *start)
    else:
        assert present == labels(1, *[start[0]] * 3)


def test_an_empty_label_counts_as_missing() -> None:
    assert label_change({KEY.label(DESIRED): ""}, KEY, 1, old_module=False) is None


def test_modules_are_found_by_the_last_two_parts_of_version_labels() -> None:
    found = module_keys({KEY.label(DESIRED): NEW, f"{LOADER[1]}.ns.with.dots": NEW, "kubernetes.io/os": "linux"})
    assert found == {KEY, ModuleKey("with", "dots")}


def test_the_first_mapping_for_the_kernel_is_used() -> None:
    mappings = [
        KernelMapping(literal="5.14.0", container_image="other"),
        KernelMapping(regexp=r"el9", container_image="found"),
        KernelMapping(literal=KERNEL, container_image="later"),
    ]
    assert mapping_for(mappings, KERNEL) == mappings[1]
    assert mapping_for(mappings, "6.1.0") is None


def test_a_plus_after_the_kernel_version_is_ignored() -> None:
    assert kernel_of("6.1.0+") == "6.1.0"


def test_variables_of_the_image_are_replaced() -> None:
    image = image_for("r/${MOD_NAMESPACE}/$MOD_NAME:${KERNEL_FULL_VERSION}-${KERNEL_XYZ}-${KERNEL_X}", KERNEL, KEY)
    assert image == f"r/onload/a-module:{KERNEL}-5.14.0-5"


ENTRY = Entry(
    KERNEL, "image:1", in_tree_modules_to_remove=["sfc"], modprobe=Modprobe("sfc", parameters=["--first-time"])
)
OTHER = Entry(KERNEL, "image:2")
OTHER_KERNEL = Entry("6.1.0", "image:1")


@pytest.mark.parametrize(
    ("spec", "status", "boot", "action"),
    [
        (None, None, "1", None),
        (ENTRY, None, "1", "Load"),
        (ENTRY, ENTRY, "1", None),
        (ENTRY, ENTRY, "2", "Load"),
        (ENTRY, OTHER, "1", "Unload"),
        (ENTRY, OTHER_KERNEL, "1", "Load"),
        (None, ENTRY, "1", "Unload"),
        (None, ENTRY, "2", "Forget"),
    ],
)
def test_worker_pods_load_and_unload(spec: Entry | None, status: Entry | None, boot: str, action: str | None) -> None:
    assert worker_action(spec, status, status_boot="1", boot=boot) == action


def test_the_entry_of_a_node_follows_its_loader_label() -> None:
    assert desired_entry(NEW, NEW, ENTRY, None) == ENTRY
    assert desired_entry(NEW, OLD, ENTRY, OTHER) == OTHER
    assert desired_entry(NEW, "", ENTRY, OTHER) is None
    assert desired_entry("", "", ENTRY, None) == ENTRY


def test_commands_of_pods() -> None:
    assert load_script(ENTRY) == "modprobe -r -d /opt sfc && modprobe -v -d /opt sfc --first-time"
    assert unload_script(ENTRY) == "modprobe -rv -d /opt sfc"


def test_each_node_and_version_has_one_pod_name() -> None:
    names = {pod_name(KEY, node, version) for node in ("a", "b") for version in (OLD, NEW)}
    assert len(names) == 4
