"""Templates of DSA and IAA devices: parsing, errors with lines, and priority of files."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.provision.config import ConfigError, ConfigFile
from accelplane.provision.idxd import read_config
from accelplane.provision.idxd.attributes import DEVICE, Part
from accelplane.provision.idxd.jsonc import Value, parse
from accelplane.provision.idxd.template import Template, read_template

QUEUE = '"type": "user", "mode": "dedicated", "size": 16, "name": "appX0"'
ENGINE = '{"dev": "engineX.0"}'


def template(text: str, device_type: str = "dsa") -> Template:
    return read_template(ConfigFile("dsa.conf", text), device_type)


def one_group(queue: str = "", *, device: str = "", group: str = "", engine: str = ENGINE) -> str:
    """A template with one queue, on line 3, and one engine, on line 4."""
    return f"""[{{"dev": "dsaX", {device} "groups": [
        {{"dev": "groupX.0", {group} "grouped_workqueues": [
        {{"dev": "wqX.0", {QUEUE}, {queue}}}],
        "grouped_engines": [{engine}]}}]}}]"""


def template_error(text: str, device_type: str = "dsa") -> tuple[int, str]:
    """The line and the message of the error."""
    with pytest.raises(ConfigError) as caught:
        template(text, device_type)
    assert caught.value.file == "dsa.conf"
    return caught.value.line, str(caught.value)


def line_of_refusal(text: str, device_type: str = "dsa") -> int | None:
    """The line of the error, None if the template is valid."""
    try:
        template(text, device_type)
    except ConfigError as error:
        return error.line
    return None


def queue(text: str, number: int = 0) -> dict[str, str]:
    """The attributes of the first queue for the device of that number."""
    setup = template(text).setup(number)
    assert setup is not None
    return dict(setup.attributes[Part("wq", 0)])


def plain(value: Value) -> object:
    """A value without lines."""
    if isinstance(value.plain, list):
        return [plain(one) for one in value.plain]
    if isinstance(value.plain, dict):
        return {name: plain(one) for name, one in value.plain.items()}
    return value.plain


# ── the built-in profiles ──


def test_the_built_in_profile_of_dsa_has_four_dedicated_queues_for_user_space() -> None:
    file, setup = read_config("/nonexistent", {}).setup(10)
    assert file.endswith("/profiles/dsa.conf")
    assert setup is not None
    assert setup.attributes[DEVICE] == {"read_buffer_limit": "0"}
    for number in range(4):
        assert setup.attributes[Part("group", number)] == {
            "read_buffers_reserved": "0",
            "use_read_buffer_limit": "0",
            "read_buffers_allowed": "8",
        }
        assert setup.attributes[Part("wq", number)] == {
            "mode": "dedicated",
            "size": "16",
            "group_id": str(number),
            "priority": "10",
            "block_on_fault": "1",
            "type": "user",
            "name": f"dpdk_10{number}",
            "driver_name": "user",
            "threshold": "15",
        }
        assert setup.attributes[Part("engine", number)] == {"group_id": str(number)}
    assert len(setup.attributes) == 13


def test_the_built_in_profile_of_iaa_has_four_dedicated_queues_for_user_space() -> None:
    _file, setup = read_config("/nonexistent", {"DEVICE_TYPE": "iaa"}).setup(3)
    assert setup is not None
    assert setup.attributes[DEVICE] == {}
    for number in range(4):
        assert setup.attributes[Part("group", number)] == {}
        assert setup.attributes[Part("wq", number)] == {
            "type": "user",
            "mode": "dedicated",
            "size": "16",
            "group_id": str(number),
            "priority": "10",
            "max_transfer_size": "4194304",
            "driver_name": "user",
            "name": f"iax3{number}",
        }
    assert len(setup.attributes) == 13


# ── Valid templates ──


@pytest.mark.parametrize(
    ("name", "means"),
    [
        ("appX0", "app120"),
        ("dpdk_X0", "dpdk_120"),
        ("iaxXi", "iax12i"),
        ("X", "12"),
        ("X-X", "12-12"),
        ("XX", "1212"),
        ("MAX", "MAX"),
        ("XTS queue X", "XTS queue 12"),
        ("text", "text"),
    ],
)
def test_an_x_in_a_name_is_replaced_by_the_device_number(name: str, means: str) -> None:
    assert queue(one_group(f'"name": "{name}"'), 12)["name"] == means


def test_an_x_anywhere_else_stays() -> None:
    setup = queue(one_group('"driver_name": "MyX_driver"'), 12)
    assert setup["driver_name"] == "MyX_driver"


def test_trailing_commas_and_comments_are_accepted_outside_strings() -> None:
    text = one_group('"name": "a,] // /*,}",').replace("[{", "/* all\n of it */ [ // devices\n # and groups\n{")
    assert queue(text)["name"] == "a,] // /*,}"


def test_dev_may_be_any_member() -> None:
    assert (
        queue(one_group().replace('"dev": "wqX.0", ', "").replace('"size"', '"dev": "wqX.0", "size"'))["size"] == "16"
    )


def test_older_names_of_attributes_mean_the_newer_ones() -> None:
    setup = template(
        one_group(device='"token_limit": 5,', group='"tokens_reserved": 1, "tokens_allowed": 9, "use_token_limit": 1,')
    ).setup(0)
    assert setup is not None
    assert setup.attributes[DEVICE] == {"read_buffer_limit": "5"}
    assert setup.attributes[Part("group", 0)] == {
        "read_buffers_reserved": "1",
        "read_buffers_allowed": "9",
        "use_read_buffer_limit": "1",
    }


def test_quoted_numbers_and_booleans_are_numbers() -> None:
    setup = queue(one_group('"priority": "7", "block_on_fault": true'))
    assert (setup["priority"], setup["block_on_fault"]) == ("7", "1")


@pytest.mark.parametrize(("kind", "driver"), [("user", "user"), ("kernel", "dmaengine")])
def test_a_queue_without_driver_name_gets_the_driver_of_its_type(kind: str, driver: str) -> None:
    setup = template(one_group(f'"type": "{kind}"')).setup(0)
    assert setup is not None
    assert setup.queues == {Part("wq", 0): driver}
    assert setup.attributes[Part("wq", 0)]["driver_name"] == driver


def test_a_queue_belongs_to_its_enclosing_group_by_default() -> None:
    assert queue(one_group())["group_id"] == "0"
    assert queue(one_group('"group_id": 3'))["group_id"] == "3"


def test_the_threshold_of_a_dedicated_queue_is_ignored() -> None:
    assert queue(one_group('"threshold": 99'))["threshold"] == "99"


def test_a_template_may_name_its_devices() -> None:
    both = template(one_group().replace("X", "2")[:-1] + "," + one_group('"size": 8').replace("X", "12")[1:])
    assert both.setup(0) is None
    assert [both.setup(number).attributes[Part("wq", 0)]["size"] for number in (2, 12)] == ["16", "8"]  # type: ignore[union-attr] # fails the test as well


def test_unknown_keys_are_ignored_and_reported_once() -> None:
    found = template(one_group('"colour": "red", "shape": 1', device='"colour": [{}],', engine='{"dev":"engineX.0"}'))
    assert found.notes == [
        "dsa.conf: 'colour' of a device is unknown and ignored",
        "dsa.conf: 'colour' of a wq is unknown and ignored",
        "dsa.conf: 'shape' of a wq is unknown and ignored",
    ]


def test_devices_of_the_other_type_are_ignored_and_reported() -> None:
    found = template(one_group().replace("dsa", "iax"))
    assert found.setup(0) is None
    assert found.notes == ["dsa.conf: iaxX ignored, the devices here are dsa*"]


# ── Errors with lines ──


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("", 1, "found the end of the file, expected a value"),
        ("[\n\n", 3, "found the end of the file"),
        ("[,]", 1, "found ',', expected a value"),
        ("[1,,2]", 1, "found ',', expected a value"),
        ("[1\n 2]", 2, "found '2', expected a comma or ]"),
        ('{"a" 1}', 1, "expected a colon after '\"a\"'"),
        ("{a: 1}", 1, "found 'a: 1}', expected JSON"),
        ("{1: 1}", 1, "expected the name of a member, in quotes, or }"),
        ("[]\n[]", 2, "found '[', expected the end of the file"),
        ('["a\nb"]', 1, "expected JSON"),
        ("[01]", 1, "expected a comma or ]"),
        ("[NaN]", 1, "expected JSON"),
        ("[True]", 1, "expected JSON"),
        ("/* [] ", 1, "expected JSON"),
        ("[" * 17 + "]" * 17, 1, "more than 16 nested brackets"),
        ("[" + "1" * 21 + "]", 1, "at most 20 characters"),
        ("\ufeff[]", 1, "expected JSON"),
    ],
)
def test_invalid_json_is_rejected_with_the_line(text: str, line: int, problem: str) -> None:
    found, message = template_error(text)
    assert found == line
    assert problem in message


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("{}", 1, "found an object, expected a list of devices"),
        ("[\n1]", 2, "found 1, expected a device"),
        ('[\n{"groups": []}]', 2, "an object without 'dev'"),
        ('[\n{"dev": 1}]', 2, "found dev 1, expected a text"),
        ('[{"dev": "dsa"}]', 1, "expected dsaX, or dsa and a number"),
        ('[{"dev": "dsa01"}]', 1, "expected dsaX, or dsa and a number"),
        ('[{"dev": "../dsaX"}]', 1, "expected dsaX, or dsa and a number"),
        ('[{"dev": "dsaX", "groups": {}}]', 1, "found an object, expected a list of groups"),
        ('[{"dev": "dsaX"}]', 1, "a device without work queue"),
        (one_group(engine=""), 1, "a device without engine"),
        (one_group('"size": 0'), 3, "found size 0, expected a whole number from 1"),
        (one_group('"size": -1'), 3, "found size -1, expected"),
        (one_group('"size": 1.5'), 3, "found size 1.5, expected"),
        (one_group('"size": null'), 3, "found size null, expected"),
        (one_group('"priority": 0'), 3, "found priority 0, expected a whole number from 1 to 15"),
        (one_group('"priority": 16'), 3, "found priority 16"),
        (one_group('"block_on_fault": 2'), 3, "expected a whole number from 0 to 1"),
        (one_group('"ats_disable": 2'), 3, "expected a whole number from 0 to 1"),
        (one_group('"mode": "exclusive"'), 3, "found mode 'exclusive', expected dedicated or shared"),
        (one_group('"type": "mdev"'), 3, "expected user or kernel"),
        (one_group('"name": ""'), 3, "expected up to 128 printable ASCII characters"),
        (one_group('"name": "a\\nb"'), 3, "expected up to 128 printable ASCII characters"),
        (one_group('"driver_name": "../user"'), 3, "expected the name of a driver"),
        (one_group('"op_config": "xyz"'), 3, "hexadecimal words"),
        (one_group('"mode": "shared"'), 3, "a shared queue without threshold"),
        (one_group('"mode": "shared",\n"threshold": 17'), 4, "found threshold 17, expected 1 to 16"),
        (one_group('"mode": "shared", "threshold": 0'), 3, "found threshold 0, expected 1 to 16"),
        (one_group('"prs_disable": 1, "block_on_fault": 1'), 3, "not both"),
        (one_group(device='"read_buffer_limit": -1,'), 1, "found read_buffer_limit -1"),
        (one_group(device='"read_buffer_limit": 1, "token_limit": 2,'), 1, "one of the two names"),
        (one_group(group='"desc_progress_limit": 4,'), 2, "expected a whole number from 0 to 3"),
        (one_group(group='"traffic_class_a": 8,'), 2, "expected a whole number from 0 to 7"),
        (one_group(group='"read_buffers_allowed": -8,'), 2, "found read_buffers_allowed -8"),
        (one_group().replace('"size": 16, ', ""), 3, "a queue without size"),
        (one_group().replace("wqX", "wq0"), 3, "found 'wq0.0', expected wqX. and a number"),
        (one_group().replace("engineX.0", "engineX.128"), 4, "expected a number below 128"),
        (one_group(engine=f"{ENGINE}, {ENGINE}"), 4, "'engineX.0' for the second time"),
        (one_group()[:-1] + "," + one_group()[1:], 4, "which is already in line 1"),
        (one_group()[:-1] + "," + one_group().replace("X", "0")[1:], 4, "which is already in line 1"),
        ("[" + '{"dev": "iaxX"},' * 257 + "]", 1, "257 devices"),
    ],
)
def test_invalid_values_are_rejected_with_the_line(text: str, line: int, problem: str) -> None:
    found, message = template_error(text)
    assert problem in message
    assert found == line


@given(st.text(alphabet=st.sampled_from('[]{}:,"X0 1-\\\n/*truefalsn.e') | st.characters(), max_size=200))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    for wrapped in (text, f"[{text}]", one_group(text), one_group(device=text)):
        assert line_of_refusal(wrapped) in (None, *range(1, wrapped.count("\n") + 2))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values, st.sampled_from([None, 1]))
def test_any_json_is_parsed_like_json(value: object, indent: int | None) -> None:
    assert plain(parse(json.dumps(value, indent=indent), "file")) == value


@given(json_values)
def test_trailing_commas_change_nothing(value: object) -> None:
    text = json.dumps(value, indent=1)
    commas = "\n".join(
        line + "," if line.strip()[-1:] not in ("[", "{", ",", "") and not last else line
        for line, last in zip(text.split("\n"), [*[False] * text.count("\n"), True], strict=True)
    )
    assert plain(parse(commas, "file")) == value


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["dsaX", "wqX.0", "user", "shared"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["dev", "groups", "grouped_workqueues", "grouped_engines", "size", "type", "name", "threshold"]
                ),
                inner,
                max_size=6,
            )
        ),
        max_leaves=30,
    )
)
def test_any_structure_is_parsed_or_rejected(value: object) -> None:
    for device_type in ("dsa", "iaa"):
        assert line_of_refusal(json.dumps([value]), device_type) in (None, 1)


# ── Priority of files ──


def names(config_dir: Path, environment: dict[str, str], number: int) -> str:
    """The name of the first queue of the device, which identifies the file."""
    _file, setup = read_config(str(config_dir), environment).setup(number)
    assert setup is not None
    return setup.attributes[Part("wq", 0)]["name"]


@pytest.mark.parametrize(
    ("files", "number", "counts"),
    [
        ([], 0, "dpdk_00"),
        (["dsa"], 0, "dsa"),
        (["dsa", "dsa-node1"], 0, "dsa-node1"),
        (["dsa-node1"], 0, "dsa-node1"),
        (["dsa-node2", "iaa", "dsa-"], 0, "dpdk_00"),
        (["dsa", "dsa-node1", "dsa-node1-dsa10"], 10, "dsa-node1-dsa10"),
        (["dsa", "dsa-node1", "dsa-node1-dsa10"], 1, "dsa-node1"),
        (["dsa-node1-dsa1"], 0, "dpdk_00"),
        (["dsa-node2-dsa0", "dsa-node1-iax0", "dsa-dsa0"], 0, "dpdk_00"),
    ],
)
def test_the_most_specific_file_has_priority(tmp_path: Path, files: list[str], number: int, counts: str) -> None:
    for file in files:
        (tmp_path / f"{file}.conf").write_text(one_group(f'"name": "{file}"'))
    assert names(tmp_path, {"NODE_NAME": "node1"}, number) == counts


def test_without_a_node_name_the_file_of_the_type_is_used(tmp_path: Path) -> None:
    for file in ("dsa-", "dsa--dsa0", "dsa-dsa0"):
        (tmp_path / f"{file}.conf").write_text("[")
    assert names(tmp_path, {}, 0) == "dpdk_00"


def test_a_file_for_one_device_is_checked_like_the_others(tmp_path: Path) -> None:
    (tmp_path / "dsa-node1-dsa3.conf").write_text("[\n{]")
    with pytest.raises(ConfigError, match=r"dsa-node1-dsa3\.conf:2: found '\]'"):
        read_config(str(tmp_path), {"NODE_NAME": "node1"})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({"DEVICE_TYPE": "gpu"}, "DEVICE_TYPE: found 'gpu', expected dsa or iaa"),
        ({"DSA_DRIVER": "uio"}, "DSA_DRIVER: found 'uio', expected idxd or vfio-pci"),
        ({"DSA_PCI_IDS": "0b25 8086:11fb"}, "DSA_PCI_IDS: found '8086:11fb', expected PCI device ids"),
        ({"NODE_NAME": "../etc"}, "NODE_NAME: found '../etc', expected the name of a Kubernetes node"),
    ],
)
def test_an_invalid_variable_is_rejected(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace("(", "\\(")):
        read_config("/nonexistent", environment)


def test_the_variables_of_the_container_have_its_defaults() -> None:
    config = read_config("/nonexistent", {"DEVICE_TYPE": "", "DSA_DRIVER": "", "DSA_PCI_IDS": " "})
    assert (config.device_type, config.driver) == ("dsa", "idxd")
    assert list(config.pci_ids) == ["0x0b25", "0x11fb", "0x1212"]
    assert list(read_config("/nonexistent", {"DSA_PCI_IDS": "0x0B25"}).pci_ids) == ["0x0b25"]
    assert list(read_config("/nonexistent", {"DEVICE_TYPE": "iaa"}).pci_ids) == []


def test_iaas_stay_bound_to_idxd_with_any_driver_of_dsas() -> None:
    assert read_config("/nonexistent", {"DEVICE_TYPE": "iaa", "DSA_DRIVER": "vfio-pci"}).driver == "idxd"


@pytest.mark.parametrize(
    ("kind", "driver", "fits"),
    [
        ("user", "user", True), ("kernel", "dmaengine", True), ("kernel", "crypto", True), ("user", "uio", True),
        ("user", "dmaengine", False), ("user", "crypto", False), ("kernel", "user", False),
    ],
)  # fmt: skip
def test_a_driver_of_another_type_of_queue_is_rejected(kind: str, driver: str, fits: bool) -> None:
    text = one_group(f'"driver_name": "{driver}"').replace('"type": "user"', f'"type": "{kind}"')
    assert f'"type": "{kind}"' in text
    assert line_of_refusal(text) == (None if fits else 3)
    if not fits:
        assert f"found driver_name {driver} of a queue of type {kind}, expected type" in template_error(text)[1]
