"""Ratios, percentiles, tables and the JSON lines' shape."""

from __future__ import annotations

import io
import json

import pytest

from tinyvllm.bench.report import Report, Row, percentile, result_table, text_table, validate


def decode_row(**values: list[float]) -> Row:
    return Row("latency 64/128", "decode", "tok/s", True, values)


def test_ratio_is_the_median_of_paired_rounds() -> None:
    # The machine halves its speed in the second round: medians alone would say 100 / 40.
    row = decode_row(tinyvllm=[100.0, 50.0, 120.0], transformers=[50.0, 25.0, 40.0])
    assert row.ratio("transformers") == 2.0


def test_ratio_of_a_time_is_turned_around() -> None:
    row = Row("start", "first token", "s", False, {"tinyvllm": [2.0], "transformers": [6.0]})
    assert row.ratio("transformers") == 3.0


def test_no_ratio_without_both_engines() -> None:
    assert decode_row(transformers=[1.0]).ratio("transformers") is None
    assert decode_row(tinyvllm=[1.0]).ratio("transformers") is None
    assert decode_row(tinyvllm=[1.0]).ratio("tinyvllm") is None


def test_records_hold_medians_ratios_and_shares() -> None:
    row = decode_row(tinyvllm=[90.0, 110.0, 100.0], transformers=[50.0, 50.0, 50.0])
    row.shares = {"tinyvllm": [0.8, 0.9, 0.85]}
    row.ceilings = [112.5, 122.2, 117.6]
    ours, theirs = row.records()
    assert (ours["engine"], ours["median"], ours["rounds"]) == ("tinyvllm", 100.0, [90, 110, 100])
    assert ours["times_better_than"] == {"transformers": 2.0}
    assert (ours["share_of_ceiling"], ours["ceiling"]) == (0.85, 117.6)
    assert "times_better_than" not in theirs and "share_of_ceiling" not in theirs
    for record in (ours, theirs):
        validate(json.loads(json.dumps(record)))


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({}, "record must be one of"),
        ({"record": "opinion"}, "record must be one of"),
        ({"record": "note"}, "note record has no text"),
        ({"record": "note", "text": 1}, "text is 1"),
        ({"record": "host", "streams": 1, "phase": "build", "us_per_token": "3"}, "us_per_token"),
    ],
)
def test_validate_names_what_is_wrong(record: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        validate(record)


def test_percentile_is_the_nearest_rank() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == percentile([7.0], 0) == 7.0


def test_table_has_a_column_per_engine_ratio_and_share() -> None:
    row = decode_row(tinyvllm=[100.0], transformers=[40.0])
    row.shares, row.ceilings = {"tinyvllm": [0.875]}, [114.3]
    lacking = Row("latency 64/128", "other", "ms", False, {"tinyvllm": [1234.5]})
    header, rule, first, second = result_table([row, lacking]).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")] == [
        "workload",
        "metric",
        "tinyvllm",
        "transformers",
        "vs transformers",
        "ceiling",
        "tinyvllm: of ceiling",
        "transformers: of ceiling",
    ]
    assert "2.50x" in first and "114" in first and "88%" in first
    assert "1,234" in second and second.count(" - ") == 5
    assert len({len(line) for line in (header, rule, first, second)}) == 1


def test_numbers_stand_to_the_right() -> None:
    lines = text_table(["name", "us"], [["a", "-5.25"], ["bcd", "1,000"]]).splitlines()
    assert lines[1:] == ["| ---- | ----: |", "| a    | -5.25 |", "| bcd  | 1,000 |"]


def test_report_writes_lines_and_table_apart() -> None:
    table, lines = io.StringIO(), io.StringIO()
    report = Report(table, lines)
    report.rows([decode_row(tinyvllm=[100.0])])
    report.note("left out")
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [record["record"] for record in records] == ["result", "note"]
    assert "latency 64/128" in table.getvalue() and "left out" in table.getvalue()
    with pytest.raises(ValueError, match="record must be"):
        report.write({"record": "guess"})
