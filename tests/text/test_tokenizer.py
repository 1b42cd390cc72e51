"""Tokenizer: files, encode and decode, threads."""

from __future__ import annotations

import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from support.vocabularies import STREAMING, llama2_style
from tokenizers import models, processors

from tinyvllm.detokenizer import Detokenizer
from tinyvllm.errors import InvalidParameterError, TinyvllmError, TokenizerError
from tinyvllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = "Hello world! Naïve 日本語 😀 e\u0301 \t\n\n end  "


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    llama2_style().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None})
    )
    return tmp_path


def test_smollm2(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token, smollm2.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert smollm2.eos_token_id in smollm2.special_ids
    assert smollm2.pad_token_id == smollm2.eos_token_id
    assert smollm2.bos_token_id == smollm2.token_to_id("<|im_start|>")
    assert smollm2.token_to_id("no such piece") is None
    assert smollm2.has_chat_template
    assert smollm2.decode(smollm2.encode(TEXT)) == TEXT
    assert smollm2.encode("") == [] and smollm2.decode([]) == ""
    marked = smollm2.encode("<|im_start|>x")
    assert smollm2.decode(marked) == "x"
    assert smollm2.decode(marked, skip_special_tokens=False) == "<|im_start|>x"


def test_same_ids_as_transformers(smollm2: Tokenizer, smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_dir)
    for text in (TEXT, TEXT * 500, "<|im_start|>user\nhi<|im_end|>"):
        ids = smollm2.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert smollm2.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_long_text_has_the_ids_of_short_text(smollm2: Tokenizer) -> None:
    """The two ways into the library, on either side of the length where they change."""
    for length in (4000, 4095, 4096, 4097, 9000):
        text = (TEXT * 400)[:length]
        assert smollm2.encode(text) == smollm2._backend.encode(text).ids


def test_from_dir_reads_special_tokens(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", None)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (1, None)
    assert not tokenizer.has_chat_template
    (model_dir / "tokenizer_config.json").unlink()
    (model_dir / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert Tokenizer.from_dir(model_dir).eos_token == "<|im_end|>"


def test_truncation_and_padding_of_the_file_are_off(model_dir: Path) -> None:
    backend = llama2_style()
    backend.enable_truncation(3)
    backend.enable_padding(length=10)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(model_dir / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(model_dir)
    ids = tokenizer.encode("a" * 20)
    assert ids[0] == 1 and tokenizer.decode(ids) == "a" * 20
    assert tokenizer.encode("a" * 20, add_special_tokens=False) == ids[1:]


def test_vocab_size_counts_holes() -> None:
    assert Tokenizer(tokenizers.Tokenizer(models.BPE({"a": 0, "b": 7}, []))).vocab_size == 8


def _truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _grow(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


BROKEN: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "missing": ("tokenizer.json", lambda p: p.unlink(), "has no tokenizer.json"),
    "empty": ("tokenizer.json", lambda p: p.write_bytes(b""), "EOF while parsing"),
    "truncated": ("tokenizer.json", _truncate, "EOF while parsing"),
    "binary": ("tokenizer.json", lambda p: p.write_bytes(bytes(range(256))), "not a valid"),
    "list": ("tokenizer.json", lambda p: p.write_text("[]"), "not a valid tokenizer"),
    "no model": ("tokenizer.json", lambda p: p.write_text("{}"), "not a valid tokenizer"),
    "model kind": ("tokenizer.json", lambda p: _edit(p, model={"type": "X"}), "not a valid"),
    "decoder kind": ("tokenizer.json", lambda p: _edit(p, decoder={"type": "X"}), "not a valid"),
    "bad regex": (
        "tokenizer.json",
        lambda p: _edit(
            p, normalizer={"type": "Replace", "pattern": {"Regex": "("}, "content": ""}
        ),
        "not a valid",
    ),
    "no vocabulary": (
        "tokenizer.json",
        lambda p: _edit(p, model={"type": "BPE", "vocab": {}, "merges": []}, added_tokens=[]),
        "empty vocabulary",
    ),
    "nested": ("tokenizer.json", lambda p: p.write_text('{"model":' + "[" * 10**5), "not a valid"),
    "directory": ("tokenizer.json", _as_directory, "is not a file"),
    "huge": ("tokenizer.json", lambda p: _grow(p, 2**40), "the limit is"),
    "config truncated": ("tokenizer_config.json", _truncate, "not valid JSON"),
    "config list": ("tokenizer_config.json", lambda p: p.write_text("[]"), "must hold an object"),
    "config nested": ("tokenizer_config.json", lambda p: p.write_text("[" * 10**6), "not valid"),
    "config bytes": ("tokenizer_config.json", lambda p: p.write_bytes(b"\xff\xfe"), "not UTF-8"),
    "config huge": ("tokenizer_config.json", lambda p: _grow(p, 2**40), "the limit is"),
    "bos number": ("tokenizer_config.json", lambda p: _edit(p, bos_token=5), "bos_token must be"),
    "template number": (
        "tokenizer_config.json",
        lambda p: _edit(p, chat_template=7),
        "chat_template must be",
    ),
    "template list": (
        "tokenizer_config.json",
        lambda p: _edit(p, chat_template=[{"name": "default"}]),
        "chat_template must be",
    ),
    "template bytes": (
        "chat_template.jinja",
        lambda p: p.write_bytes(b"\xc3("),
        "chat_template.jinja is not UTF-8",
    ),
}


@pytest.mark.parametrize(("file", "spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_directories(
    model_dir: Path, file: str, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(model_dir / file)
    start = time.perf_counter()
    with pytest.raises(TokenizerError, match=message) as raised:
        Tokenizer.from_dir(model_dir)
    assert time.perf_counter() - start < 1
    assert raised.value.path == str(model_dir / file)
    assert str(model_dir) in str(raised.value)


def test_unreadable_and_absent_directories(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
            Tokenizer.from_dir(folder)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffc", "x" * 5000 + "\udc00"])
def test_lone_surrogates(smollm2: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidParameterError, match="lone surrogate U\\+D") as raised:
        smollm2.encode(text)
    assert raised.value.param == "text"


def test_text_and_ids_are_checked(smollm2: Tokenizer) -> None:
    for text in (None, 5, b"bytes", ["a"]):
        with pytest.raises(InvalidParameterError, match="text must be a string"):
            smollm2.encode(text)  # type: ignore[arg-type]
    for ids in ([-1], [2**32], ["a"], [1.5]):
        with pytest.raises(InvalidParameterError, match="ids must be integers"):
            smollm2.decode(ids)  # type: ignore[arg-type]


def test_text_that_the_model_cannot_encode() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend, path="somewhere/tokenizer.json")
    with pytest.raises(TokenizerError, match=r"somewhere/tokenizer\.json cannot encode"):
        tokenizer.encode("b")


def test_signals_are_not_swallowed(smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def from_buffer(data: bytes) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizers, "Tokenizer", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Tokenizer.from_dir(smollm2_dir)


def test_many_threads(smollm2: Tokenizer) -> None:
    """Every public call from eight threads at once gives what one thread gets alone."""
    long_text = TEXT * 200
    messages = [{"role": "user", "content": TEXT}]
    ids = smollm2.encode(TEXT)

    def everything() -> list[object]:
        detokenizer = Detokenizer(smollm2, stop=("end",))
        return [
            smollm2.encode(TEXT),
            smollm2.encode(long_text),
            smollm2.decode(ids),
            smollm2.encode_chat(messages),
            "".join(map(detokenizer.append, ids)) + detokenizer.finish(),
        ]

    expected = everything()
    barrier = threading.Barrier(8)

    def worker(_: int) -> list[bool]:
        barrier.wait()
        return [everything() == expected for _ in range(15)]

    smollm2.detokenizer_tables.clear()  # so that the threads race to fill it
    with ThreadPoolExecutor(8) as pool:
        assert all(all(done) for done in pool.map(worker, range(8)))


def test_long_text_is_encoded_without_the_gil(smollm2: Tokenizer) -> None:
    """Another thread keeps running Python while a long prompt is encoded."""
    text = TEXT * 10_000
    done = threading.Event()
    encoder = threading.Thread(target=lambda: (smollm2.encode(text), done.set()))
    encoder.start()
    steps = 0
    while not done.is_set():
        steps += 1
    encoder.join()
    assert steps > 1000


def test_every_vocabulary_round_trips_through_a_file(tmp_path: Path) -> None:
    """A tokenizer read back from its file decodes and streams as before."""
    for name, make in STREAMING.items():
        folder = tmp_path / name
        folder.mkdir()
        make().save(str(folder / "tokenizer.json"))
        tokenizer = Tokenizer.from_dir(folder)
        ids = list(range(0, tokenizer.vocab_size, 3))
        detokenizer = Detokenizer(tokenizer)
        assert "".join(map(detokenizer.append, ids)) + detokenizer.finish() == tokenizer.decode(ids)
        shutil.rmtree(folder)


def test_errors_are_ours() -> None:
    assert issubclass(TokenizerError, TinyvllmError)
