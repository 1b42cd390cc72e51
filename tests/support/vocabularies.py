"""Small tokenizers of every kind of decoder, for the text tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from tinyvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>"]
# Spaces in every position, characters of two to four bytes, marks, a joiner, halves of flags.
PIECES = [
    *(
        "▁",
        "▁▁",
        "▁▁▁▁",
        "▁a",
        "a▁",
        "▁a▁b",
        "a",
        "b",
        "ab",
        "ba",
        "aab",
        "\n",
        "\t",
        ".",
        " ",
        "  ",
    ),
    *(
        "é",
        "e\u0301",
        "\u0301",
        "日",
        "本語",
        "مر",
        "حبا",
        "😀",
        "👨",
        "\u200d",
        "👩",
        "\U0001f1e9",
        "\U0001f1ea",
    ),
    *(
        "\ufffd",
        "##a",
        "##b",
        "##",
        " do not",
        "n't",
        "a</w>",
        "</w>",
        "<0x+5>",
        "<0xZZ>",
        "<0xé>",
        "|",
    ),
]
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
# GPT-2's: a printable byte is its own character, the others are U+0100 and on.
BYTE_LEVEL_ALPHABET = [
    chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)
]
BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def _tokenizer(pieces: list[str], **kwargs: object) -> tokenizers.Tokenizer:
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*SPECIALS, *pieces]))}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", **kwargs))
    backend.add_special_tokens(SPECIALS)
    backend.add_tokens(
        [
            AddedToken("▁Added ▁One", normalized=True),
            AddedToken("plain Ġ text", normalized=False),
            AddedToken("<0x41>" if "<0x41>" in pieces else "ÀÉ", normalized=True),
        ]
    )
    return backend


def _with_decoder(decoder: decoders.Decoder | None) -> Callable[[], tokenizers.Tokenizer]:
    def make() -> tokenizers.Tokenizer:
        backend = _tokenizer([*PIECES, *BYTE_PIECES], byte_fallback=True, fuse_unk=True)
        if decoder is not None:
            backend.decoder = decoder
        return backend

    return make


def llama2_style() -> tokenizers.Tokenizer:
    """As transformers converts Llama 2's sentencepiece model."""
    backend = _with_decoder(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )()
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return backend


def byte_level() -> tokenizers.Tokenizer:
    """Every byte, some longer pieces, and added tokens inside and outside of the byte alphabet."""
    assert sorted(BYTE_LEVEL_ALPHABET) == sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = _tokenizer([*BYTE_LEVEL_ALPHABET, "Ġa", "ðŁĺ", "ðŁĺĢ", "Ã", "Ã©", "åħ", "Ġ\u00ad"])
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


_REPLACE, _FALLBACK, _FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()

STREAMING: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_fuse": lambda: _reset(
        byte_level(), decoders.Sequence([decoders.ByteLevel(), _FUSE])
    ),
    "llama2": llama2_style,
    "gemma": _with_decoder(decoders.Sequence([_REPLACE, _FALLBACK, _FUSE])),
    "strip_three": _with_decoder(
        decoders.Sequence([_REPLACE, _FALLBACK, _FUSE, decoders.Strip(" ", 3, 0), _FUSE])
    ),
    "strip_each": _with_decoder(
        decoders.Sequence([_REPLACE, decoders.Strip(" ", 1, 0), _FALLBACK])
    ),
    "nested": _with_decoder(
        decoders.Sequence([decoders.Sequence([_REPLACE]), decoders.Sequence([_FALLBACK, _FUSE])])
    ),
    "regex": _with_decoder(
        decoders.Sequence(
            [decoders.Replace(Regex("▁+"), " "), decoders.Replace("a", "éé"), _FALLBACK]
        )
    ),
    "metaspace_always": _with_decoder(decoders.Metaspace("▁", "always")),
    "metaspace_first": _with_decoder(decoders.Metaspace("▁", "first")),
    "metaspace_never": _with_decoder(decoders.Metaspace("▁", "never")),
    "metaspace_fallback": _with_decoder(
        decoders.Sequence([decoders.Metaspace("▁", "always"), _FALLBACK, _FUSE])
    ),
    "word_piece": _with_decoder(decoders.WordPiece("##", True)),
    "word_piece_plain": _with_decoder(decoders.WordPiece("##", False)),
    "none": _with_decoder(None),
}
HOLDING: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bpe_suffix": _with_decoder(decoders.BPEDecoder("</w>")),
    "ctc": _with_decoder(decoders.CTC("<s>", "|", True)),
    "replace_fused": _with_decoder(decoders.Sequence([_FUSE, decoders.Replace("ab", "c")])),
    "byte_level_strip": lambda: _reset(
        byte_level(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])
    ),
}


def _reset(backend: tokenizers.Tokenizer, decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    backend.decoder = decoder
    return backend


def make_tokenizer(name: str) -> Tokenizer:
    return Tokenizer((STREAMING | HOLDING)[name](), path=name)
