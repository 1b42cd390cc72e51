"""sample on a GPU: the reference's token, but where the draw lands within rounding of a border."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tinyvllm import _C
from tinyvllm.ops import native, reference

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not (_C.has_cuda and torch.cuda.is_available()),
        reason="no CUDA device or a CPU-only build",
    ),
]

INF = float("inf")
NAN = float("nan")
# temperature, top_k, top_p, min_p
FILTERS: list[tuple[float, int, float, float]] = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.7, 0, 1.0, 0.05),
    (2.0, 0, 1.0, 1e-4),
    (1.0, 1, 1.0, 0.0),
    (1.0, 2, 1.0, 0.0),
    (1.0, 50, 1.0, 0.0),
    (0.8, 50, 0.9, 0.0),
    (1.0, 40, 0.5, 0.1),
    (1.0, 700, 1.0, 0.0),
    (1.0, 3000, 0.99, 0.0),
    (1.0, 5000, 0.7, 0.001),
    (1.0, 10**9, 1.0, 0.0),
    (1.0, 0, 0.0, 0.0),
    (1.0, 0, 0.1, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.999, 0.0),
    (0.7, 0, 0.95, 0.02),
]
# Sums of weights are exact to about 1e-7 of the total; one kernel's exp2 adds as much.
BORDER = 2e-6


def sample(logits: torch.Tensor, rows: list[tuple[Any, ...]]) -> list[int]:
    """One row of (temperature, top_k, top_p, min_p, seed, step_idx) for each row of logits."""
    dtypes = [torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32]
    columns = [
        torch.tensor([row[i] for row in rows], dtype=dtype, device="cuda")
        for i, dtype in enumerate(dtypes)
    ]
    token_ids = torch.full((len(rows),), -1, dtype=torch.int32, device="cuda")
    native.sample(token_ids, logits, *columns)
    return token_ids.tolist()


def random_rows(rng: random.Random, filters: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(*f, rng.randrange(-(2**63), 2**63), rng.randrange(2**31)) for f in filters]


def distance_to_a_border(logits: torch.Tensor, row: tuple[Any, ...]) -> float:
    """How far, as a share of the total weight, the draw is from falling to another token."""
    temperature, top_k, top_p, min_p, seed, step_idx = row
    rounded = [torch.tensor(x, dtype=torch.float32).item() for x in (temperature, top_p, min_p)]
    temperature, top_p, min_p = rounded
    logits = torch.where(logits.isnan(), -INF, logits.double())
    weights = torch.exp((logits - logits.max()) / temperature)
    order = torch.sort(logits, descending=True, stable=True).indices
    distances = [torch.ones(1, dtype=torch.float64)]
    if 0 < top_k < len(order):
        order = order[:top_k]
    if top_p < 1:
        sums = weights[order].cumsum(0)
        before = (sums - weights[order]) / sums[-1]
        distances.append((before - top_p).abs().cpu())
        order = order[: max(1, int((before < top_p).sum()))]
    if min_p > 0:
        distances.append((weights[order] - min_p).abs().cpu())
        order = order[weights[order] >= min_p]
    kept = order.sort().values
    sums = weights[kept].cumsum(0) / weights[kept].sum()
    distances.append((sums - reference.uniform(seed, step_idx)).abs().cpu())
    return float(torch.cat(distances).min())


def assert_as_the_reference(logits: torch.Tensor, rows: list[tuple[Any, ...]]) -> None:
    actual = sample(logits, rows)
    for r, row in enumerate(rows):
        expected = torch.empty(1, dtype=torch.int32)
        columns = [torch.tensor([x]) for x in row]
        columns[0], columns[2], columns[3] = (columns[i].float() for i in (0, 2, 3))
        reference.sample(expected, logits[r : r + 1], *columns)
        if actual[r] != expected.item():
            distance = distance_to_a_border(logits[r], row)
            assert distance < BORDER, f"{row}: {actual[r]} != {expected.item()}, {distance:.2g}"


@pytest.mark.parametrize("vocab_size", [1, 15, 17, 1000, 4099, 32_000, 128_256])
@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_every_filter_draws_what_the_reference_draws(vocab_size: int, scale: float) -> None:
    """Flat and peaked rows; with scale 1 many logits are equal; rows begin anywhere."""
    rng = random.Random(vocab_size)
    generator = torch.Generator("cuda").manual_seed(vocab_size)
    repeats = 3
    logits = torch.randn(len(FILTERS) * repeats, vocab_size + 7, generator=generator, device="cuda")
    logits *= scale
    if scale == 1.0:
        logits = (logits * 4).round() / 4
    rows = random_rows(rng, [f for f in FILTERS for _ in range(repeats)])
    assert_as_the_reference(logits[:, 3 : 3 + vocab_size], rows)
    if vocab_size % 4 == 0:
        assert_as_the_reference(logits[:, :vocab_size].contiguous(), rows)


@pytest.mark.parametrize("filters", [(1.0, 9000, 1.0, 0.0), (1.0, 0, 0.5, 0.0)], ids=str)
def test_ties_in_a_crowd_go_to_the_lower_ids(filters: tuple[Any, ...]) -> None:
    logits = torch.zeros(4, 128_256, device="cuda")
    logits[:, 5::3] = 1.0
    assert_as_the_reference(logits, [(*filters, 9, i) for i in range(4)])


def test_the_uniform_number_is_that_of_the_reference() -> None:
    # Equal logits: the id is the uniform number's place among `vocab_size` equal cells.
    rng = random.Random(1)
    rows, vocab_size = 300, 50_000
    params = [
        (1.0, 0, 1.0, 0.0, rng.randrange(-(2**63), 2**63), i * 7_000_001 % 2**31)
        for i in range(rows)
    ]
    drawn = sample(torch.zeros(rows, vocab_size, device="cuda"), params)
    assert drawn == [math.floor(reference.uniform(p[4], p[5]) * vocab_size) for p in params]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_what_cannot_be_drawn(filters: tuple[Any, ...]) -> None:
    for row, allowed in [
        ([-INF, 1.0, NAN, 1.0, -INF], {1, 3}),
        ([NAN, -INF, 0.0, NAN, NAN], {2}),
        ([-INF, INF, 1.0, INF, 0.0], {1}),
        ([-INF] * 5, {0}),
        ([NAN] * 5, {0}),
        ([-3e38, 3e38, -3e38, 3e38, 0.0], {1, 3}),
        ([-0.0, 0.0, -1e9, 0.0, -0.0], {0, 1, 3, 4}),
    ]:
        logits = torch.tensor([row] * 40, device="cuda")
        assert set(sample(logits, [(*filters, 5, i) for i in range(40)])) <= allowed


def test_a_row_does_not_depend_on_the_batch_and_a_graph_draws_the_same() -> None:
    rng = random.Random(2)
    logits = torch.randn(len(FILTERS), 128_256, device="cuda") * 3
    rows = random_rows(rng, list(FILTERS))
    together = sample(logits, rows)
    for r in range(0, len(rows), 4):
        assert sample(logits[r : r + 1], rows[r : r + 1]) == [together[r]]

    one = [torch.tensor([x], device="cuda") for x in (0.8, 50, 0.9, 0.0, 1, 0)]
    one = [
        x.to(t)
        for x, t in zip(
            one,
            [torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int32],
            strict=True,
        )
    ]
    token_ids = torch.zeros(1, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native.sample(token_ids, logits[:1], *one)
    for step_idx in range(5):
        one[5].fill_(step_idx)
        graph.replay()
        expected = sample(logits[:1], [(0.8, 50, 0.9, 0.0, 1, step_idx)])
        assert token_ids.tolist() == expected


def test_no_rows() -> None:
    assert sample(torch.empty(0, 10, device="cuda"), []) == []
