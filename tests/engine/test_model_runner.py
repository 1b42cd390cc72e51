"""ModelRunner: memory, graphs, and the real model's numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tinyvllm import ConfigError, EngineConfig, SamplingParams
from tinyvllm.batch import BatchBuilder
from tinyvllm.block_manager import BlockManager
from tinyvllm.model_runner import ModelRunner, free_memory
from tinyvllm.scheduler import Scheduler
from tinyvllm.sequence import Sequence

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


MEMINFO = {"proc/meminfo": "MemTotal: 4000 kB\nMemAvailable: 3000 kB\n"}


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 4 << 30),
        (MEMINFO, 3000 * 1024),
        (
            {
                "proc/self/cgroup": "0::/user/job\n",
                "sys/fs/cgroup/user/job/memory.max": "max\n",
                "sys/fs/cgroup/user/memory.max": "900000\n",
                "sys/fs/cgroup/user/memory.current": "500000\n",
                "sys/fs/cgroup/user/memory.stat": "anon 400000\ninactive_file 100000\n",
            },
            500_000,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,memory:/docker/abc\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "800000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "300000\n",
                "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 50000\n",
            },
            550_000,
        ),
        (
            {
                "proc/self/cgroup": "0::/full\n",
                "sys/fs/cgroup/full/memory.max": "10\n",
                "sys/fs/cgroup/full/memory.current": "20\n",
            },
            1,
        ),
    ],
    ids=["nothing known", "machine", "version 2, parent", "version 1, container", "used up"],
)
def test_free_memory(tmp_path: Path, files: dict[str, str], want: int) -> None:
    root = write(tmp_path, files if not files else {**MEMINFO, **files})
    assert free_memory(root / "proc", root / "sys") == want


def test_pool_size(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def num_blocks(**overrides: Any) -> int:
        return ModelRunner(tiny_model_dir, EngineConfig(device="cpu", **overrides)).num_blocks

    # 8 * 100 * 1.5 tokens; 64 sequences of the model's 512 tokens; at least one whole sequence.
    assert num_blocks(max_num_seqs=8, expected_seq_len=100) == 8 * 10
    assert num_blocks() == 64 * 512 // 16
    assert num_blocks(max_num_seqs=1, expected_seq_len=1) == 32
    assert num_blocks(num_blocks=7) == 7
    block_bytes = 2 * 2 * 16 * 2 * 64 * 2
    monkeypatch.setattr("tinyvllm.model_runner.free_memory", lambda: 10 * block_bytes)
    assert num_blocks() == 5
    assert "cut to 5 blocks of the 2048 wanted" in caplog.text
    with pytest.raises(ConfigError, match="num_blocks 11 needs"):
        num_blocks(num_blocks=11)
    monkeypatch.setattr("tinyvllm.model_runner.free_memory", lambda: block_bytes)
    with pytest.raises(ConfigError, match="no memory"):
        num_blocks()


class Steps:
    """A scheduler, builder and runner, stepped by hand."""

    def __init__(self, model_dir: Path, config: EngineConfig) -> None:
        self.runner = ModelRunner(model_dir, config)
        self.scheduler = Scheduler(
            max_num_seqs=self.runner.max_num_seqs,
            max_num_batched_tokens=self.runner.max_num_batched_tokens,
            max_model_len=self.runner.max_model_len,
            block_manager=BlockManager(self.runner.num_blocks, config.block_size),
        )
        self.builder = BatchBuilder(
            max_num_seqs=self.runner.max_num_seqs,
            max_num_batched_tokens=self.runner.max_num_batched_tokens,
            max_model_len=self.runner.max_model_len,
            block_size=config.block_size,
        )

    def step(self) -> torch.Tensor:
        """Runs one step; its logits [R, V], a copy."""
        schedule = self.scheduler.schedule()
        batch = self.builder.build(schedule)
        output = self.runner.launch(batch).result()
        logits = self.runner._buffers.logits[: batch.num_logits].clone()
        self.scheduler.update(schedule, output.token_ids)
        return logits


def test_graphs_are_bounded_and_equal_to_eager(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyvllm.model_runner._MAX_GRAPHS", 2)
    params = [SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=n) for n in (3, 6, 9, 12)]
    every: list[list[torch.Tensor]] = []
    for enforce_eager in (False, True):
        steps = Steps(
            tiny_model_dir, EngineConfig(device="cpu", num_blocks=64, enforce_eager=enforce_eager)
        )
        for i, each in enumerate(params):
            steps.scheduler.add(Sequence(i, [5 + i] * (20 + i), each))
        logits = []
        while steps.scheduler.has_work:
            logits.append(steps.step())
            assert len(steps.runner._graphs) <= 2
        assert len(steps.runner._graphs) == (0 if enforce_eager else 2)
        every.append(logits)
    for graph, eager in zip(*every, strict=True):
        assert torch.equal(graph, eager)


@pytest.mark.slow
def test_real_bfloat16_logits(smollm2_dir: Path) -> None:
    """Against transformers in float32 from the same weights: at most twice the error that
    transformers makes in bfloat16, over a prompt and 24 decoded tokens in a crowd."""
    transformers = pytest.importorskip("transformers")
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "Wir fahren heute nach"]
    num_decoded = 24
    steps = Steps(smollm2_dir, EngineConfig(device="cpu", num_blocks=64, max_num_seqs=4))
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2_dir)
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_decoded)
    sequences = [Sequence(i, tokenizer(text)["input_ids"], params) for i, text in enumerate(texts)]
    for seq in sequences:
        steps.scheduler.add(seq)
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while steps.scheduler.has_work:
        for row, logits in enumerate(steps.step()):  # all run in step: one row each
            rows[row].append(logits)
    ours = [torch.stack(each) for each in rows]

    def theirs(dtype: torch.dtype) -> list[torch.Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=dtype)
        with torch.inference_mode():
            return [
                model(torch.tensor([seq.token_ids[:-1]])).logits[0, -num_decoded:].float()
                for seq in sequences
            ]

    exact, rounded = theirs(torch.float32), theirs(torch.bfloat16)
    for mine, low, ref in zip(ours, rounded, exact, strict=True):
        error, allowed = (mine - ref).abs().max(), (low - ref).abs().max()
        assert error <= 2 * allowed, (error, allowed)
        mean_error, mean_allowed = (mine - ref).abs().mean(), (low - ref).abs().mean()
        assert mean_error <= 2 * mean_allowed, (mean_error, mean_allowed)
