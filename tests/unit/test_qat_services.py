"""The resource of a QAT device by its services."""

import contextlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.devices.names import check_resource_name
from accelplane.plugins.qat.services import sections, service

NAMES = {
    "sym;asym": "cy",
    "dc": "dc",
    "sym": "sym",
    "asym": "asym",
    "asym;dc": "asym-dc",
    "sym;dc": "sym-dc",
    "dcc": "dcc",
    "decomp": "decomp",
    "asym;sym;dc": "asym-sym-dc",
    "asym;sym;decomp": "asym-sym-decomp",
    "sym;decomp": "sym-decomp",
    "dc;decomp": "dc-decomp",
}


@pytest.mark.parametrize(("text", "resource"), NAMES.items())
def test_the_order_of_services_does_not_change_the_name(text: str, resource: str) -> None:
    for words in itertools.permutations(text.split(";")):
        assert service(";".join(words)) == (resource, "")
        assert service(" ; ".join(words)).resource == resource


@pytest.mark.parametrize("text", ["", ";", "sym;", "Sym", "sym,asym", "cy", "sym;asym;none", "x" * 5000, "sym\0"])
def test_unknown_services_are_generic_with_the_reason(text: str) -> None:
    found = service(text)
    assert found.resource == "generic"
    assert "expected words of asym, sym, dc, decomp, dcc" in found.problem
    assert len(found.problem) < 600


@given(st.text() | st.lists(st.sampled_from(["asym", "sym", "dc", "decomp", "dcc", "", "x"])).map(";".join))
def test_any_text_is_a_valid_resource_name(text: str) -> None:
    check_resource_name("qat.intel.com", service(text).resource)


def test_sections_keep_semicolons_in_values_and_drop_comments() -> None:
    text = (
        "top = 1\n# one\n; two\n[GENERAL]\n ServicesEnabled = asym;sym \nempty=\n\n[ KERNEL ]\nx=a=b\n[GENERAL]\ny=2\n"
    )
    assert sections(text) == {
        "": {"top": "1"},
        "GENERAL": {"ServicesEnabled": "asym;sym", "empty": "", "y": "2"},
        "KERNEL": {"x": "a=b"},
    }


@pytest.mark.parametrize("text", ["[GENERAL]\nno equals", "=value", "[unclosed\n"])
def test_an_invalid_line_is_reported_by_its_number(text: str) -> None:
    with pytest.raises(ValueError, match=r"line \d is .*, expected \[section\] or key = value"):
        sections(text)


@given(st.text(alphabet=st.sampled_from("[]=;#\n aG\0é")) | st.text())
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert "" in sections(text)
