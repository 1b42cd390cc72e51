"""AllowedTokens: which tokens a sequence may draw next, as bits.

    allowed_token_ids, bad_words of one token     once
    bad_words of several tokens, grammars         after each token (`take`)
    stop ids before min_tokens                    by the output's length alone

A row is [ceil(vocab_size / 32)] int32, bit i % 32 of word i // 32 for token i, which is what
`ops.adjust_logits` reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinyvllm.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tinyvllm.sampling_params import SamplingParams
    from tinyvllm.structured import Matcher
    from tinyvllm.tokenizer import Tokenizer

    Row = NDArray[np.int32]


class AllowedTokens:
    """Of one sequence. `version` changes when a row may have; `num_taken` is the output's length
    that it is for."""

    __slots__ = ("_base", "_matcher", "_rows", "_stops", "_words", "num_taken", "version")

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stop_ids: Iterable[int],
        bad_words: Sequence[Sequence[int]] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """`bad_words`: their token ids (`bad_word_ids`). Raises `InvalidParameterError` when
        nothing could ever be drawn."""
        if params.allowed_token_ids is None:
            self._base = np.full(-(-vocab_size // 32), -1, np.int32)
        else:
            self._base = bits_of(params.allowed_token_ids, vocab_size)
        self._base &= ~bits_of((ids[0] for ids in bad_words if len(ids) == 1), vocab_size)
        self._words = [(tuple(ids[:-1]), ids[-1]) for ids in bad_words if len(ids) > 1]
        self._stops = ~bits_of((i for i in stop_ids if i < vocab_size), vocab_size)
        self._matcher = matcher
        self.num_taken = 0
        self.version = 0
        self._rows = self._update(())

    @property
    def depends_on_output(self) -> bool:
        """`take` has to see each token before the next is drawn."""
        return bool(self._words) or self._matcher is not None

    def take(self, output: Sequence[int]) -> None:
        """The output so far. Raises `InvalidParameterError` when nothing may follow it."""
        if self._matcher is not None:
            for token_id in output[self.num_taken :]:
                self._matcher.advance(token_id)
        self.num_taken = len(output)
        self._rows = self._update(output)
        self.version += 1

    def row(self, may_stop: bool) -> Row:
        """The bits; without those of stop ids unless the sequence `may_stop` or could do nothing
        else. Not to be changed."""
        return self._rows[may_stop]

    def fork(self) -> AllowedTokens:
        """For another choice of the request, from here on its own."""
        other = object.__new__(AllowedTokens)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        if self._matcher is not None:
            other._matcher = self._matcher.fork()
        return other

    def _update(self, output: Sequence[int]) -> tuple[Row, Row]:
        row = self._base
        if self.depends_on_output:
            row = row.copy()
            if self._matcher is not None:
                self._matcher.fill_mask(row)
                row &= self._base
            for prefix, last in self._words:
                if tuple(output[-len(prefix) :]) == prefix:
                    row.view(np.uint32)[last // 32] &= np.uint32(~(1 << last % 32) & 0xFFFFFFFF)
        if not row.any():
            raise InvalidParameterError(
                "allowed_token_ids, bad_words and the grammar leave no token to draw after "
                f"{len(output)} tokens of output"
            )
        unstopped = row & self._stops
        return (unstopped if unstopped.any() else row), row


def bits_of(token_ids: Iterable[int], vocab_size: int) -> Row:
    """A row with the bits of `token_ids`."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.fromiter(token_ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[list[int]]:
    """Token ids of each word: without a space before it, and with one where that makes another
    first token and no more of them, as vLLM does it."""
    found: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not plain:
            raise InvalidParameterError(f"bad_words: {word!r} has no tokens", param="bad_words")
        found.append(plain)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found.append(spaced)
    return found
