"""The promise: what append() and finish() give, joined, is decode(), cut at the stop string."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.vocabularies import BYTE_LEVEL_ALPHABET, HOLDING, STREAMING

from tinyvllm.detokenizer import Detokenizer
from tinyvllm.errors import InvalidParameterError, TokenizerError
from tinyvllm.tokenizer import Tokenizer

# The vocabularies are a fixture of the session, which the examples only read.
few = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
many = settings(few, max_examples=150)
every = pytest.mark.parametrize("name", ["smollm2", *STREAMING, *HOLDING])
streaming = pytest.mark.parametrize("name", ["smollm2", *STREAMING])

TEXTS = {
    "emoji": "ok 👨‍👩‍👧‍👦 🇩🇪🇫🇷 👍🏽 ❤️ 🏴󠁧󠁢󠁥󠁮󠁧󠁿!",
    "cjk": "日本語のテキスト、中文字符 한국어 𠮷野家",
    "marks": "é ñ Z̷̡͎a̶͙l̴̦g̵̢o̸ ệ कि",
    "arabic": "مَرْحَبًا بِالعَالَم ٣٤٥ שלום",
    "mixed": " \n\n  a\tb\r\n — “x” €5 ½ \u200b\ufeff\u2028end  ",
    "controls": "\x00\x01\x7f\x80\xa0\xad\ufffd\ufffe",
    "specials": "<|im_start|>user\nhi<|im_end|></s>",
}

UTF8_EDGES = [0x41, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xE1]
UTF8_EDGES += [0xEC, 0xED, 0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of the whole vocabulary and beyond it, with a liking for the first, for the special,
    and for byte tokens that make up whole characters.
    """
    ids = st.integers(0, tokenizer.vocab_size + 30) | st.integers(0, min(80, tokenizer.vocab_size))
    if tokenizer.special_ids:
        ids |= st.sampled_from(sorted(tokenizer.special_ids))
    groups = ids.map(lambda token_id: [token_id])
    if tokenizer.token_to_id("<0x00>") is not None:
        groups |= st.sampled_from(" \na日😀").map(lambda char: fallback_ids(tokenizer, char))
    return st.lists(groups, max_size=24).map(lambda some: [i for group in some for i in group])


def fallback_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    return [token_id for token_id in ids if token_id is not None]


def stream(detokenizer: Detokenizer, ids: list[int]) -> str:
    return "".join(map(detokenizer.append, ids)) + detokenizer.finish()


@every
@few
@given(data=st.data(), skip=st.booleans())
def test_stream_is_decode_at_every_end(
    vocabularies: dict[str, Tokenizer], name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = vocabularies[name]
    ids = data.draw(ids_of(tokenizer))
    for end in range(len(ids) + 1):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
        assert stream(detokenizer, ids[:end]) == tokenizer.decode(ids[:end], skip)


@every
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_text_chopped_at_every_id(vocabularies: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = vocabularies[name]
    ids = tokenizer.encode(text)
    for start in range(len(ids)):
        for end in (start + 1, start + 3, len(ids)):
            part = ids[start:end]
            assert stream(Detokenizer(tokenizer), part) == tokenizer.decode(part)


@many
@given(
    sequence=st.lists(st.sampled_from(UTF8_EDGES) | st.integers(0, 255), min_size=1, max_size=12)
)
def test_invalid_utf8(vocabularies: dict[str, Tokenizer], sequence: list[int]) -> None:
    """Bytes at the edges of every rule of UTF-8, as byte-level pieces and as fallback bytes."""
    for name, pieces in (
        ("byte_level", [BYTE_LEVEL_ALPHABET[byte] for byte in sequence]),
        ("llama2", [f"<0x{byte:02X}>" for byte in sequence]),
    ):
        tokenizer = vocabularies[name]
        ids = [i for i in map(tokenizer.token_to_id, pieces) if i is not None]
        assert len(ids) == len(sequence)
        assert stream(Detokenizer(tokenizer), ids) == tokenizer.decode(ids)


def test_whole_vocabulary_one_by_one(vocabularies: dict[str, Tokenizer]) -> None:
    """Each id of each vocabulary alone, between two others, and doubled."""
    for name, tokenizer in vocabularies.items():
        ids = range(tokenizer.vocab_size + 5)
        sample = ids if len(ids) < 1000 else random.Random(1).sample(ids, 3000)
        for skip in (True, False):
            for token_id in sample:
                around = [5, token_id, token_id, 9]
                for sequence in ([token_id], around):
                    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
                    assert stream(detokenizer, sequence) == tokenizer.decode(sequence, skip), name


def test_a_character_is_never_split_and_never_late(smollm2: Tokenizer) -> None:
    """After each id the shown text is all of the decode but an unfinished last character."""
    for text in TEXTS.values():
        ids = smollm2.encode(text)
        detokenizer, shown = Detokenizer(smollm2), ""
        for end, token_id in enumerate(ids, 1):
            shown += detokenizer.append(token_id)
            full = smollm2.decode(ids[:end])
            assert full.startswith(shown)
            assert full[len(shown) :] in ("", "\ufffd")


def test_cut_inside_a_character_gives_one_replacement_at_the_end(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("x𠮷")
    texts = {stream(Detokenizer(smollm2), ids[:end]) for end in range(1, len(ids) + 1)}
    assert texts == {"x", "x\ufffd", "x𠮷"}


def test_fallback_run_waits_until_it_is_known(vocabularies: dict[str, Tokenizer]) -> None:
    """`<0xC3><0xA9>` is é, unless a stray byte follows and makes three U+FFFD of the run."""
    tokenizer = vocabularies["llama2"]
    c3, a9, ff, letter = (tokenizer.token_to_id(p) for p in ("<0xC3>", "<0xA9>", "<0xFF>", "a"))
    assert c3 is not None and a9 is not None and ff is not None and letter is not None
    good, bad = Detokenizer(tokenizer), Detokenizer(tokenizer)
    assert [good.append(i) for i in (c3, a9, letter)] == ["", "", "éa"]
    assert [bad.append(i) for i in (c3, a9, ff, letter)] == ["", "", "", "\ufffd\ufffd\ufffda"]


def test_holding_decoders_give_all_at_the_end(vocabularies: dict[str, Tokenizer]) -> None:
    for name in HOLDING:
        detokenizer = Detokenizer(vocabularies[name])
        assert all(detokenizer.append(i) == "" for i in (10, 11, 12))
        assert detokenizer.finish() == vocabularies[name].decode([10, 11, 12])


def test_finish_twice_and_empty(vocabularies: dict[str, Tokenizer]) -> None:
    for name, tokenizer in vocabularies.items():
        detokenizer = Detokenizer(tokenizer, stop=("zzz",))
        assert detokenizer.finish() == detokenizer.finish() == "", name
        assert not detokenizer.stopped


def test_ids_that_are_none(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    assert detokenizer.append(smollm2.vocab_size) == detokenizer.append(2**32 - 1) == ""
    with pytest.raises(InvalidParameterError, match="got -1"):
        detokenizer.append(-1)


def test_detokenizer_of_a_decoder_that_panics() -> None:
    """A Strip of the end indexes before the start of a short text; the library panics."""
    import tokenizers
    from tokenizers import decoders, models

    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "  ": 1}, []))
    backend.decoder = decoders.Strip(" ", 0, 3)
    detokenizer = Detokenizer(Tokenizer(backend))
    detokenizer.append(1)
    with pytest.raises(TokenizerError, match="cannot decode"):
        detokenizer.finish()


# Stop strings.


def offline_cut(text: str, stops: tuple[str, ...], include: bool) -> str | None:
    """The definition: the stop that ends first, then the longest; None without one."""
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    if not ends:
        return None
    end, length = min(ends)
    return text[: end if include else end + length]


def stops_for(text: str) -> st.SearchStrategy[tuple[str, ...]]:
    """Parts of the text, parts with a wrong end, and strings of a few letters."""
    spans = st.tuples(st.integers(0, max(len(text) - 1, 0)), st.integers(1, 6))
    part = spans.map(lambda span: text[span[0] : sum(span)])
    wrong = st.tuples(part, st.sampled_from("ab\n ")).map("".join)
    any_of = (part | wrong | st.text("ab ", max_size=4)).map(lambda s: s.replace("\ufffd", ""))
    return st.lists(any_of.filter(bool), min_size=1, max_size=4).map(tuple)


@streaming
@few
@given(data=st.data(), include=st.booleans())
def test_stop_strings_equal_the_offline_cut(
    vocabularies: dict[str, Tokenizer], name: str, data: st.DataObject, include: bool
) -> None:
    """Stops at the first id whose decode holds a stop string, with that decode's cut."""
    tokenizer = vocabularies[name]
    ids = data.draw(ids_of(tokenizer))
    stops = data.draw(stops_for(tokenizer.decode(ids)))
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop_str_in_output=include)
    shown = ""
    for end, token_id in enumerate(ids, 1):
        shown += detokenizer.append(token_id)
        expected = offline_cut(tokenizer.decode(ids[:end]), stops, include)
        assert detokenizer.stopped == (expected is not None)
        if expected is not None:
            assert shown == expected
            assert detokenizer.stop_string in stops
            assert detokenizer.append(token_id) == detokenizer.finish() == ""
            return
    assert shown + detokenizer.finish() == tokenizer.decode(ids)
    assert not detokenizer.stopped


@many
@given(
    data=st.data(), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)
)
def test_nothing_leaks_and_nothing_waits_in_vain(
    vocabularies: dict[str, Tokenizer], data: st.DataObject, stops: list[str]
) -> None:
    """What is held is exactly the longest end of the text that may begin a stop string."""
    tokenizer = vocabularies["gemma"]
    letters = [tokenizer.token_to_id(piece) for piece in ("a", "b", "ab", "ba", "aab", ".")]
    ids = data.draw(st.lists(st.sampled_from(letters), max_size=20))
    detokenizer, text, shown = Detokenizer(tokenizer, stop=tuple(stops)), "", ""
    for token_id in ids:
        assert token_id is not None
        text += tokenizer.decode([token_id])
        shown += detokenizer.append(token_id)
        if detokenizer.stopped:
            assert shown == offline_cut(text, tuple(stops), False)
            return
        begun = [k for s in stops for k in range(1, len(s)) if text.endswith(s[:k])]
        assert shown == text[: len(text) - max(begun, default=0)]
    assert shown + detokenizer.finish() == text


@few
@given(data=st.data(), include=st.booleans())
def test_stops_of_holding_decoders_cut_at_the_end(
    vocabularies: dict[str, Tokenizer], data: st.DataObject, include: bool
) -> None:
    tokenizer = vocabularies[data.draw(st.sampled_from(sorted(HOLDING)))]
    ids = data.draw(ids_of(tokenizer))
    text = tokenizer.decode(ids)
    stops = data.draw(stops_for(text))
    detokenizer = Detokenizer(tokenizer, stop=stops, include_stop_str_in_output=include)
    expected = offline_cut(text, stops, include)
    assert stream(detokenizer, ids) == (text if expected is None else expected)
    assert detokenizer.stopped == (expected is not None)


@pytest.mark.parametrize(
    ("stops", "text", "expected", "found"),
    [
        (("cd",), "abcdef", "ab", "cd"),
        (("bcd", "c"), "abcdef", "ab", "c"),  # "c" is complete first
        (("bcd", "cd"), "abcdef", "a", "bcd"),  # both at d: the longer
        (("abcdefg",), "abcdef", "abcdef", None),  # flushed
        (("aab",), "aaab", "a", "aab"),
        (("abab", "bb"), "abaabab", "aba", "abab"),
        (("\n\n",), "x\n\ny", "x", "\n\n"),
        (("👩",), "👨‍👩‍👧", "👨‍", "👩"),
        (("a",), "a", "", "a"),
    ],
)
def test_stop_examples(
    vocabularies: dict[str, Tokenizer], stops: tuple[str, ...], text: str, expected: str, found: str
) -> None:
    for name in ("smollm2", "byte_level", "gemma"):
        tokenizer = vocabularies[name]
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) != text:
            continue  # not in this small vocabulary
        detokenizer = Detokenizer(tokenizer, stop=stops)
        assert stream(detokenizer, ids) == expected
        assert detokenizer.stop_string == found
        kept = Detokenizer(tokenizer, stop=stops, include_stop_str_in_output=True)
        assert stream(kept, ids) == expected + (found or "")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("a\n", "\n", "a"),
        ("\n", "\n", ""),
        (" \n", "\n", ""),
        (" ", " ", None),  # the first space of the text is stripped
        ("  ", " ", ""),
        ("a ", " ", "a"),
        ("日本😀", "本😀", "日"),
    ],
)
def test_a_stop_of_byte_tokens_is_not_late(
    vocabularies: dict[str, Tokenizer], text: str, stop: str, expected: str | None
) -> None:
    """Llama 2's newline is a byte token: stop="\\n" ends at it, not at the token after it."""
    tokenizer = vocabularies["llama2"]
    detokenizer = Detokenizer(tokenizer, stop=(stop,))
    shown = "".join(map(detokenizer.append, fallback_ids(tokenizer, text)))
    assert shown == (expected or "")
    assert detokenizer.stopped == (expected is not None)


def test_stop_strings_are_checked(smollm2: Tokenizer) -> None:
    for stop in (("",), ("x" * 4097,), ("x" * 2049, "y" * 2049)):
        with pytest.raises(InvalidParameterError, match="stop must be"):
            Detokenizer(smollm2, stop=stop)


def test_a_long_near_miss_costs_no_more_than_a_short_one(smollm2: Tokenizer) -> None:
    """The worst case for rescanning what is held: every token may continue the stop string."""
    (space_a,) = smollm2.encode(" a")

    def seconds(repeats: int) -> float:
        best = float("inf")
        for _ in range(5):
            detokenizer = Detokenizer(smollm2, stop=(" a" * repeats + "!",))
            start = time.perf_counter()
            for _ in range(4000):
                detokenizer.append(space_a)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(2000) < 8 * seconds(10)


def test_cost_per_token(smollm2: Tokenizer) -> None:
    """The share of the host's 10 us a token that is ours; the best of several runs."""
    ids = smollm2.encode("The quick brown fox, naïve as ever, jumps: 日本 😀.\n" * 400)

    def per_token(**kwargs: object) -> float:
        best = float("inf")
        for _ in range(5):
            append = Detokenizer(smollm2, **kwargs).append  # type: ignore[arg-type]
            start = time.perf_counter()
            for token_id in ids:
                append(token_id)
            best = min(best, (time.perf_counter() - start) / len(ids))
        return best * 1e6

    plain_us, stop_us = per_token(), per_token(stop=("the lazy dog", "\nUser:", "###"))
    print(f"us/token: {plain_us:.3f}, with stops {stop_us:.3f}")
    assert plain_us < 1  # a sixth of it on an ordinary machine
    assert stop_us < 2
