"""Outputs of inspect and top: tables, JSON, YAML, CSV, names."""

import asyncio
import contextlib
import csv
import io
import json
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from accelplane.cli.refresh import screen, show
from accelplane.cli.tables import OUTPUTS, Column, Document, Format, Output, Row, Table, UsageError, time_text, write

COLUMNS = (Column("NAME"), Column("FREE"), Column("WHY", wide=True))


def document(*rows: Sequence[str]) -> Document[list[str]]:
    return Document(
        [Table("cards", COLUMNS, [Row(row[0], row, list(row)) for row in rows], empty="No cards.")],
        {"source": "test"},
        "CardList",
    )


CARDS = document(("card10", "3", "-"), ("card2", "12", "too hot"))


def test_a_table_is_aligned_and_wide_columns_are_in_wide_only() -> None:
    assert write(CARDS, Format()) == "NAME     FREE\ncard10   3\ncard2    12\n"
    assert write(CARDS, Format(output="wide")).splitlines()[2] == "card2    12     too hot"


@pytest.mark.parametrize("output", OUTPUTS)
def test_no_output_has_characters_that_control_a_terminal(output: Output) -> None:
    name = "a\x1b[2J\x7f\x85\x9b2J\u061c\u200f\u2028\u202e\u2066 ü"
    text = write(document((name, name, name)), Format(output=output))
    assert all(line.isprintable() for line in text.removesuffix("\n").split("\n"))
    if output in ("json", "yaml"):
        assert yaml.safe_load(text)["cards"] == [[name, name, name]]


def test_no_headers_leaves_rows_only() -> None:
    assert write(CARDS, Format(headers=False)) == "card10   3\ncard2    12\n"
    assert write(CARDS, Format(output="csv", headers=False)) == "card10,3,-\ncard2,12,too hot\n"
    assert write(document(), Format(headers=False)) == ""
    assert write(document(), Format()) == "No cards.\n"


@pytest.mark.parametrize(
    ("column", "first"), [("name", "card2"), ("FREE", "card10"), ("why", "card10")], ids=["name", "number", "wide"]
)
def test_rows_are_sorted_by_a_column_in_every_output(column: str, first: str) -> None:
    for output in OUTPUTS:
        text = write(CARDS, Format(output=output, headers=False, sort_by=column))
        assert text.index(first) < text.index({"card2": "card10", "card10": "card2"}[first]), output


def test_an_unknown_column_is_a_usage_error_that_names_the_columns() -> None:
    with pytest.raises(UsageError, match="--sort-by: found 'AGE', expected one of NAME, FREE, WHY"):
        write(CARDS, Format(sort_by="AGE"))


def test_json_and_yaml_have_the_same_content_with_version_and_kind() -> None:
    content = json.loads(write(CARDS, Format(output="json")))
    assert list(content) == ["apiVersion", "kind", "source", "cards"]
    assert (content["apiVersion"], content["kind"]) == ("accelplane/v1", "CardList")
    assert yaml.safe_load(write(CARDS, Format(output="yaml"))) == content


class Power(NamedTuple):
    power_watts: float | None


def test_values_with_units_are_numbers_in_csv_and_are_sorted_as_numbers() -> None:
    items = {"a": Power(100.5), "b": Power(None), "c": Power(9.0)}
    rows = [Row(name, (name, "-" if item[0] is None else f"{item[0]}W"), item) for name, item in items.items()]
    found = Document([Table("cards", (Column("NAME"), Column("POWER", field="power_watts")), rows)])
    assert write(found, Format(output="csv")) == "NAME,power_watts\na,100.5\nb,\nc,9.0\n"
    assert write(found, Format(output="name", sort_by="power")) == "c\na\nb\n"


def test_names_are_one_a_line() -> None:
    assert write(CARDS, Format(output="name")) == "card10\ncard2\n"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, None), (0.0, None), (-1.0, None), (float("inf"), None), (1e12, None), (1.9, "1970-01-01T00:00:01Z")],
)
def test_times_are_rfc_3339_or_unknown(seconds: float | None, text: str | None) -> None:
    assert time_text(seconds) == text


@pytest.mark.untraced
@given(st.lists(st.tuples(st.text(min_size=1), st.text(), st.text()), min_size=1), st.sampled_from(OUTPUTS))
def test_hostile_texts_stay_in_their_cell(rows: list[tuple[str, str, str]], output: Output) -> None:
    text = write(document(*rows), Format(output=output))
    if output == "csv":
        assert [len(row) for row in csv.reader(io.StringIO(text))] == [3] * (len(rows) + 1)
    elif output in ("table", "wide"):
        assert len(text.split("\n")) == len(rows) + 2
        assert all(line.isprintable() for line in text.split("\n"))
    elif output == "json":
        assert json.loads(text)["cards"] == [list(row) for row in rows]


def test_an_empty_table_leaves_no_blank_line() -> None:
    (cards,) = CARDS.tables
    silent = replace(cards, rows=(), empty="")
    assert write(Document([silent, cards]), Format()).startswith("NAME")
    assert write(Document([silent, silent]), Format()) == ""


def test_only_the_first_word_of_a_health_column_has_a_color() -> None:
    columns = (Column("HEALTH", health=True), Column("NAME"))
    rows = [Row("", cells, cells) for cells in (("Healthy", "a"), ("Unhealthy (hot)", "b"), ("gone", "c"))]
    colored = write(Document([Table("cards", columns, rows)]), Format(), colors=True).splitlines()
    assert colored == [
        "HEALTH            NAME",
        "\x1b[32mHealthy\x1b[0m           a",
        "\x1b[31mUnhealthy\x1b[0m (hot)   b",
        "\x1b[31mgone\x1b[0m              c",
    ]


def test_repeated_yaml_is_a_stream_of_documents(capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(_repeat("yaml"))
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [document["cards"] for document in documents] == [[list(row.item) for row in CARDS.tables[0].rows]] * 2


@pytest.mark.parametrize("output", ["csv", "name"])
def test_repeated_csv_and_names_have_their_problems_on_standard_error(
    output: Output, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(_repeat(output))
    captured = capsys.readouterr()
    assert captured.err == "top: no answer\ntop: no answer\n"
    assert "no answer" not in captured.out


async def _repeat(output: Output) -> None:
    """Shows the cards twice."""
    readings = 0

    async def read() -> tuple[Document[list[str]], Sequence[str]]:
        nonlocal readings
        readings += 1
        if readings > 2:
            raise asyncio.CancelledError
        return CARDS, ["no answer"]

    with contextlib.suppress(asyncio.CancelledError):
        await show(read, Format(output=output), 0.0, once=False, program="top")


def test_a_screen_is_overwritten_line_by_line_and_counts_hidden_rows() -> None:
    assert "".join(screen("one\ntwo long\n", 4, 10)) == "\x1b[Hone\x1b[K\ntwo \x1b[K\n\x1b[J"
    lines = "".join(screen("\n".join("abcdefgh"), 40, 5)).splitlines()
    assert lines[3] == "(5 more lines; enlarge the terminal)\x1b[K"
