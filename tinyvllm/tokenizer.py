"""Tokenizer: text <-> token ids, and messages -> prompt, from a model directory."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from tinyvllm.chat_template import ChatTemplate
from tinyvllm.errors import ChatTemplateError, InvalidParameterError, TokenizerError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from os import PathLike

# Gemma's 262k-entry tokenizer.json has 33 MB; the other files are far smaller.
_MAX_TOKENIZER_BYTES = 256 * 2**20
_MAX_CONFIG_BYTES = 16 * 2**20
_SPECIAL_TOKEN_KEYS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
# Longer text is encoded with the GIL released; below it, handing over costs more than the work.
_LONG_TEXT_CHARS = 4096


class Tokenizer:
    """The tokenizer of one model. Safe to use from any number of threads at once.

    The wrapped `tokenizers.Tokenizer` is changed only before it is shared, and then only read:
    its "Already borrowed" error needs a writer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        path: str | PathLike[str] = "tokenizer.json",
    ) -> None:
        """`special_tokens`: "bos_token" -> text and so on; `path`: the file to name in errors.

        Takes `backend` over: its truncation and padding are switched off, and nobody else may
        change it from here on.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._path = Path(path)
        self._special_tokens = dict(special_tokens or {})
        self._template = ChatTemplate(chat_templates or {}, self._special_tokens, self._path)
        self._added = backend.get_added_tokens_decoder()
        self._special_texts = {t.content for t in self._added.values() if t.special and t.content}
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.detokenizer_tables: dict[bool, Any] = {}
        """Filled by detokenizer.py, once per tokenizer."""

    @classmethod
    def from_dir(cls, model_dir: str | PathLike[str]) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json,
        special_tokens_map.json, chat_template.jinja and additional_chat_templates/*.jinja.

        Raises `TokenizerError` naming the file and the cause: missing, unreadable, malformed, huge.
        """
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(
                f"{folder} has no tokenizer.json; transformers' AutoTokenizer.save_pretrained() "
                "writes one from other formats",
                path=path,
            )
        data = _read(path, _MAX_TOKENIZER_BYTES)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except BaseException as error:
            raise _tokenizer_error(error, f"{path} is not a valid tokenizer", path) from error
        if backend.get_vocab_size(with_added_tokens=True) == 0:
            raise TokenizerError(f"{path} has an empty vocabulary", path=path)
        config = _read_json(folder / "tokenizer_config.json")
        legacy = _read_json(folder / "special_tokens_map.json")
        return cls(
            backend,
            special_tokens=_special_tokens(folder, {**legacy, **config}),
            chat_templates=_chat_templates(folder, config),
            path=path,
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in `text` become their ids.

        Long text is encoded without holding the GIL. Raises `InvalidParameterError` when `text`
        is no string or holds a lone surrogate.
        """
        if not isinstance(text, str):
            raise InvalidParameterError(
                f"text must be a string; got {type(text).__name__} {text!r:.80}", param="text"
            )
        try:
            if len(text) < _LONG_TEXT_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                (encoding,) = self._backend.encode_batch_fast(
                    [text], add_special_tokens=add_special_tokens
                )
        except BaseException as error:
            for place, char in enumerate(text):
                if "\ud800" <= char <= "\udfff":
                    raise InvalidParameterError(
                        f"text has a lone surrogate U+{ord(char):04X} at index {place}, which is "
                        "no character: replace it, or decode its source with errors='replace'",
                        param="text",
                    ) from error
            raise _tokenizer_error(
                error, f"{self._path} cannot encode this text", self._path
            ) from error
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids beyond the vocabulary give nothing."""
        try:
            text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        except (TypeError, OverflowError) as error:
            raise InvalidParameterError(
                f"ids must be integers from 0 to 2**32 - 1; got {ids!r:.80}", param="ids"
            ) from error
        except BaseException as error:
            raise _tokenizer_error(
                error, f"{self._path} cannot decode these ids", self._path
            ) from error
        return text

    @functools.cached_property
    def vocab_size(self) -> int:
        """Ids are below this; the model may have more (padded) rows. Found on first use."""
        # Not the number of entries: ids may have holes.
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    def token_to_id(self, token: str) -> int | None:
        """The id of the vocabulary entry `token`, None where there is none."""
        found: int | None = self._backend.token_to_id(token)
        return found

    @property
    def bos_token(self) -> str | None:
        return self._special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self._special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        return self._special_tokens.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return None if self.bos_token is None else self.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self.token_to_id(self.eos_token)

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else self.token_to_id(self.pad_token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._template.names)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Prompt text of `messages` by the model's chat template.

        `chat_template` chooses one of several by name ("default", "tool_use", ...); `kwargs` are
        variables for it (`enable_thinking=False`). Raises `ChatTemplateError`,
        `InvalidParameterError` for messages that are wrong.
        """
        if not self.has_chat_template:
            raise ChatTemplateError(
                f"the model of {self._path} has no chat template (it is a base model, or its "
                "chat_template.jinja is missing); use generate() with finished text",
                path=self._path,
            )
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template=chat_template,
            **kwargs,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Prompt ids of `messages`; arguments as of `apply_chat_template`.

        The template writes the special tokens it wants, so none is added and none doubled.
        """
        return self.encode(self.apply_chat_template(messages, **kwargs), add_special_tokens=False)

    def decoder_config(self) -> dict[str, Any] | None:
        """The "decoder" object of tokenizer.json."""
        decoder = self._backend.decoder
        return None if decoder is None else json.loads(decoder.__getstate__())

    def piece(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """What `decode` hands to the decoder for this id; None: nothing (skipped, or no such)."""
        if not 0 <= token_id < 2**32:
            raise InvalidParameterError(
                f"a token id must be from 0 to 2**32 - 1; got {token_id}", param="token_id"
            )
        added = self._added.get(token_id)
        piece = self._backend.id_to_token(token_id) if added is None else added.content
        if added is not None and added.normalized and _decodes_normalized():
            normalizer = self._backend.normalizer
            piece = added.content if normalizer is None else normalizer.normalize_str(piece)
        # By text, as the library does it: a model piece may read like a special token.
        return None if skip_special_tokens and piece in self._special_texts else piece


@functools.cache
def _decodes_normalized() -> bool:
    """Does this version of tokenizers decode an added token from its normalized form?"""
    probe = tokenizers.Tokenizer(tokenizers.models.BPE())
    probe.normalizer = tokenizers.normalizers.Lowercase()
    probe.add_tokens([tokenizers.AddedToken("A", normalized=True)])
    return bool(probe.decode([0]) == "a")


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for key in _SPECIAL_TOKEN_KEYS:
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[key] = text
        elif value is not None:
            path = folder / "tokenizer_config.json"
            raise TokenizerError(f"{path}: {key} must be a string; got {value!r:.80}", path=path)
    return tokens


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> source. Files come before the entry in tokenizer_config.json, as in transformers."""
    path = folder / "tokenizer_config.json"
    found = {}
    single = folder / "chat_template.jinja"
    if single.exists():
        found["default"] = _read_text(single)
    for extra in sorted(folder.glob("additional_chat_templates/*.jinja")):
        found[extra.stem] = _read_text(extra)
    entry = config.get("chat_template")
    if found or entry is None:
        return found
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        for item in entry:
            if not isinstance(item, dict) or not all(
                isinstance(item.get(key), str) for key in ("name", "template")
            ):
                break
            found[item["name"]] = item["template"]
        else:
            return found
    raise TokenizerError(
        f"{path}: chat_template must be a string or a list of {{'name', 'template'}}; "
        f"got {entry!r:.80}",
        path=path,
    )


def _read(path: Path, limit: int) -> bytes:
    try:
        if not path.is_file():
            raise TokenizerError(f"{path} is not a file", path=path)
        size = path.stat().st_size
        if size > limit:
            raise TokenizerError(f"{path} has {size} bytes; the limit is {limit}", path=path)
        return path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error}", path=path) from error


def _read_text(path: Path) -> str:
    try:
        return _read(path, _MAX_CONFIG_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8: {error}", path=path) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} when there is no such file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold an object; got {type(value).__name__}", path=path)
    return value


def _tokenizer_error(error: BaseException, what: str, path: Path) -> TokenizerError:
    """A TokenizerError for whatever the Rust side raised; a signal's exception is passed on.

    A panic in Rust arrives as PanicException, which derives from BaseException alone.
    """
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return TokenizerError(f"{what}: {error}", path=path)
