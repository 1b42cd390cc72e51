"""Results as JSON lines, and as the table a person reads.

Every line is an object with "record": "run" (the machine and the command), "result" (one metric of
one engine), "op", "host", "kernel" or "buffer" (a row of their tables), or "note".
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBJECT = "tinyvllm"
"""Ratios say how many times better this engine is than another."""

_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "run": {
        "command": str,
        "model": str,
        "device": str,
        "threads": int,
        "machine": dict,
        "versions": dict,
    },
    "result": {
        "workload": str,
        "metric": str,
        "unit": str,
        "higher_is_better": bool,
        "engine": str,
        "median": (int, float),
        "rounds": list,
    },
    "op": {"step": str, "op": str, "us": (int, float), "share": (int, float, type(None))},
    "host": {"streams": int, "phase": str, "us_per_token": (int, float)},
    "kernel": {
        "streams": int,
        "kernel": str,
        "calls": (int, float),
        "us_per_call": (int, float),
        "us_per_step": (int, float),
        "gap_us_per_step": (int, float),
        "step_us": (int, float),
    },
    "buffer": {"name": str, "bytes": int, "offset": int, "first": str, "last": str},
    "note": {"text": str},
}


@dataclass(slots=True)
class Row:
    """One metric of one workload: a value per round for each engine, rounds interleaved."""

    workload: str
    metric: str
    unit: str
    higher_is_better: bool
    values: dict[str, list[float]]
    shares: dict[str, list[float]] | None = None
    """Share of the measured ceiling, per round, where the metric has one."""
    ceilings: list[float] | None = None
    """That ceiling, per round, in `unit`."""

    def ratio(self, other: str) -> float | None:
        """How many times better SUBJECT is than `other`: the median over rounds, paired."""
        ours, theirs = self.values.get(SUBJECT), self.values.get(other)
        if not ours or not theirs or other == SUBJECT:
            return None
        pairs = list(zip(ours, theirs, strict=True))
        return statistics.median(a / b if self.higher_is_better else b / a for a, b in pairs)

    def records(self) -> list[dict[str, Any]]:
        found = []
        for engine, values in self.values.items():
            record: dict[str, Any] = {
                "record": "result",
                "workload": self.workload,
                "metric": self.metric,
                "unit": self.unit,
                "higher_is_better": self.higher_is_better,
                "engine": engine,
                "median": statistics.median(values),
                "rounds": values,
            }
            if self.shares and engine in self.shares:
                record["share_of_ceiling"] = statistics.median(self.shares[engine])
            if self.ceilings:
                record["ceiling"] = statistics.median(self.ceilings)
            if engine == SUBJECT:
                ratios = {other: self.ratio(other) for other in self.values if other != SUBJECT}
                record["times_better_than"] = ratios
            found.append(record)
        return found


def validate(record: dict[str, Any]) -> None:
    """Raises `ValueError` when `record` is not one of the lines described above."""
    kind = record.get("record")
    if kind not in _FIELDS:
        raise ValueError(f"record must be one of {', '.join(_FIELDS)}; got {kind!r}")
    for name, types in _FIELDS[kind].items():
        if name not in record:
            raise ValueError(f"{kind} record has no {name}: {record}")
        if not isinstance(record[name], types):
            raise ValueError(f"{kind} record: {name} is {record[name]!r}")


class Report:
    """Where records go as they are made; the table is printed as each group is complete."""

    def __init__(self, table: TextIO, json_file: TextIO | None) -> None:
        self._table, self._json = table, json_file

    def write(self, *records: dict[str, Any]) -> None:
        for record in records:
            validate(record)
            if self._json is not None:
                self._json.write(json.dumps(record) + "\n")
                self._json.flush()

    def note(self, text: str) -> None:
        self.write({"record": "note", "text": text})
        self.print(text)

    def print(self, text: str = "") -> None:
        print(text, file=self._table, flush=True)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.write(*row.records())
        if rows:
            self.print(result_table(rows))
            self.print()


def result_table(rows: Sequence[Row]) -> str:
    """Medians per engine, how many times better we are, the ceiling and the share of it."""
    engines = list(dict.fromkeys(engine for row in rows for engine in row.values))
    others = [engine for engine in engines if engine != SUBJECT]
    has_share = any(row.shares for row in rows)
    header = ["workload", "metric", *engines]
    header += [f"vs {other}" for other in others if SUBJECT in engines]
    if has_share:
        header += ["ceiling", *(f"{engine}: of ceiling" for engine in engines)]
    lines = []
    for row in rows:
        cells = [row.workload, f"{row.metric} ({row.unit})"]
        cells += [
            number(statistics.median(row.values[engine])) if engine in row.values else "-"
            for engine in engines
        ]
        if SUBJECT in engines:
            ratios = [row.ratio(other) for other in others]
            cells += ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        if has_share:
            shares = row.shares or {}
            cells.append(number(statistics.median(row.ceilings)) if row.ceilings else "-")
            cells += [
                f"{statistics.median(shares[engine]):.0%}" if engine in shares else "-"
                for engine in engines
            ]
        lines.append(cells)
    return text_table(header, lines)


def text_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it reads as plain text too; numbers to the right."""
    columns = list(zip(header, *lines, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]
    right = [idx > 0 and all(_is_number(cell) for cell in c[1:]) for idx, c in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return "| " + " | ".join(padded) + " |"

    rule = [
        "-" * (width - 1) + (":" if to_right else "-")
        for width, to_right in zip(widths, right, strict=True)
    ]
    return "\n".join([line(header), line(rule), *(line(cells) for cells in lines)])


def _is_number(cell: str) -> bool:
    digits = cell.removeprefix("-").rstrip("x%").replace(",", "").replace(".", "")
    return cell == "-" or digits.isdigit()


def number(value: float) -> str:
    """Three significant digits or the whole number, whichever says more."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that `percent` of `values` do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
