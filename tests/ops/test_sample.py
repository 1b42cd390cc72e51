"""sample: against a definition by sorting, the distribution it draws from, and its edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tinyvllm import _C
from tinyvllm.ops import native, reference

INF = float("inf")
NAN = float("nan")


def sample(ops: Any, logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """Draws one id a row. A parameter is a number for all rows or a tensor of one for each."""
    rows = logits.shape[0]

    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        value = params.get(name, default)
        if isinstance(value, torch.Tensor):
            return value.to(dtype)
        return torch.full((rows,), value, dtype=dtype)

    token_ids = torch.full((rows,), -1, dtype=torch.int32)
    ops.sample(
        token_ids,
        logits,
        column("temperature", 1.0, torch.float32),
        column("top_k", 0, torch.int32),
        column("top_p", 1.0, torch.float32),
        column("min_p", 0.0, torch.float32),
        column("seeds", 0, torch.int64),
        column("step_idx", 0, torch.int32),
    )
    return token_ids


def random_logits(rows: int, vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * scale


def seeds(rows: int) -> torch.Tensor:
    """All over the 64 bits, negative ones included."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], expected: tuple[int, int, int, int]
) -> None:
    """The vectors that come with Random123."""
    assert reference.philox4x32_10(key, counter) == expected


@pytest.mark.usefixtures("isa")
def test_kernel_and_reference_draw_the_same_uniform_number() -> None:
    # Equal logits: the id is the uniform number's place among `vocab_size` equal cells.
    rows, vocab_size = 300, 50_000
    steps = torch.arange(rows) * 7_000_001 % 2**31
    drawn = sample(native, torch.zeros(rows, vocab_size), seeds=seeds(rows), step_idx=steps)
    expected = [
        math.floor(reference.uniform(seed, step) * vocab_size)
        for seed, step in zip(seeds(rows).tolist(), steps.tolist(), strict=True)
    ]
    assert drawn.tolist() == expected


@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 1000, 4099])
@pytest.mark.usefixtures("isa")
def test_temperature_zero_is_the_lowest_id_of_the_largest(vocab_size: int) -> None:
    logits = random_logits(20, vocab_size, 1.0).round(decimals=1)  # many ties
    logits[3:6] = 2.5
    drawn = sample(native, logits, temperature=torch.tensor([0.0, 1e-6] * 10))
    assert drawn.tolist() == logits.argmax(-1).tolist()
    assert sample(native, logits, top_k=1).tolist() == logits.argmax(-1).tolist()
    assert sample(native, logits, top_p=0.0).tolist() == logits.argmax(-1).tolist()


FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "min_p": 0.05},
    {"top_k": 2},
    {"top_k": 50},
    {"top_k": 700},
    {"top_k": 10**9},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 3.0, "top_k": 500, "top_p": 0.5},
    {"min_p": 1.0},
    {"min_p": 0.3, "top_p": 0.8},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 17, 1000, 8195])
@pytest.mark.parametrize("kind", ["peaked", "flat", "ties", "masked"])
@pytest.mark.usefixtures("isa")
def test_same_token_as_the_definition_by_sorting(
    filters: dict[str, float], vocab_size: int, kind: str
) -> None:
    rows = 12
    logits = random_logits(rows, vocab_size, {"peaked": 4.0, "flat": 0.01}.get(kind, 2.0))
    if kind == "ties":
        logits = logits.round()
    if kind == "masked":
        logits[:, 1::2] = -INF
        logits[:, 2::5] = NAN
    params = {**filters, "seeds": seeds(rows), "step_idx": torch.arange(rows)}
    expected = sample(reference, logits, **params)
    assert sample(native, logits, **params).tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        # Weights 8, 4, 4, 2, 1, 1 of 20 at temperature 1, ids in the order 3 0 5 1 2 4.
        ({}, [3, 0, 5, 1, 2, 4]),
        ({"top_k": 3}, [3, 0, 5]),
        ({"top_k": 2}, [3, 0]),  # a tie for the second place: the lower id
        ({"top_p": 0.41}, [3, 0]),  # 8 of 20 do not reach it, the token that does is kept
        ({"top_p": 0.59}, [3, 0]),
        ({"top_p": 0.61}, [3, 0, 5]),
        ({"top_k": 3, "top_p": 0.74}, [3, 0]),  # of the 16 that top_k left
        ({"min_p": 0.24}, [3, 0, 5, 1]),
        ({"min_p": 0.26}, [3, 0, 5]),
        ({"top_p": 0.95, "min_p": 0.13}, [3, 0, 5, 1]),
        ({"temperature": 0.5, "min_p": 0.2}, [3, 0, 5]),  # 64 16 16 4 1 1
    ],
    ids=str,
)
@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
def test_filters_keep_what_they_should(
    ops: Any, filters: dict[str, float], kept: list[int]
) -> None:
    weights = torch.tensor([4.0, 2.0, 1.0, 8.0, 1.0, 4.0])
    rows = 400
    logits = weights.log().repeat(rows, 1)
    drawn = sample(ops, logits, step_idx=torch.arange(rows), **filters)
    assert sorted(set(drawn.tolist())) == sorted(kept)


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 6}, {"top_p": 0.93}, {"temperature": 1.3, "min_p": 0.05}],
    ids=str,
)
def test_distribution(filters: dict[str, float]) -> None:
    """Chi-square over 40,000 draws with fixed seeds, against the filtered softmax."""
    rows, vocab_size = 40_000, 40
    row = random_logits(1, vocab_size, 1.5, seed=11)[0]
    drawn = sample(
        native,
        row.repeat(rows, 1),
        seeds=torch.arange(rows) // 8,
        step_idx=torch.arange(rows) % 8,
        **filters,
    )
    p = torch.softmax(row.double() / filters.get("temperature", 1.0), 0)
    order = p.argsort(descending=True)
    order = order[: int(filters.get("top_k", vocab_size))]
    within = p[order] / p[order].sum()
    order = order[within.cumsum(0) - within < filters.get("top_p", 1.0)]
    order = order[p[order] >= filters.get("min_p", 0.0) * p.max()]
    expected = p[order] / p[order].sum() * rows
    counts = torch.bincount(drawn, minlength=vocab_size)
    assert counts.sum() == counts[order].sum()
    cells = expected >= 5  # the usual condition; the others are pooled
    observed = torch.cat([counts[order][cells], counts[order][~cells].sum().view(1)]).double()
    pooled = torch.cat([expected[cells], expected[~cells].sum().view(1)])
    keep = pooled > 0
    statistic = float(((observed - pooled).square() / pooled)[keep].sum())
    freedom = int(keep.sum()) - 1
    # Wilson-Hilferty: the cube root of chi-square / freedom is nearly normal. One in 10,000: 3.72.
    deviation = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - deviation)) / deviation**0.5 < 3.72


@pytest.mark.usefixtures("isa")
def test_a_draw_depends_on_its_row_seed_and_step_alone(num_threads: int) -> None:
    rows = 60
    logits = random_logits(rows, 3000, 2.0)
    params = {
        "temperature": torch.rand(rows, generator=torch.Generator().manual_seed(1)) * 2,
        "top_k": torch.arange(rows) % 7 * 20,
        "top_p": 1 - (torch.arange(rows) % 5) * 0.1,
        "min_p": (torch.arange(rows) % 3) * 0.02,
        "seeds": seeds(rows),
        "step_idx": torch.arange(rows) % 4,
    }
    together = sample(native, logits, **params)
    wide = torch.full((rows, 3500), 50.0)
    wide[:, 100:3100] = logits
    assert sample(native, wide[:, 100:3100], **params).tolist() == together.tolist()
    _C.set_num_threads(1)
    for r in range(0, rows, 7):
        one = {name: value[r : r + 1] for name, value in params.items()}
        assert sample(native, logits[r : r + 1], **one).item() == together[r].item()
    _C.set_num_threads(num_threads)
    other = {**params, "step_idx": torch.arange(rows) % 4 + 1}
    assert sample(native, logits, **other).tolist() != together.tolist()


@pytest.mark.parametrize("ops", [native, reference], ids=["native", "reference"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_what_cannot_be_drawn(ops: Any, filters: dict[str, float]) -> None:
    rows = 50
    step_idx = torch.arange(rows)
    for row, allowed in [
        ([-INF, 1.0, NAN, 1.0, -INF], {1, 3}),
        ([NAN, -INF, 0.0, NAN, NAN], {2}),
        ([-INF, INF, 1.0, INF, 0.0], {1}),
        ([-INF, -INF, -INF, -INF, -INF], {0}),
        ([-3e38, 3e38, -3e38, 3e38, 0.0], {1, 3}),
    ]:
        drawn = sample(ops, torch.tensor([row]).repeat(rows, 1), step_idx=step_idx, **filters)
        assert set(drawn.tolist()) <= allowed
    nothing = sample(ops, torch.full((3, 40), NAN), temperature=0.0, **filters)
    assert nothing.tolist() == [0, 0, 0]


def test_a_nan_parameter_is_greedy() -> None:
    logits = random_logits(4, 50, 1.0)
    for name in ("temperature", "top_p"):
        assert sample(native, logits, **{name: NAN}).tolist() == logits.argmax(-1).tolist()


def test_no_rows() -> None:
    assert sample(native, torch.empty(0, 10)).shape == (0,)
