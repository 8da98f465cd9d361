"""Slices of any units and of any text in sysfs pass the rules of the API server."""

import tempfile
from pathlib import Path
from typing import Any

import memorydirectory
from drapools import STANDARD, offers
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import link, write

from accelplane.devices import Unit, Version
from accelplane.dra import catalog
from accelplane.dra.families.devices import FAMILIES
from accelplane.dra.families.facts import with_facts
from accelplane.dra.model import Features, Offer
from accelplane.dra.slices import Target, plan
from accelplane.dra.validation import problems
from accelplane.host import Host

NODE, OTHER = "node-1", "tpu.example.com"
ALL = Features(taints=True, counters=True, consumable=True)

TEXT = st.text(max_size=80)
ATTRIBUTE_NAMES = st.one_of(
    TEXT, st.sampled_from(["tiles", "model", "numaNode", "services", f"{STANDARD}numaNode", "a/b"])
)
VALUES = st.one_of(
    st.just("0x56c0"), TEXT, st.integers(), st.booleans(), st.builds(Version, TEXT), st.just(Version("1.0.0"))
)
UNITS = st.builds(
    Unit,
    id=st.one_of(
        TEXT,
        st.text("ab0:.-", min_size=40, max_size=70),
        st.sampled_from(["0000:03:00.0", "0000:6a:01.0-wq1", "sgx-enclave", "a.b", "a:b"]),
    ),
    parent=st.one_of(st.just(""), TEXT),
    health=TEXT,
    ids=st.dictionaries(TEXT, st.lists(TEXT, max_size=2), max_size=2),
    attributes=st.dictionaries(ATTRIBUTE_NAMES, VALUES, max_size=40),
    capacities=st.dictionaries(ATTRIBUTE_NAMES, st.integers(), max_size=10),
)
STATES = ["healthy", "degraded", "unhealthy", "recovering", "unbound", "gone", "cleanup"]
OFFERS = st.builds(
    Offer,
    unit=UNITS,
    owner=st.just("dra"),
    state=st.sampled_from(STATES),
    reason=TEXT,
    text=TEXT,
    shares=st.one_of(st.just(1), st.integers(1, 200)),
)
FEATURES = st.builds(Features, *[st.sampled_from([True, False, None])] * 3)


@given(
    driver=st.sampled_from([*FAMILIES, OTHER]),
    given_offers=st.lists(OFFERS, max_size=12),
    features=FEATURES,
    evict=st.sampled_from(["gone", "sick", "never"]),
    layout=st.sampled_from(["together", "separate"]),
)
@settings(max_examples=40, deadline=None)
def test_slices_of_any_units_pass_the_validation(
    driver: str, given_offers: list[Offer], features: Features, evict: Any, layout: Any
) -> None:
    given = offers(*given_offers)
    found = catalog.pool(driver, NODE, given, features, held=set(given), evict=evict)
    planned = plan(found, {}, Target(node=NODE, layout=layout))
    assert [str(each) for one in planned.creates for each in problems(one, layout)] == []
    assert {device.name for device in found.devices} <= set(catalog.device_names(driver, given))
    assert all(len(each.message.encode()) <= 1024 for each in catalog.health(driver, given))


SYSFS = st.one_of(st.binary(max_size=100), st.integers().map(lambda number: str(number).encode()), st.just(b"0x10\n"))


@given(texts=st.lists(SYSFS, min_size=8, max_size=8))
@settings(max_examples=40, deadline=None)
def test_slices_of_any_sysfs_text_pass_the_validation(texts: list[bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as path:
        root = Path(path)
        function = root / "sys/bus/pci/devices/0000:03:00.0"
        files = [
            "sriov_totalvfs",
            "tile0/physical_vram_size_bytes",
            "drm/card0/lmem_total_bytes",
            "qat/cfg_services",
            "qat/heartbeat",
        ]
        for name, text in zip(files, texts, strict=False):
            write(function / name, text)
        (function / "drm/card0/gt/gt0").mkdir(parents=True)
        link(function / "iommu_group", root / f"groups/{len(texts[5])}")
        queue = root / "sys/bus/dsa/devices/wq0.1"
        for name, text in zip(["name", "size", "priority"], texts[5:], strict=True):
            write(queue / name, text)
        host = Host(root)
        for driver, health in (("gpu.intel.com", "card0"), ("qat.intel.com", ""), ("dsa.intel.com", "wq0.1")):
            unit = Unit(id="0000:03:00.0", health=health, attributes={"pciAddress": "0000:03:00.0"})
            one_offer = offers(Offer(unit=with_facts(host, driver, unit), owner="dra"))
            found = catalog.pool(driver, NODE, one_offer, ALL, held=(), evict="gone")
            planned = plan(found, {}, Target(node=NODE))
            assert [str(each) for one in planned.creates for each in problems(one, "separate")] == []
