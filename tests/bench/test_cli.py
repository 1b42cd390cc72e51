"""Every subcommand on a tiny model: it runs, its JSON lines are valid, its table is there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinyvllm import _C
from tinyvllm.bench.cli import main
from tinyvllm.bench.contenders import Settings, create
from tinyvllm.bench.host_table import IN_THE_WAY
from tinyvllm.bench.report import validate
from tinyvllm.bench.workloads import Work

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
HAS_LLAMA_CPP = importlib.util.find_spec("llama_cpp") is not None


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def thread_counts() -> Iterator[None]:
    before = torch.get_num_threads(), _C.num_threads()
    yield
    torch.set_num_threads(before[0])
    _C.set_num_threads(before[1])


def bench(
    command: str, model: Path, tmp_path: Path, engine: str, *options: str
) -> list[dict[str, Any]]:
    """The JSON lines of one run of the smallest size."""
    file = tmp_path / "lines.jsonl"
    argv = [command, "--model", str(model), "--engine", engine, "--size", "tiny"]
    argv += ["--rounds", "1", "--threads", "1", "--json", str(file), "--device", "cpu", *options]
    assert main(argv) == 0
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for record in records:
        validate(record)
    assert records[0]["record"] == "run" and records[0]["threads"] == 1
    return records[1:]


def test_mixed_and_shared(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = bench("mixed", tiny_model_dir, tmp_path, "tinyvllm")
    values = {record["metric"]: record["median"] for record in records}
    for metric in ("p50, alone", "p99, alone", "p50, beside prompts", "p99, beside prompts"):
        assert values[f"inter-token {metric}"] > 0
    assert values["last chunk, alone"] > 0
    records = bench("shared", tiny_model_dir, tmp_path, "tinyvllm")
    values = {record["metric"]: record["median"] for record in records}
    speeds = values["output, prefix caching"], values["output, no prefix caching"]
    assert values["gain"] == pytest.approx(speeds[0] / speeds[1])
    assert "shared 3 x 40+4/3" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["latency", "ttft", "throughput", "streams"])
def test_engines_side_by_side(
    command: str, tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = bench(command, tiny_model_dir, tmp_path, "tinyvllm,transformers")
    results = [record for record in records if record["record"] == "result"]
    assert {result["engine"] for result in results} == {"tinyvllm", "transformers"}
    for result in results:
        assert result["median"] >= 0 and len(result["rounds"]) == 1
        if result["engine"] == "tinyvllm":
            assert result["times_better_than"]["transformers"] > 0
    if command == "latency":
        decode = next(result for result in results if result["metric"] == "decode")
        assert decode["share_of_ceiling"] == pytest.approx(decode["median"] / decode["ceiling"])
    table = capsys.readouterr().out
    assert "names: P/N is P prompt tokens, N new tokens" in table
    assert "vs transformers" in table and "greedy tokens equal those of transformers" in table


def test_ops(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench("ops", tiny_model_dir, tmp_path, "tinyvllm")
    assert {row["step"] for row in rows} == {"decode 2", "prefill 7"}
    kinds = {row["op"]: row for row in rows if row["step"] == "decode 2"}
    assert (
        kinds["norm_linear_rope_store_kv qkv_proj"]["calls"]
        == kinds["paged_attention"]["calls"]
        == 2
    )
    assert kinds["norm_linear lm_head"]["calls"] == kinds["embedding"]["calls"] == 1
    assert kinds["whole step"]["us"] > 0 and kinds["linear_add down_proj"]["share"] > 0
    # 311 rows of logits, in 16-row tiles: packed weight, and x and out of two tokens.
    assert kinds["norm_linear lm_head"]["bytes"] == 320 * 128 * 2 + 2 * 128 * 2 + 2 * 311 * 4
    assert kinds["norm_linear lm_head"]["flops"] == 2 * 2 * 128 * 311
    assert "whole step" in capsys.readouterr().out


def test_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    # The best of three rounds: on a busy machine a wake-up may take longer than all of a step.
    rows = bench("step", tiny_model_dir, tmp_path, "tinyvllm", "--rounds", "3")
    for streams in (1, 3):
        us = {row["phase"]: row["us_per_token"] for row in rows if row["streams"] == streams}
        phases = ("schedule", "build", "launch", "update", "detokenize", "publish")
        assert us["engine thread"] == pytest.approx(sum(us[name] for name in phases))
        assert all(us[name] >= 0 for name in phases) and us["ops"] > 0
        assert 0 <= us[IN_THE_WAY] < us["engine thread"] + us["reading the streams"] + us["ops"]


def test_profile_of_a_step(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = bench("step", tiny_model_dir, tmp_path, "tinyvllm", "--profile")
    rows = [row for row in rows if row["record"] == "kernel"]
    for streams in (1, 3):
        kernels = {row["kernel"]: row for row in rows if row["streams"] == streams}
        assert kernels["linear_add o_proj"]["calls"] == kernels["paged_attention"]["calls"] == 2
        assert kernels["sample"]["calls"] == 1 and kernels["sample"]["us_per_call"] > 0
        parts = [row["us_per_step"] + row["gap_us_per_step"] for row in kernels.values()]
        assert sum(parts) == pytest.approx(kernels["sample"]["step_us"])
    table = capsys.readouterr().out
    assert "us a step as one graph" in table and "gaps before, us a step" in table


def test_memory(tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench("memory", tiny_model_dir, tmp_path, "tinyvllm")
    sizes = {row["name"]: row["bytes"] for row in rows}
    assert sizes["residual"] == 256 * 128 * 2 and sizes["logits"] == 64 * 311 * 4
    shown = capsys.readouterr().out
    assert "weights" in shown and "| residual" in shown


def test_start(tiny_model_dir: Path, tmp_path: Path) -> None:
    (row,) = bench("start", tiny_model_dir, tmp_path, "tinyvllm")
    assert row["metric"] == "process start to first token" and row["median"] > 0


@pytest.mark.skipif(not HAS_LLAMA_CPP, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("rope", ["default", "llama3"])
def test_llama_cpp_computes_the_same_model(rope: str, tmp_path: Path) -> None:
    """Its BF16 GGUF is right: greedy tokens equal transformers' for a while."""
    from support.tiny_models import make_tiny_model

    scaling = {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    overrides = {"rope_scaling": scaling} if rope == "llama3" else {}
    model = make_tiny_model(tmp_path / "model", **overrides)
    settings = Settings(
        model_dir=model, device="cpu", num_threads=1, max_num_seqs=2, max_model_len=256
    )
    work = [Work(tuple(range(3, 103)), 8), Work((9, 8, 7), 4), Work((5,) * 17, 6)]
    first = {}
    for name in ("transformers", "llama.cpp"):
        engine = create(name, settings)
        runs = engine.run(work, 0.0)
        engine.close()
        assert [len(run.token_ids) for run in runs] == [8, 4, 6]
        assert all(run.times == sorted(run.times) for run in runs)
        first[name] = [run.token_ids[:2] for run in runs]
    assert first["transformers"] == first["llama.cpp"]


def test_engine_that_is_not_installed_is_left_out(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    records = bench("latency", tiny_model_dir, tmp_path, "tinyvllm,llama.cpp")
    notes = [record["text"] for record in records if record["record"] == "note"]
    assert notes == ["llama.cpp is left out: pip install llama-cpp-python"]
    assert {record.get("engine") for record in records} == {"tinyvllm", None}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--engine", "exllama"], "no engine is called 'exllama'"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_mistakes_are_named(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["latency", "--size", "tiny", *options]) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--threads"])
@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_counts_are_positive_integers(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        main(["latency", option, value])
    assert info.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert option in last and f"{value!r} is not an integer >= 1" in last


def test_json_on_stdout_leaves_the_table_to_stderr(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-m", "tinyvllm.bench", "ttft", "--size", "tiny", "--rounds", "1"]
    command += ["--engine", "tinyvllm", "--model", str(tiny_model_dir), "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        validate(json.loads(line))
    assert "time to first token" in done.stderr
