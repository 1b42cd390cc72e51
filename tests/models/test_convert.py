"""GGUF -> model directory: weights to the bit, tokenizers as llama.cpp cuts, damage named."""

from __future__ import annotations

import json
import random
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from support.forward import PagedRunner
from support.tiny_gguf import QUANTIZATION, gguf_name, make_tiny_gguf
from support.tiny_models import CHAT_TEMPLATE
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinyvllm.convert import convert_gguf
from tinyvllm.convert.__main__ import main
from tinyvllm.convert.gguf_file import GgufTensor
from tinyvllm.errors import CheckpointError, ModelError, TinyvllmError, TokenizerError
from tinyvllm.loader import load_config, load_model
from tinyvllm.models.rope import inverse_frequencies
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Q = QUANTIZATION


def convert(path: Path, **kwargs: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    weights = make_tiny_gguf(path / "in.gguf", **kwargs)
    convert_gguf(path / "in.gguf", path / "out")
    return path / "out", weights


@pytest.mark.parametrize(
    "quantization",
    [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.TQ1_0],
    ids=lambda q: q.name,
)
def test_weights_are_those_of_the_file_rounded_once(tmp_path: Path, quantization: Any) -> None:
    """hidden_size 256 so that every block size fits; q and k come out in HF's row order."""
    out, weights = convert(
        tmp_path, quantization=quantization, hidden_size=256, intermediate_size=256
    )
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(stored[name], weight.to(torch.bfloat16)), name


def test_k_quants_are_expanded(tmp_path: Path) -> None:
    """The gguf package cannot write Q4_K: one row of it is made by hand."""
    row = struct.pack("<ee", 0.5, 0.25) + bytes([1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0])
    row += bytes([0x21] * 128)  # low nibbles 1, high nibbles 2
    data = np.frombuffer(row, np.uint8).reshape(1, -1)
    values = GgufTensor(tmp_path, "x", (1, 256), Q.Q4_K, data).dequantize_rows(0, 1)
    # d * scale * quant - dmin * min, where the first four blocks of 32 have scales 1 to 4, mins 0.
    expected = [0.5 * scale * quant for scale, quant in ((1, 1), (2, 2), (3, 1), (4, 2))]
    assert values[0, :128:32].tolist() == expected
    with pytest.raises(CheckpointError, match="tensor x is quantized as Q8_K, which is not"):
        GgufTensor(tmp_path, "x", (1, 256), Q.Q8_K, data).dequantize_rows(0, 1)


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": False}),
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
        ("Qwen2ForCausalLM", {}),
        ("Qwen3ForCausalLM", {"head_dim": 128}),
    ],
)
def test_architectures_load_and_agree_with_transformers(
    tmp_path: Path, architecture: str, overrides: dict[str, Any]
) -> None:
    out, _ = convert(tmp_path, architecture=architecture, **overrides)
    source, config = load_config(tmp_path / "in.source"), load_config(out)
    assert config == source
    ids = list(range(5, 40))
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    device = torch.device("cpu")
    model = load_model(
        out, config, get_ops("reference"), dtype=torch.float32, device=device, max_model_len=64
    )
    logits = PagedRunner(model, max_len=64).run({0: ids})[0]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def llama3_rope_freqs(factor: float) -> np.ndarray[Any, Any]:
    """As llama.cpp's converter computes them for head_dim 64."""
    freqs = 1.0 / 500000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    divisors = []
    for freq in freqs.tolist():
        wavelen = 2 * np.pi / freq
        if wavelen < 8192 / 4:
            divisors.append(1.0)
        elif wavelen > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelen - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_freqs_become_llama3_rope(tmp_path: Path, factor: float) -> None:
    freqs = llama3_rope_freqs(factor)
    out, _ = convert(tmp_path, rope_theta=5e5, tensors={"rope_freqs.weight": freqs})
    rope = load_config(out).rope
    assert (rope.rope_type, rope.factor, rope.rope_theta) == ("llama3", factor, 5e5)
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    expected = plain / torch.from_numpy(freqs)
    torch.testing.assert_close(inverse_frequencies(rope, 64), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "metadata",
    [
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"llama.rope.scale_linear": 4.0},
    ],
)
def test_linear_rope_scaling(tmp_path: Path, metadata: dict[str, Any]) -> None:
    out, _ = convert(tmp_path, metadata=metadata)
    rope = load_config(out).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


def test_end_tokens_and_template(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0, "tokenizer.ggml.padding_token_id": 0}
    out, _ = convert(tmp_path, metadata=metadata)
    assert load_config(out).eos_token_ids == (2, 0)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert tokenizer.decode([1, 2, 60], skip_special_tokens=True) == tokenizer.decode([60])


# What llama.cpp's own tokenizer makes of the same tiny vocabulary (recorded).
SPM_TEXTS: list[tuple[str, list[int]]] = [
    ("hello world", [282, 287]),
    ("the hello the", [276, 282, 276]),
    ("  hello  world ", [288, 282, 259, 287, 259]),
    ("日 é 🎉", [259, 268, 259, 267, 259, 243, 162, 145, 140]),
    ("hell\nworld", [281, 13, 270, 283, 286]),
    ("thehello", [276, 280, 261]),
    ("</s>hello", [2, 282]),
    ("a<0x41>b", [259, 265, 63, 51, 123, 55, 52, 65, 101]),
    ("", []),
]


def test_sentencepiece_vocabulary_cuts_as_llama_cpp(tmp_path: Path) -> None:
    out, _ = convert(tmp_path, tokenizer="llama")
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text, ids in SPM_TEXTS:
        assert tokenizer.encode(text).ids == [1, *ids], text
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.decode(ids) == text.replace("</s>", "")


def test_sentencepiece_without_space_prefix(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    out, _ = convert(tmp_path, tokenizer="llama", metadata=metadata)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("hello the").ids == [280, 261, 276]
    assert tokenizer.decode([280, 261, 276]) == "hello the"


@pytest.mark.parametrize(
    ("pre", "adds_bos", "words"),
    [
        ("smollm", False, ["2", "0", "2", "4", " ", "x"]),
        ("llama-bpe", True, ["202", "4", " ", "x"]),
        ("qwen2", False, ["2", "0", "2", "4", " ", "x"]),
        ("gpt-2", False, ["2024", " ", "x"]),
    ],
)
def test_byte_level_pre_tokenizers(
    tmp_path: Path, pre: str, adds_bos: bool, words: list[str]
) -> None:
    out, _ = convert(tmp_path, metadata={"tokenizer.ggml.pre": pre})
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    cut = tokenizer.pre_tokenizer.pre_tokenize_str("2024  x")
    assert "".join(word for word, _ in cut) == "2024ĠĠx"
    assert [word.replace("Ġ", " ") for word, _ in cut][: len(words) - 2] == words[:-2]
    encoded = tokenizer.encode("Hi").ids
    assert (encoded[0] == 1) == adds_bos
    text = "Là-bas, 2024\r\n\t日本 🎉 e\u0301 <|im_end|>"
    decoded = tokenizer.decode(tokenizer.encode(text).ids)
    assert decoded == ("Là-bas, 2024\r\n\t日本 🎉 " + ("é " if pre == "qwen2" else "e\u0301 "))


# Recorded from llama.cpp with the same GGUF file.
SMOLLM2_TEXTS: list[tuple[str, list[int]]] = [
    ("Hello world", [19556, 905]),
    (
        "2024-12 costs $1,234.56",
        [34, 32, 34, 36, 29, 33, 34, 3499, 1885, 33, 28, 34, 35, 36, 30, 37, 38],
    ),
    ("  leading\n\n\ttabs  end  ", [216, 2899, 1116, 197, 100, 7366, 216, 1112, 256]),
    (
        "h\xe9llo \u65e5\u672c\u8a9e \U0001f389 e\u0301",
        [88, 2756, 31394, 17097, 241, 115, 40993, 179, 120, 248, 15107, 232, 227, 297, 151, 219],
    ),
    ("I'll don't THEY'RE", [57, 3060, 1326, 982, 6462, 73, 23, 3256]),
    ("x=foo(bar[1])#comment\r\n", [104, 45, 15236, 24, 6299, 75, 33, 2255, 19, 3591, 2738]),
    ("<|im_start|>user\nHi<|im_end|>\n", [1, 4093, 198, 26843, 2, 198]),
    ("\u0663\u0664 \u2177 \xb2", [164, 113, 164, 114, 216, 173, 223, 132, 216, 19133]),
]


def test_the_real_tokenizer_cuts_as_llama_cpp(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    for text, ids in SMOLLM2_TEXTS:
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17)) and all(token.special for token in added.values())


def test_the_real_model_answers(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0]
    answer = tokenizer.decode(output[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."
    text = (
        "The quick brown fox jumps over the lazy dog, and the sun rises in the east every morning."
    )
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss
    assert 2.0 < loss < 4.0  # wrong q or k rows give 8 and more


def broken(
    text: str, error: type[ModelError] = CheckpointError, **kwargs: Any
) -> tuple[str, type[ModelError], dict[str, Any]]:
    return text, error, kwargs


FREQS = np.full(32, 3.0, dtype=np.float32)
NANS = np.full(128, np.nan, dtype=np.float32)
REFUSED = {
    "architecture": broken(
        "general.architecture is 'gemma'", metadata={"general.architecture": "gemma"}
    ),
    "experts": broken("llama.expert_count is 8", metadata={"llama.expert_count": 8}),
    "no-layers": broken("num_hidden_layers", drop=("llama.block_count",)),
    "many-layers": broken("num_hidden_layers", metadata={"llama.block_count": 2**31}),
    "more-layers": broken("blk.2.", metadata={"llama.block_count": 3}),
    "fewer-layers": broken("blk.1.", metadata={"llama.block_count": 1}),
    "head-count-list": broken(
        "num_attention_heads", metadata={"llama.attention.head_count": [4, 4]}
    ),
    "eps-text": broken(
        "layer_norm_rms_epsilon must be",
        metadata={"llama.attention.layer_norm_rms_epsilon": "small"},
    ),
    "theta-zero": broken("rope.freq_base must be", metadata={"llama.rope.freq_base": 0.0}),
    "partly-rotated": broken("rotated only in part", metadata={"llama.rope.dimension_count": 32}),
    "two-head-sizes": broken("of two sizes", metadata={"llama.attention.value_length": 32}),
    "yarn": broken("scaling.type is 'yarn'", metadata={"llama.rope.scaling.type": "yarn"}),
    "rope-freqs-other": broken("rope_freqs.weight is not", tensors={"rope_freqs.weight": FREQS}),
    "rope-freqs-short": broken("has 16 values", tensors={"rope_freqs.weight": FREQS[:16]}),
    "tensor-missing": broken("blk.1.attn_q.weight is missing", drop=("blk.1.attn_q.weight",)),
    "embedding-missing": broken("token_embd.weight is missing", drop=("token_embd.weight",)),
    "tensor-unexpected": broken("'extra.weight' is unexpected", tensors={"extra.weight": FREQS}),
    "tensor-shape": broken(
        "blk.0.attn_q.weight has shape", tensors={"blk.0.attn_q.weight": FREQS.reshape(2, 16)}
    ),
    "nan": broken("output_norm.weight has values", tensors={"output_norm.weight": NANS}),
    "more-tokens-than-rows": broken(
        "fewer than tokens", tensors={"token_embd.weight": np.zeros((300, 128), np.float32)}
    ),
    "tokenizer-model": broken(
        "model is 'bert'", TokenizerError, metadata={"tokenizer.ggml.model": "bert"}
    ),
    "tokenizer-absent": broken("model must be", TokenizerError, drop=("tokenizer.ggml.model",)),
    "tokenizer-pre": broken(
        "pre is 'tekken'", TokenizerError, metadata={"tokenizer.ggml.pre": "tekken"}
    ),
    "tokens-absent": broken("tokens must be", TokenizerError, drop=("tokenizer.ggml.tokens",)),
    "tokens-numbers": broken(
        "tokens must be", TokenizerError, metadata={"tokenizer.ggml.tokens": [1, 2]}
    ),
    "tokens-twice": broken(
        "same token twice", TokenizerError, metadata={"tokenizer.ggml.tokens": ["a", "a"]}
    ),
    "token-types-short": broken(
        "token_type has 2", TokenizerError, metadata={"tokenizer.ggml.token_type": [1, 1]}
    ),
    "merges-absent": broken("merges must be", TokenizerError, drop=("tokenizer.ggml.merges",)),
    "merges-single": broken(
        "without two parts", TokenizerError, metadata={"tokenizer.ggml.merges": ["ab"]}
    ),
    "merges-unknown": broken(
        "do not make a tokenizer", TokenizerError, metadata={"tokenizer.ggml.merges": ["zz qq"]}
    ),
    "eos-outside": broken(
        "eos_token_id is 999", TokenizerError, metadata={"tokenizer.ggml.eos_token_id": 999}
    ),
    "eos-text": broken(
        "eos_token_id must be", TokenizerError, metadata={"tokenizer.ggml.eos_token_id": "end"}
    ),
    "spm-without-scores": broken(
        "scores must be", TokenizerError, tokenizer="llama", drop=("tokenizer.ggml.scores",)
    ),
}


def refusal(path: Path, out: Path) -> ModelError:
    """The error of a conversion, without its traceback, which would keep the file mapped."""
    try:
        convert_gguf(path, out)
    except ModelError as error:
        return error.with_traceback(None)
    pytest.fail(f"{path} was converted")


@pytest.mark.parametrize(("text", "error", "kwargs"), REFUSED.values(), ids=REFUSED)
def test_unsupported_files_are_refused_by_name(
    tmp_path: Path, text: str, error: type[ModelError], kwargs: dict[str, Any]
) -> None:
    make_tiny_gguf(tmp_path / "in.gguf", **kwargs)
    begin = time.perf_counter()
    raised = refusal(tmp_path / "in.gguf", tmp_path / "out")
    assert time.perf_counter() - begin < 1
    assert type(raised) is error
    assert text in str(raised) and str(tmp_path / "in.gguf") in str(raised)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "in.source"]


def header_with(changes: dict[int, bytes]) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        for offset, new in changes.items():
            data = data[:offset] + new + data[offset + len(new) :]
        return data

    return change


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "empty": ("is 0 bytes long", lambda b: b""),
    "short": ("is 20 bytes long", lambda b: b[:20]),
    "magic": ("does not begin with GGUF", header_with({0: b"GGML"})),
    "version-1": ("has GGUF version 1", header_with({4: b"\1\0\0\0"})),
    "big-endian": ("has GGUF version", header_with({4: b"\0\0\0\3"})),
    "tensor-bomb": ("truncated", header_with({8: b"\xff" * 8})),
    "key-bomb": ("truncated", header_with({16: b"\xff" * 8})),
    "key-length-bomb": ("truncated", header_with({24: b"\xff" * 8})),
    "cut-in-keys": ("truncated", lambda b: b[:500]),
    "cut-in-data": ("truncated", lambda b: b[: len(b) // 2]),
    "cut-last-byte": ("truncated", lambda b: b[:-40]),
    "key-not-utf8": ("not UTF-8", header_with({32: b"\xff\xff"})),
    "array-bomb": ("truncated", lambda b: _patch_after(b, b"tokenizer.ggml.tokens", 8)),
    "array-type": ("unsupported type", lambda b: _patch_after(b, b"tokenizer.ggml.tokens", 4)),
    "value-type": ("unknown type", lambda b: _patch_after(b, b"tokenizer.ggml.tokens", 0)),
    "dimensions": ("dimensions", lambda b: _patch_after(b, b"output_norm.weight", 0)),
    "shape": ("output_norm.weight", lambda b: _patch_after(b, b"output_norm.weight", 4)),
    "kind": ("unknown quantization", lambda b: _patch_after(b, b"output_norm.weight", 12)),
    "offset": ("output_norm.weight", lambda b: _patch_after(b, b"output_norm.weight", 16)),
}


def _patch_after(data: bytes, name: bytes, skip: int) -> bytes:
    """Four bytes of 0xff, `skip` bytes after `name`."""
    place = data.index(name) + len(name) + skip
    return data[:place] + b"\xff" * 4 + data[place + 4 :]


@pytest.mark.parametrize(("text", "damage"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_files_are_refused(
    tmp_path: Path, text: str, damage: Callable[[bytes], bytes]
) -> None:
    make_tiny_gguf(tmp_path / "in.gguf")
    path = tmp_path / "in.gguf"
    path.write_bytes(damage(path.read_bytes()))
    begin = time.perf_counter()
    raised = refusal(path, tmp_path / "out")
    assert time.perf_counter() - begin < 1
    assert isinstance(raised, CheckpointError)
    assert text in str(raised) and str(path) in str(raised)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "in.gguf"
    make_tiny_gguf(path, num_hidden_layers=1, hidden_size=64, intermediate_size=32)
    return path


@settings(max_examples=100, deadline=2000, database=None, derandomize=True)
@given(seed=st.integers(0, 2**32))
def test_any_damage_is_refused_by_name_or_converts(small_gguf: Path, seed: int) -> None:
    data = bytearray(small_gguf.read_bytes())
    header_end = data.index(b"output_norm.weight") + 40
    dice = random.Random(seed)
    if dice.random() < 0.2:
        del data[dice.randrange(len(data)) :]
    else:
        for _ in range(dice.choice([1, 1, 3])):
            place = dice.randrange(header_end)
            data[place] = dice.choice([0, 1, 8, 127, 255, data[place] ^ (1 << dice.randrange(8))])
    path = small_gguf.with_name("damaged.gguf")
    path.write_bytes(data)
    out = small_gguf.with_name(f"out-{seed}")
    try:
        convert_gguf(path, out)
    except TinyvllmError as error:
        assert str(path) in str(error)
        assert not out.exists()
    assert not list(small_gguf.parent.glob(".out-*"))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_gguf(tmp_path / "in.gguf")
    arguments = [str(tmp_path / "in.gguf"), str(tmp_path / "deep" / "out")]
    assert main(arguments) == 0
    names = ["config.json", "generation_config.json", "model.safetensors"]
    names += ["tokenizer.json", "tokenizer_config.json"]
    assert sorted(p.name for p in (tmp_path / "deep" / "out").iterdir()) == names
    assert "converting weights" in capsys.readouterr().err
    assert main(arguments) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.gguf"), str(tmp_path / "x")]) == 1
    assert "absent.gguf: no such file" in capsys.readouterr().err


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    make_tiny_gguf(tmp_path / "in.gguf")
    (tmp_path / "out").mkdir()
    convert_gguf(tmp_path / "in.gguf", tmp_path / "out")
    assert load_config(tmp_path / "out").num_layers == 2


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny_gguf(tmp_path / "in.gguf")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ModelError, match=r"cannot be written: .*No space left"):
        convert_gguf(tmp_path / "in.gguf", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.gguf", "in.source"]


def test_json_files_are_plain(tmp_path: Path) -> None:
    out, _ = convert(tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"] is True
    assert gguf_name("model.layers.3.mlp.up_proj.weight") == "blk.3.ffn_up.weight"
