"""AllowedTokens: bits of rows, and what changes them when."""

from __future__ import annotations

import numpy as np
import pytest
from support.vocabularies import make_tokenizer

from tinyvllm.allowed_tokens import AllowedTokens, bad_word_ids, bits_of
from tinyvllm.errors import InvalidParameterError
from tinyvllm.sampling_params import SamplingParams
from tinyvllm.structured import GrammarCompiler

VOCAB_SIZE = 100


def ids_in(row: np.ndarray) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return {int(i) for i in bits[:VOCAB_SIZE].nonzero()[0]}


def forbidden(allowed: AllowedTokens, may_stop: bool = True) -> set[int]:
    return set(range(VOCAB_SIZE)) - ids_in(allowed.row(may_stop))


def make(bad_words: list[list[int]] = [], stop_ids: tuple[int, ...] = (), **params: object):  # noqa: B006
    return AllowedTokens(SamplingParams(**params), VOCAB_SIZE, stop_ids, bad_words)


@pytest.mark.parametrize("ids", [[], [0], [31, 32, 63, 64, 99], list(range(100))])
def test_bits_of(ids: list[int]) -> None:
    row = bits_of(ids, VOCAB_SIZE)
    assert row.dtype == np.int32 and len(row) == 4
    assert ids_in(row) == set(ids)


def test_stop_ids_wait_for_min_tokens_unless_nothing_else_is_left() -> None:
    allowed = make(stop_ids=(5, 99, 2000), min_tokens=3)
    assert forbidden(allowed, may_stop=False) == {5, 99}
    assert forbidden(allowed, may_stop=True) == set()
    assert not allowed.depends_on_output
    only = make(stop_ids=(5, 99), min_tokens=3, allowed_token_ids=[5])
    assert ids_in(only.row(False)) == {5}


def test_bad_words_by_their_last_token() -> None:
    allowed = make(bad_words=[[31], [1, 63], [1, 2, 95], [2, 2]])
    assert allowed.depends_on_output
    for output, expected in [
        ([], {31}),
        ([1], {31, 63}),
        ([1, 2], {31, 95, 2}),
        ([1, 2, 1], {31, 63}),
        ([2], {31, 2}),
        ([3, 1, 2], {31, 95, 2}),
    ]:
        allowed.take(output)
        assert forbidden(allowed) == expected
        assert allowed.num_taken == len(output)
    assert allowed.version == 6
    assert not make(bad_words=[[31]]).depends_on_output


def test_a_fork_goes_on_by_itself() -> None:
    tokenizer = make_tokenizer("byte_level")
    grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2])
    params = SamplingParams(regex="ab")
    matcher = grammars.compile(params)
    first = AllowedTokens(params, tokenizer.vocab_size, [2], (), matcher)
    (a_id,), (b_id,) = tokenizer.encode("a"), tokenizer.encode("b")
    second = first.fork()
    first.take([a_id])
    assert (first.row(True) == bits_of([b_id], tokenizer.vocab_size)).all()
    assert (second.row(True) == bits_of([a_id], tokenizer.vocab_size)).all()
    second.take([a_id])
    second.take([a_id, b_id])
    assert (second.row(True) == bits_of([2], tokenizer.vocab_size)).all()
    assert (first.row(True) == bits_of([b_id], tokenizer.vocab_size)).all()


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(InvalidParameterError, match="leave no token to draw after 0 tokens"):
        make(bad_words=[[7]], allowed_token_ids=[7])
    allowed = make(bad_words=[[7, 7]], allowed_token_ids=[7])
    with pytest.raises(InvalidParameterError, match="leave no token to draw after 1 tokens"):
        allowed.take([7])


class _Words:
    """A tokenizer with a vocabulary of words."""

    def __init__(self, **ids: list[int]) -> None:
        self.ids = {name.replace("_", " "): value for name, value in ids.items()}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert add_special_tokens is False
        return self.ids[text]


@pytest.mark.parametrize(
    ("spaced", "expected"),
    [
        ([8], [[1], [8]]),  # a token of its own with the space
        ([3, 1], [[1]]),  # the space apart: the word's token is forbidden already
        ([1], [[1]]),
    ],
)
def test_words_with_a_space_before_them(spaced: list[int], expected: list[list[int]]) -> None:
    tokenizer = _Words(dog=[1], _dog=spaced)
    for word in ("dog", " dog"):
        assert bad_word_ids(tokenizer, [word]) == expected  # type: ignore[arg-type]
    with pytest.raises(InvalidParameterError, match="'x' has no tokens") as error:
        bad_word_ids(_Words(x=[]), ["x"])  # type: ignore[arg-type]
    assert error.value.param == "bad_words"
