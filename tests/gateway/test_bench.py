"""The bench's `gateway` workload: it runs, and both sides have every token."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tinyvllm.bench.cli import main

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.slow
def test_the_gateway_beside_the_library(smollm2_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    argv = ["gateway", "--model", str(smollm2_dir), "--size", "tiny", "--rounds", "1"]
    assert main([*argv, "--device", "cpu", "--json", str(file)]) == 0
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    results = [record for record in records if record["record"] == "result"]
    assert {result["engine"] for result in results} == {"tinyvllm", "gateway"}
    for result in results:
        if result["metric"] == "output":
            assert result["median"] > 0
            assert result["workload"] == "gateway: streams 2"
