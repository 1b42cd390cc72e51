"""Structured output: which tokens a JSON schema, a regular expression or a grammar allows next.

    GrammarCompiler.compile(params) ──► Matcher ──► fill_mask(row) ──► the step ──► advance(token)
     any thread, once a request                     ▲____________________________________│

llguidance does the parsing; a mask costs it tens of microseconds. It is an optional extra, imported
at the first request that needs it: `pip install llguidance`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from tinyvllm.detokenizer import token_bytes
from tinyvllm.errors import InvalidParameterError, NotSupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from tinyvllm.sampling_params import SamplingParams
    from tinyvllm.tokenizer import Tokenizer

_MAX_CACHED = 32  # compiled grammars; one is about a megabyte


def grammar_of(params: SamplingParams) -> tuple[str, str] | None:
    """(name of the parameter, its text) for a request with structured output, else None."""
    for name in ("json_schema", "regex", "grammar"):
        text = getattr(params, name)
        if text is not None:
            return name, text
    return None


class Matcher:
    """How far one sequence has followed its grammar. Not for use by two threads at a time."""

    __slots__ = ("_matcher", "_name")

    def __init__(self, matcher: Any, name: str) -> None:
        self._matcher = matcher  # llguidance.LLMatcher
        self._name = name

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Set the bits of the tokens that may come next: bit i % 32 of row[i // 32] for token i.

        `row` is [ceil(vocab_size / 32)], contiguous. A complete text allows an EOS; one that
        cannot go on allows nothing else. Raises `InvalidParameterError` when the grammar turns
        out to need more work than its limits grant.
        """
        assert row.flags.c_contiguous and row.dtype.itemsize == 4, (row.flags, row.dtype)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()

    def advance(self, token_id: int) -> None:
        """Take the token that was drawn. Raises `InvalidParameterError` where the grammar has no
        such token: then it was not drawn under this mask."""
        if not self._matcher.consume_token(token_id):
            self._check()

    @property
    def is_complete(self) -> bool:
        """The text so far is one that the grammar accepts; it may still allow a longer one."""
        return bool(self._matcher.is_accepting())

    def fork(self) -> Matcher:
        """One that goes on from here by itself."""
        return Matcher(self._matcher.deep_copy(), self._name)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _error(self._name, self._matcher.get_error())


class GrammarCompiler:
    """Compiles the grammars of one model's requests, and keeps those used last. Any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """`vocab_size`: columns of the logits, which may be more than the tokenizer has."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [i for i in eos_token_ids if i < vocab_size]
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # llguidance.LLTokenizer
        self._compiled: OrderedDict[tuple[str, str], Matcher] = OrderedDict()

    def compile(self, params: SamplingParams) -> Matcher | None:
        """A matcher at its beginning; None when the request asks for no structure.

        Takes a millisecond for a small schema, and about a second at the first call for a model.
        Raises `InvalidParameterError` naming the parameter for a grammar that is wrong or too
        large, `NotSupportedError` when llguidance is not installed or the tokenizer's decoder is
        of a kind whose tokens have no text of their own.
        """
        key = grammar_of(params)
        if key is None:
            return None
        with self._lock:
            found = self._compiled.get(key)
            if found is None:
                found = self._compiled[key] = self._compile(*key)
                if len(self._compiled) > _MAX_CACHED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return found.fork()

    def _compile(self, name: str, text: str) -> Matcher:
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise NotSupportedError(
                f"{name} needs llguidance: pip install llguidance ({error})", param=name
            ) from error
        if self._vocabulary is None:
            self._vocabulary = self._load_vocabulary(name)
        convert = {
            "json_schema": LLMatcher.grammar_from_json_schema,
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }[name]
        try:
            matcher = LLMatcher(self._vocabulary, convert(text), log_level=0)
        except ValueError as error:
            raise _error(name, str(error)) from error
        if matcher.is_error():
            raise _error(name, matcher.get_error())
        return Matcher(matcher, name)

    def _load_vocabulary(self, name: str) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        texts = token_bytes(self._tokenizer, self._vocab_size)
        if texts is None:
            raise NotSupportedError(
                f"{name}: this model's tokenizer has a decoder whose tokens have no text of their "
                "own, so no grammar can say which may come next",
                param=name,
            )
        if not self._eos_token_ids:
            raise NotSupportedError(
                f"{name}: this model has no EOS token, which ends a structured text", param=name
            )
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, texts, self._eos_token_ids[0])),
            eos_token=self._eos_token_ids,
        )


class _Vocabulary:
    """What llguidance asks of a tokenizer: the bytes of every token."""

    def __init__(self, tokenizer: Tokenizer, texts: list[bytes | None], eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.bos_token_id = None
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        for token_id, text in enumerate(texts):
            if text is None or token_id in tokenizer.special_ids:
                # Without text: only a grammar that names it, as <|name|>, allows it.
                piece = tokenizer.piece(token_id, skip_special_tokens=False)
                text = (piece or f"<[{token_id}]>").encode()
                self.special_token_ids.append(token_id)
            self.tokens.append(text)
        special = set(self.special_token_ids)
        self._ids = {text: i for i, text in enumerate(self.tokens) if i not in special}
        self._max_len = max(map(len, self._ids), default=0)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens of a text that the grammar leaves no choice about, as the model would have
        them; of exactly this text, where the tokenizer puts a space before it or changes it."""
        data = text.encode() if isinstance(text, str) else text
        ids = self._tokenizer.encode(data.decode("utf-8", "replace"), add_special_tokens=False)
        if b"".join(self.tokens[i] for i in ids) == data:
            return ids
        ids, at = [], 0
        while at < len(data):
            end = min(len(data), at + self._max_len)
            while end > at and data[at:end] not in self._ids:
                end -= 1
            if end == at:  # no token begins so
                break
            ids.append(self._ids[data[at:end]])
            at = end
        return ids


def _error(name: str, message: str) -> InvalidParameterError:
    return InvalidParameterError(f"{name} cannot be used: {message.strip()}", param=name)
