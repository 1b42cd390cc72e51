"""Detokenizer: token ids -> text, one id at a time.

    "".join(append(id) for id in ids) + finish() == tokenizer.decode(ids, skip_special_tokens)

for every sequence of ids, cut at a stop string. Text leaves as soon as no later id can change it:

    token id --_Pieces--> piece --_Decoder--> text that is final --_StopStrings--> text to show

What must wait: the first bytes of a character (byte-level vocabularies); a whole run of `<0xNN>`
tokens, since one bad byte turns all of the run into U+FFFD (byte fallback); text that may be the
beginning of a stop string. With a decoder that is none of those known here, everything waits.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import tokenizers

from tinyvllm.errors import InvalidParameterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinyvllm.tokenizer import Tokenizer

# What an id stands for: text; bytes that are no whole characters; the byte of a `<0xNN>` token;
# None where it stands for nothing (skipped, or not in the vocabulary).
_Piece: TypeAlias = str | bytes | int | None
# (piece of the vocabulary, is it the first of the text) -> what the decoder makes of it alone.
_PieceMap: TypeAlias = "Callable[[str, bool], str]"

_MAX_STOP_CHARS = 4096  # of all stop strings of a request together
_MAX_CACHED_UNKNOWN = 2**20  # ids without a piece are kept up to here: padded rows of a model
# As Rust's u8::from_str_radix reads it, sign included.
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Detokenizer:
    """Incremental text of one request. Not for use by two threads at the same time."""

    __slots__ = ("_decoder", "_idle", "_pieces", "_stops", "stop_string", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        """`stop`: the one that is complete first, reading character by character, ends the text;
        of two that are complete at the same character, the longer. So the cut does not depend on
        how the text falls into tokens.

        Raises `InvalidParameterError` for an empty stop string, or more than 4096 characters.
        """
        self.stopped = False
        """A stop string is complete: `append` and `finish` give "" from here on."""
        self.stop_string: str | None = None
        """The stop string that was found."""
        vocabulary = _vocabulary(tokenizer, skip_special_tokens)
        self._pieces = vocabulary.pieces
        self._decoder = vocabulary.decoder()
        self._idle = self._decoder.idle
        self._stops = _StopStrings(_automaton(stop), include_stop_str_in_output) if stop else None

    def append(self, token_id: int) -> str:
        """The text that this id makes final; often "" (see the module's docstring)."""
        if self.stopped:
            return ""
        piece = self._pieces[token_id]
        if self._idle and piece.__class__ is str:
            text = piece
        else:
            text = self._push(token_id)
        if self._stops is None or not text:
            return text
        return self._cut(self._stops, text)

    def finish(self) -> str:
        """The text still held, at the end of the sequence; "" after a stop, or when called again.

        A stop string may be found in it: then `stopped` is True and the text is cut.
        """
        if self.stopped:
            return ""
        text = self._decoder.flush()
        if self._stops is None:
            return text
        text = self._cut(self._stops, text)
        return text if self.stopped else text + self._stops.flush()

    def _push(self, token_id: int) -> str:
        decoder, stops = self._decoder, self._stops
        text = decoder.push(token_id)
        self._idle = decoder.idle
        # A stop that is complete inside a run of byte tokens ends the sequence now, not one id
        # late: the run is whole characters here, so with no id after it this is its text.
        if stops is not None and decoder.tentative and stops.peek(decoder.tentative):
            text = decoder.flush()
        return text

    def _cut(self, stops: _StopStrings, text: str) -> str:
        text = stops.feed(text)
        if stops.found is not None:
            self.stop_string = stops.found
            self.stopped = True
        return text


def token_bytes(tokenizer: Tokenizer, num_tokens: int) -> list[bytes | None] | None:
    """What each id below `num_tokens` adds to a text in UTF-8, perhaps a part of a character; None
    for special tokens and for ids that are none. None altogether when the decoder is of a kind
    that gives single tokens no text of their own, or another one at the start of a text."""
    vocabulary = _vocabulary(tokenizer, True)
    pieces = vocabulary.pieces
    if isinstance(pieces, _NoPieces) or vocabulary.is_positional:
        return None
    found: list[bytes | None] = []
    for token_id in range(num_tokens):
        piece = pieces[token_id]
        if isinstance(piece, int):
            piece = bytes((piece,))
        found.append(piece.encode() if isinstance(piece, str) else piece)
    return found


class _Vocabulary:
    """What the detokenizers of a tokenizer share: its pieces, and how to make their decoder."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        steps = _flatten(tokenizer.decoder_config())
        names = [step["type"] for step in steps]
        chain = None if "ByteLevel" in names else _chain(steps)
        self.pieces: dict[int, _Piece]
        self.decoder: Callable[[], _Decoder]
        self.is_positional = chain is not None and chain.is_positional
        if names and names[0] == "ByteLevel" and set(names[1:]) <= {"Fuse"}:
            self.pieces = _Pieces(tokenizer, skip_special_tokens, _byte_level_piece)
            self.decoder = functools.partial(_ByteLevelDecoder, self.pieces)
        elif chain is not None:
            self.pieces = _Pieces(tokenizer, skip_special_tokens, chain.piece)

            def first_piece(token_id: int) -> _Piece:
                piece = tokenizer.piece(token_id, skip_special_tokens)
                return None if piece is None else chain.piece(piece, True)

            self.decoder = functools.partial(_PieceDecoder, self.pieces, first_piece, chain)
        else:
            self.pieces = _NoPieces()
            self.decoder = functools.partial(_HoldingDecoder, tokenizer, skip_special_tokens)


def _vocabulary(tokenizer: Tokenizer, skip_special_tokens: bool) -> _Vocabulary:
    shared: dict[bool, _Vocabulary] = tokenizer.detokenizer_tables
    found = shared.get(skip_special_tokens)
    if found is None:  # two threads may both get here: one result is dropped
        made = _Vocabulary(tokenizer, skip_special_tokens)
        found = shared.setdefault(skip_special_tokens, made)
    return found


class _Pieces(dict[int, _Piece]):
    """id -> piece, filled on demand: a request sees few of a vocabulary's 150k entries."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, convert: Callable[[str], _Piece]
    ) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._convert = convert

    def __missing__(self, token_id: int) -> _Piece:
        text = self._tokenizer.piece(token_id, self._skip_special_tokens)
        piece = None if text is None else self._convert(text)
        if piece is not None or token_id < _MAX_CACHED_UNKNOWN:
            self[token_id] = piece
        return piece


class _NoPieces(dict[int, _Piece]):
    def __missing__(self, token_id: int) -> _Piece:
        return None


class _Decoder(Protocol):
    """Pieces -> text that is final."""

    idle: bool
    """Nothing is held: a str piece is its own text, with no need to `push` it."""
    tentative: str
    """Whole characters that the last `push` put into a run of byte tokens: not final yet."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _ByteLevelDecoder:
    """Pieces are bytes: the UTF-8 of the text, with U+FFFD for what is invalid.

    Python's "replace" makes one U+FFFD of each maximal subpart, as Rust's from_utf8_lossy does.
    """

    __slots__ = ("_pending", "_pieces", "idle", "tentative")

    def __init__(self, pieces: dict[int, _Piece]) -> None:
        self.idle = True
        self.tentative = ""
        self._pieces = pieces
        self._pending = b""  # the beginning of a character, at most three bytes

    def push(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)  # type: ignore[operator]
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self.idle = used == len(data)
        return text

    def flush(self) -> str:
        text = self._pending.decode("utf-8", "replace")
        self._pending = b""
        return text


class _PieceDecoder:
    """Pieces are text, or single bytes of a byte fallback; the start of the text may be special."""

    __slots__ = (
        "_first_piece",
        "_peek_left",
        "_pieces",
        "_run",
        "_strip_char",
        "_strip_left",
        "_utf8",
        "idle",
        "tentative",
    )

    def __init__(
        self, pieces: dict[int, _Piece], first_piece: Callable[[int], _Piece], chain: _Chain
    ) -> None:
        self._pieces = pieces
        self._first_piece = first_piece if chain.is_positional else None
        self._strip_char = chain.strip_char
        self._strip_left = chain.strip_count  # of the start of the text, still to look at
        self._peek_left = 0  # the same within a run of bytes, which is tentative
        self._run = bytearray()
        self._utf8: codecs.IncrementalDecoder | None = None  # None: the run is invalid
        self.idle = self._first_piece is None and not self._strip_left
        self.tentative = ""

    def push(self, token_id: int) -> str:
        self.tentative = ""
        piece = self._pieces[token_id]
        if piece is None:
            return ""
        if self._first_piece is not None:
            piece = self._first_piece(token_id)
            self._first_piece = None
        if isinstance(piece, int):
            self._push_byte(piece)
            return ""
        assert isinstance(piece, str)
        text = self._final(self._end_run() + piece)
        self.idle = not self._strip_left
        return text

    def flush(self) -> str:
        self.tentative = ""
        return self._final(self._end_run())

    def _push_byte(self, byte: int) -> None:
        self.idle = False
        if not self._run:
            self._utf8 = _StrictUtf8()
            self._peek_left = self._strip_left
        self._run.append(byte)
        if self._utf8 is None:
            return
        try:
            text = self._utf8.decode(bytes((byte,)))
        except UnicodeDecodeError:
            self._utf8 = None
            return
        self.tentative, self._peek_left = _strip_start(text, self._strip_char, self._peek_left)

    def _end_run(self) -> str:
        if not self._run:
            return ""
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _final(self, text: str) -> str:
        if self._strip_left:
            text, self._strip_left = _strip_start(text, self._strip_char, self._strip_left)
        return text


class _HoldingDecoder:
    """Any other decoder may rewrite its whole text at the last id: nothing is final before."""

    __slots__ = ("_ids", "_skip_special_tokens", "_tokenizer", "idle", "tentative")

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self.idle = False
        self.tentative = ""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        return ""

    def flush(self) -> str:
        ids, self._ids = self._ids, []
        return self._tokenizer.decode(ids, self._skip_special_tokens) if ids else ""


_StrictUtf8 = codecs.getincrementaldecoder("utf-8")


def _strip_start(text: str, char: str, left: int) -> tuple[str, int]:
    """`text` without up to `left` leading `char`s, and how many may still follow it."""
    count = 0
    while count < left and text[count : count + 1] == char:
        count += 1
    return text[count:], left - count if count == len(text) else 0


def _byte_level_table() -> dict[int, int]:
    """GPT-2's byte alphabet (printable characters stand for themselves, others for U+0100 on)
    -> the byte as a Latin-1 character; characters below 256 outside of it -> beyond Latin-1.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return dict.fromkeys(others, 65535) | {256 + i: byte for i, byte in enumerate(others)}


_BYTE_LEVEL_TABLE = _byte_level_table()


def _byte_level_piece(piece: str) -> str | bytes:
    try:
        data = piece.translate(_BYTE_LEVEL_TABLE).encode("latin-1")
    except UnicodeEncodeError:  # an added token that is not in the byte alphabet: plain text
        return piece
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


class _Chain:
    """A decoder that works piece by piece: maps, then byte fallback, then a strip of the start."""

    def __init__(self) -> None:
        self.maps: list[_PieceMap] = []
        self.is_positional = False
        self.has_byte_fallback = False
        self.strip_char = ""
        self.strip_count = 0

    def piece(self, piece: str, is_first: bool = False) -> str | int:
        for piece_map in self.maps:
            piece = piece_map(piece, is_first)
        if self.has_byte_fallback:
            found = _BYTE_PIECE.fullmatch(piece)
            if found:
                return int(found[1], 16)
        return piece


def _flatten(config: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder configuration; no decoder joins pieces with spaces."""
    if config is None:
        return [{"type": "Join"}]
    if config["type"] != "Sequence":
        return [config]
    return [step for part in config["decoders"] for step in _flatten(part)]


def _chain(steps: list[dict[str, Any]]) -> _Chain | None:
    """Maps*, ByteFallback?, (Fuse+, Strip?, Fuse*)?; None for any other order or step."""
    chain = _Chain()
    waiting = deque(steps)

    def skip(name: str) -> int:
        count = 0
        while waiting and waiting[0]["type"] == name:
            waiting.popleft()
            count += 1
        return count

    while waiting and (made := _piece_map(waiting[0])) is not None:
        piece_map, is_positional = made
        chain.maps.append(piece_map)
        chain.is_positional |= is_positional
        waiting.popleft()
    chain.has_byte_fallback = skip("ByteFallback") > 0
    if skip("Fuse") and waiting and waiting[0]["type"] == "Strip" and not waiting[0]["stop"]:
        strip = waiting.popleft()
        chain.strip_char, chain.strip_count = strip["content"], strip["start"]
        skip("Fuse")
    return None if waiting else chain


def _piece_map(step: dict[str, Any]) -> tuple[_PieceMap, bool] | None:
    """(the map of one decoder step, does it treat the first piece in its own way); None: no map."""
    match step:
        case {"type": "Join"}:
            return (lambda piece, is_first: piece if is_first else " " + piece), True
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return (lambda piece, _: piece.replace(old, new)), False
        case {"type": "Replace", "pattern": {"Regex": pattern}, "content": new}:
            replace = tokenizers.decoders.Replace(tokenizers.Regex(pattern), new)
            return (lambda piece, _: str(replace.decode([piece]))), False
        case {"type": "Strip", "content": char, "start": count, "stop": 0}:
            return (lambda piece, _: _strip_start(piece, char, count)[0]), False
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            at_first = " " if scheme == "never" else ""
            return (lambda piece, is_first: piece.replace(mark, at_first if is_first else " ")), (
                scheme != "never"
            )
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return functools.partial(_word_piece, prefix, cleanup), True
    return None


# As in the tokenizers library, in this order.
_WORD_PIECE_CLEANUP = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)


def _word_piece(prefix: str, cleanup: bool, piece: str, is_first: bool) -> str:
    if not is_first:
        piece = piece[len(prefix) :] if piece.startswith(prefix) else " " + piece
    for old, new in _WORD_PIECE_CLEANUP if cleanup else ():
        piece = piece.replace(old, new)
    return piece


class _Automaton:
    """Aho-Corasick over the stop strings: a state is the longest suffix of the text that may be
    the beginning of one, so its depth is how much text must be held. Shared by requests.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.children: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self.children[state]:
                    self.children[state][char] = len(self.children)
                    self.children.append({})
                    self.depth.append(self.depth[state] + 1)
                    self.match.append(None)
                state = self.children[state][char]
            self.match[state] = stop
        self.first_chars = frozenset(self.children[0])
        self.fallback = [0] * len(self.children)
        waiting = deque(self.children[0].values())
        while waiting:  # breadth first: a fallback is shallower than its state
            state = waiting.popleft()
            for char, child in self.children[state].items():
                self.fallback[child], _ = self.scan(self.fallback[state], char)
                self.match[child] = self.match[child] or self.match[self.fallback[child]]
                waiting.append(child)

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """(state, length of the part of `text` up to the first complete stop; 0 without one)."""
        children, fallback, match = self.children, self.fallback, self.match
        for end, char in enumerate(text, 1):
            following = children[state].get(char)
            while following is None and state:
                state = fallback[state]
                following = children[state].get(char)
            state = following or 0
            if match[state]:
                return state, end
        return state, 0


@functools.lru_cache(maxsize=32)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    if not all(stops) or sum(map(len, stops)) > _MAX_STOP_CHARS:
        raise InvalidParameterError(
            f"stop must be non-empty strings of together at most {_MAX_STOP_CHARS} characters; "
            f"got {len(stops)} of together {sum(map(len, stops))}",
            param="stop",
        )
    return _Automaton(stops)


class _StopStrings:
    """Text -> text to show, up to the first stop string."""

    __slots__ = ("_automaton", "_first_chars", "_held", "_include", "_peeked", "_state", "found")

    def __init__(self, automaton: _Automaton, include: bool) -> None:
        self._automaton = automaton
        self._first_chars = automaton.first_chars
        self._include = include
        self._state = 0
        self._held = ""  # the text that the state stands for
        self._peeked: int | None = None
        self.found: str | None = None

    def feed(self, text: str) -> str:
        self._peeked = None
        if not self._state and self._first_chars.isdisjoint(text):
            return text
        automaton = self._automaton
        self._state, end = automaton.scan(self._state, text)
        end += len(self._held) if end else 0
        text = self._held + text
        if end:
            self.found = automaton.match[self._state]
            assert self.found is not None
            return text[: end if self._include else end - len(self.found)]
        shown = len(text) - automaton.depth[self._state]
        self._held = text[shown:]
        return text[:shown]

    def peek(self, text: str) -> bool:
        """Does `text`, after what was fed and what was peeked at since, complete a stop string?"""
        start = self._state if self._peeked is None else self._peeked
        self._peeked, end = self._automaton.scan(start, text)
        return end > 0

    def flush(self) -> str:
        held, self._held = self._held, ""
        self._state = 0
        return held
