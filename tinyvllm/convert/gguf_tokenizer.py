"""The tokenizer inside a GGUF file -> tokenizer.json and tokenizer_config.json.

GGUF keeps the vocabulary and names the rest (`tokenizer.ggml.model`, `.pre`); the pipeline around
it (normalizer, pre-tokenizer, decoder) is rebuilt here as the original repositories publish it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from tokenizers import Tokenizer

from tinyvllm.errors import TokenizerError

if TYPE_CHECKING:
    from tinyvllm.convert.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_SPACE = "\u2581"  # sentencepiece's visible space


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


_GPT2: list[dict[str, Any]] = [_byte_level(use_regex=True)]
# tokenizer.ggml.pre -> the steps that cut text into words before byte-level BPE.
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "smollm": [{"type": "Digits", "individual_digits": True}, *_GPT2],
    "llama-bpe": [_split(_LLAMA3_WORDS), _byte_level(use_regex=False)],
    "qwen2": [_split(_QWEN2_WORDS), _byte_level(use_regex=False)],
}


class _Vocabulary:
    """The checked `tokenizer.ggml.*` keys of one file."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.model = self.get("model", str)
        self.tokens: list[str] = self.get("tokens", list)
        types = self.get("token_type", list, [_NORMAL] * len(self.tokens))
        self.types: list[int] = types
        self.ids = {token: idx for idx, token in enumerate(self.tokens)}
        if not self.tokens or not all(isinstance(token, str) for token in self.tokens):
            self.fail("tokens must be a list of strings")
        if len(self.ids) != len(self.tokens):
            self.fail("tokens has the same token twice")
        if len(types) != len(self.tokens):
            self.fail(f"token_type has {len(types)} entries for {len(self.tokens)} tokens")

    def fail(self, problem: str) -> NoReturn:
        path = self.file.path
        raise TokenizerError(f"{path}: tokenizer.ggml.{problem}", path=path)

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(f"{key} must be a {kind.__name__}; got {str(value)[:100]!r}")
        return value

    def special(self, key: str) -> str | None:
        """The token whose id `key` gives, if it gives one."""
        idx = self.special_id(key)
        return None if idx is None else self.tokens[idx]

    def special_id(self, key: str) -> int | None:
        if f"tokenizer.ggml.{key}" not in self.file.metadata:
            return None
        idx = self.get(key, int)
        if not 0 <= idx < len(self.tokens):
            self.fail(f"{key} is {idx}, outside the vocabulary of {len(self.tokens)}")
        return int(idx)


def special_token_ids(file: GgufFile) -> dict[str, Any]:
    """bos, eos (also end of turn, end of message) and pad ids as generation_config.json has them.

    Raises `TokenizerError` naming the file and the key.
    """
    vocabulary = _Vocabulary(file)
    ids: dict[str, Any] = {}
    for name in ("bos", "padding"):
        if (idx := vocabulary.special_id(f"{name}_token_id")) is not None:
            ids["pad_token_id" if name == "padding" else "bos_token_id"] = idx
    ends = (vocabulary.special_id(f"{name}_token_id") for name in ("eos", "eot", "eom"))
    eos = list(dict.fromkeys(idx for idx in ends if idx is not None))
    if eos:
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return ids


def convert_tokenizer(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of tokenizer.json and tokenizer_config.json.

    Raises `TokenizerError` for a tokenizer model or pre-tokenizer that is not known, by name.
    """
    vocabulary = _Vocabulary(file)
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if vocabulary.model not in builders:
        vocabulary.fail(f"model is {vocabulary.model!r}; supported: {', '.join(builders)}")
    pipeline = builders[vocabulary.model](vocabulary)
    is_llama3 = vocabulary.model == "gpt2" and pipeline["model"]["ignore_merges"]
    adds_bos = is_llama3 or vocabulary.model == "llama"
    add_bos = vocabulary.get("add_bos_token", bool, adds_bos)
    add_eos = vocabulary.get("add_eos_token", bool, False)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "post_processor": _post_processor(vocabulary, add_bos, add_eos),
        **pipeline,
    }
    try:
        Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as exc:  # the package raises nothing more specific
        vocabulary.fail(f"tokens and merges do not make a tokenizer: {exc}")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := vocabulary.special(f"{key}_token_id")) is not None:
            config[f"{name}_token"] = token
    template = file.metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return tokenizer, config


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    special = (_UNKNOWN, _CONTROL)
    return [
        {
            "id": idx,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for idx, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (*special, _USER_DEFINED)
    ]


def _post_processor(vocabulary: _Vocabulary, add_bos: bool, add_eos: bool) -> dict[str, Any] | None:
    """Puts bos before and eos after a text, where the model wants them."""
    bos = vocabulary.special("bos_token_id") if add_bos else None
    eos = vocabulary.special("eos_token_id") if add_eos else None
    if bos is None and eos is None:
        return None

    def token(content: str | None, type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": content, "type_id": type_id}}] if content else []

    def text(name: str, type_id: int) -> list[dict[str, Any]]:
        middle = {"Sequence": {"id": name, "type_id": type_id}}
        return [*token(bos, type_id), middle, *token(eos, type_id)]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {
            content: {"id": content, "ids": [vocabulary.ids[content]], "tokens": [content]}
            for content in (bos, eos)
            if content
        },
    }


def _byte_level_bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    """GPT-2's scheme: bytes are written as letters and merged; no text is unknown."""
    name = vocabulary.get("pre", str, "default")
    if name not in _PRE_TOKENIZERS:
        vocabulary.fail(f"pre is {name!r}; supported: {', '.join(_PRE_TOKENIZERS)}")
    merges = vocabulary.get("merges", list)
    # The separator is the first space that is not itself the left part.
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        vocabulary.fail("merges has an entry without two parts")
    return {
        "normalizer": {"type": "NFC"} if name == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[name]},
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": name == "llama-bpe",  # a word in the vocabulary is one token
            "vocab": vocabulary.ids,
            "merges": pairs,
        },
    }


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Llama 2's scheme: spaces are written as a letter; what is unknown falls back to bytes."""
    decoder = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    if vocabulary.get("add_space_prefix", bool, True):
        normalizer.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizer},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.special("unknown_token_id"),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": _merges_by_score(vocabulary),
        },
    }


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Sentencepiece merges the pair whose union scores best; BPE wants that as a ranked list."""
    scores = vocabulary.get("scores", list)
    if len(scores) != len(vocabulary.tokens) or not all(isinstance(s, float) for s in scores):
        vocabulary.fail(f"scores must be {len(vocabulary.tokens)} floats, one for each token")
    mergeable = {
        token: score
        for token, score, kind in zip(vocabulary.tokens, scores, vocabulary.types, strict=True)
        if kind == _NORMAL
    }
    merges = [
        (score, token[:cut], token[cut:])
        for token, score in mergeable.items()
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]
    # Ties (the ways to build one token) are ranked as transformers' own conversion ranks them.
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]
