"""Recording and replaying CPU ops."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from tinyvllm.ops import native

if TYPE_CHECKING:
    from tinyvllm import _C


def rows(values: list[float], width: int = 32) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)[:, None].repeat(1, width)


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_capture_runs_nothing_and_replay_reads_what_is_there_then() -> None:
    weight, ids, out = rows([1, 2, 3]), indices(0, 2), rows([0, 0])
    with native.capture() as graph:
        native.embedding(out, ids, weight)
    assert graph.num_ops == 1
    assert out.eq(0).all()

    graph.replay()
    assert torch.equal(out, rows([1, 3]))
    ids[0] = 1
    weight[2] = 7
    graph.replay()
    assert torch.equal(out, rows([2, 7]))


def test_ops_replay_in_order() -> None:
    first, second, third = rows([5]), rows([0]), rows([0])
    with native.capture() as graph:
        native.gather_rows(second, first, indices(0))
        native.gather_rows(third, second, indices(0))
        native.gather_rows(first, rows([9]), indices(0))
    graph.replay()
    assert torch.equal(third, rows([5]))
    graph.replay()
    assert torch.equal(third, rows([9]))


def test_replay_gives_the_bits_of_the_direct_calls() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 96, generator=generator).bfloat16()
    weight = torch.randn(96, generator=generator).bfloat16()
    direct, replayed = torch.empty_like(x), torch.empty_like(x)
    native.rms_norm(direct, x, weight, 1e-5)
    with native.capture() as graph:
        native.rms_norm(replayed, x, weight, 1e-5)
    graph.replay()
    assert torch.equal(direct, replayed)


def test_a_graph_keeps_its_tensors_alive_and_only_that_long() -> None:
    out = rows([0])
    x = rows([4])
    seen = weakref.ref(x)
    with native.capture() as graph:
        native.gather_rows(out, x, indices(0))
    del x
    gc.collect()
    other = [rows([8]) for _ in range(64)]  # would reuse freed memory
    assert seen() is not None
    graph.replay()
    assert torch.equal(out, rows([4]))
    del graph
    gc.collect()
    assert seen() is None
    assert len(other) == 64


def test_replay_timed_names_every_op() -> None:
    out, weight = rows([0]), torch.ones(32, dtype=torch.bfloat16)
    with native.capture() as graph:
        native.embedding(out, indices(0), rows([2]))
        native.rms_norm(out, out, weight, 0.0)
    times = graph.replay_timed()
    assert [name for name, _ in times] == ["embedding", "rms_norm"]
    assert all(0 <= seconds < 1 for _, seconds in times)
    assert torch.equal(out, rows([1]))


def test_an_empty_graph_replays() -> None:
    with native.capture() as graph:
        pass
    graph.replay()
    assert graph.num_ops == 0
    assert graph.replay_timed() == []


def test_only_the_capturing_thread_records() -> None:
    out = rows([0])
    with native.capture() as graph:
        thread = threading.Thread(target=native.gather_rows, args=(out, rows([3]), indices(0)))
        thread.start()
        thread.join()
    assert graph.num_ops == 0
    assert torch.equal(out, rows([3]))


def test_arguments_are_checked_while_capturing_and_a_failed_capture_is_no_graph() -> None:
    graph = native.capture()
    with pytest.raises(ValueError, match="row_idx: expected dtype int32"), graph:
        native.gather_rows(rows([0]), rows([0]), indices(0))
        native.gather_rows(rows([0]), rows([0]), indices(0).long())
    assert graph.num_ops == 0
    with pytest.raises(ValueError, match="this graph's capture failed"):
        graph.replay()
    out = rows([0])
    native.gather_rows(out, rows([6]), indices(0))  # the thread no longer captures
    assert torch.equal(out, rows([6]))


def test_an_error_ends_a_replay_and_the_graph_stays_usable() -> None:
    out, row_idx = rows([0]), indices(5)
    with native.capture() as graph:
        native.gather_rows(out, rows([6]), row_idx)
    for replay in (graph.replay, graph.replay_timed):
        with pytest.raises(IndexError, match=r"row_idx\[0\]: expected 0 <= index < 1, got 5"):
            replay()
    row_idx[0] = 0
    graph.replay()
    assert torch.equal(out, rows([6]))


def test_wrong_use_is_refused() -> None:
    with native.capture() as graph:
        with pytest.raises(ValueError, match="this thread captures already"):
            native.capture().__enter__()
        with pytest.raises(ValueError, match="not inside a capture"):
            graph.replay()
    with pytest.raises(ValueError, match="a graph is captured once"):
        graph.__enter__()
    with pytest.raises(ValueError, match="nothing was captured yet"):
        native.capture().replay()
    with pytest.raises(ValueError, match="must end in the thread that began it"):
        graph.__exit__(None, None, None)


def test_other_threads_run_during_a_replay() -> None:
    x = torch.zeros(2048, 1024, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    with native.capture() as graph:
        for _ in range(200):
            native.rms_norm(out, x, x[0], 1e-5)
    started, finished = threading.Event(), threading.Event()

    def replay() -> None:
        started.set()
        graph.replay()
        finished.set()

    thread = threading.Thread(target=replay)
    thread.start()
    started.wait()
    turns = 0
    while not finished.is_set():
        turns += 1
    thread.join()
    assert turns > 1000


def test_several_threads_replay_at_once() -> None:
    def build(value: float) -> tuple[_C.Graph, torch.Tensor, torch.Tensor]:
        x = torch.full((64, 1024), value, dtype=torch.bfloat16)
        out = torch.empty_like(x)
        with native.capture() as graph:
            native.gather_rows(out, x, torch.arange(64, dtype=torch.int32))
        return graph, x, out

    built = [build(float(i)) for i in range(4)]
    threads = [
        threading.Thread(target=lambda graph=graph: [graph.replay() for _ in range(50)])
        for graph, _, _ in built
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, x, out in built:
        assert torch.equal(x, out)
