"""What the server says about one response: a log of numbered events. No I/O.

    created, in_progress                       queued, once, when the engine lets it wait
    output_item.added, content_part.added      with the first text
    output_text.delta ...
    output_text.done, content_part.done, output_item.done
    completed | incomplete | failed            exactly one, always the last

The log is the truth that every viewer reads, each at its own pace and as often as it likes: a place
in it is one number. Text that no viewer has taken yet is not in the log; it gathers, and `seal`
makes one delta of it. So a response whose only viewer is slow has few, large deltas, and numbers
without gaps. A viewer that fell behind another reads several deltas as one (`merge`), which then
has the last of their numbers, and the first as `first_sequence_number`.

The text of an answer is in memory once, as the JSON that it becomes, end to end: a delta is a place
in it, not an object.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tinyvllm.gateway import json_text
from tinyvllm.gateway.protocol import tool_call_message

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinyvllm.gateway.protocol import CreateEvent
    from tinyvllm.gateway.tools import Call

_LOGPROB_CHARS = 80
"""About what one log-probability entry takes as JSON."""
_MAX_MERGED = 64 * 1024
"""Bytes of text that one merged delta holds at most, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a response ended. `reason` is for incomplete, `code` and `message` for failed."""

    status: Literal["completed", "incomplete", "failed"]
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    reason: Literal["max_output_tokens", "cancelled"] | None = None
    code: str | None = None
    message: str | None = None


class _Deltas:
    """The output_text.deltas of one message, which are neighbours in the log.

    A gateway has more of them than of anything else, so none is an object: they would be most of
    its memory, and the garbage collector would stop every stream to walk over them.
    """

    __slots__ = ("_ends", "_first", "_json", "_logprobs", "_prefix")

    def __init__(self, first: int, where: Mapping[str, Any]) -> None:
        """`first`: the number of the first; `where`: what is the same in all of them."""
        self._first = first
        start = json_text.dumps({"type": "response.output_text.delta", **where})
        self._prefix = start[:-1] + b',"delta":"'
        self._json = bytearray()  # all texts, as within a JSON string
        self._ends = array("I")  # where in it each delta ends
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of those that have any

    def append(self, text: str, logprobs: list[dict[str, Any]]) -> None:
        self._json += json_text.dumps(text)[1:-1]
        if logprobs:
            self._logprobs[len(self._ends)] = logprobs
        self._ends.append(len(self._json))

    @property
    def text(self) -> str:
        text: str = json_text.loads(f'"{self._json.decode()}"')
        return text

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        return [entry for entries in self._logprobs.values() for entry in entries]

    def read(self, start: int, stop: int, suffix: bytes, merge: bool) -> tuple[int, bytes]:
        """The delta of number `start` as a message; with `merge`, and those before `stop` that
        follow it, within bounds. Returns the number of the next as well."""
        ends = self._ends
        i = start - self._first
        begin = ends[i - 1] if i else 0
        last = i
        if merge:
            last = min(
                bisect_left(ends, begin + _MAX_MERGED, i), len(ends) - 1, stop - 1 - self._first
            )
        number = self._first + last
        numbers = b"%d" % number
        if number > start:
            numbers += b',"first_sequence_number":%d' % start
        logprobs = b"[]"
        if self._logprobs:
            among = (self._logprobs.get(j, ()) for j in range(i, last + 1))
            logprobs = json_text.dumps([entry for entries in among for entry in entries])
        text = self._json[begin : ends[last]]
        parts = (self._prefix, text, b'","logprobs":', logprobs, b',"sequence_number":')
        return number + 1, b"".join((*parts, numbers, suffix))


class Transcript:
    """The log of one response, and the response object as it stands.

    `created` first; then `queued`, `add_text`, `add_call` and `seal` as it goes; `finish` last.
    """

    def __init__(
        self,
        *,
        response_id: str,
        tag: str,
        request: CreateEvent,
        model: str,
        created_at: int,
        defaults: Mapping[str, float],
    ) -> None:
        """`created_at` is Unix time in seconds; `defaults` the model's own sampling parameters,
        echoed where the request chose none; `tag` the public label (see `tinyvllm.stats`)."""
        self.response_id = response_id
        self.tag = tag
        self.status = "in_progress"
        self.ended = False
        self._request = request
        self._model = model
        self._created_at = created_at
        self._defaults = defaults
        self.num_events = 0
        """Numbers 0 to this, less one, are in the log."""
        self._log: list[dict[str, Any] | _Deltas] = []
        self._starts: list[int] = []  # the number of each, or of its first delta
        self._pending: list[str] = []
        self._pending_logprobs: list[dict[str, Any]] = []
        self._text_size = self._logprobs_size = 0
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._item_id: str | None = None  # of the message that is being written
        self._deltas: _Deltas | None = None  # its own
        self._outcome: Outcome | None = None

    # --- Writing --------------------------------------------------------------------------------

    def created(self) -> None:
        """The request was accepted."""
        response = self.response()
        self._add({"type": "response.created", "response": response})
        self._add({"type": "response.in_progress", "response": response})

    def queued(self) -> None:
        """The engine has no room for it yet."""
        assert self._deltas is None  # or the deltas of its message were not neighbours
        response = {**self.response(), "status": "queued"}
        self._add({"type": "response.queued", "response": response})

    def _add(self, event: dict[str, Any]) -> None:
        self._log.append(event)
        self._starts.append(self.num_events)
        self.num_events += 1

    @property
    def pending_size(self) -> int:
        """Characters of text, and about those of log-probabilities, that `seal` will put out.
        Nothing while there is no text: it puts nothing out then, whoever reads."""
        return self._text_size + self._logprobs_size if self._pending else 0

    def add_text(self, text: str) -> None:
        self._pending.append(text)
        self._text_size += len(text)

    def add_logprob(self, entry: dict[str, Any]) -> None:
        """Of one token. Those of tokens without text of their own go with the text that follows."""
        self._pending_logprobs.append(entry)
        self._logprobs_size += _LOGPROB_CHARS * (1 + len(entry["top_logprobs"]))

    def add_call(self, call: Call, item_id: str, call_id: str) -> None:
        """A whole call of a function; ends the message before it. Log-probabilities of its tokens
        are of no text."""
        self.seal()
        self._pending_logprobs, self._logprobs_size = [], 0
        self._close_message("completed")
        index, arguments = len(self._output), call.arguments_json
        item = {
            "id": item_id,
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": call.name,
            "arguments": "",
        }
        done = {**item, "status": "completed", "arguments": arguments}
        where = {"item_id": item_id, "output_index": index}
        kind = "response.function_call_arguments"
        self._add({"type": "response.output_item.added", "output_index": index, "item": item})
        self._add({"type": f"{kind}.delta", **where, "delta": arguments})
        self._add({"type": f"{kind}.done", **where, "name": call.name, "arguments": arguments})
        self._add({"type": "response.output_item.done", "output_index": index, "item": done})
        self._output.append(done)

    def seal(self) -> None:
        """Make one delta of the text that gathered, if any."""
        if not self._pending:
            return
        text, logprobs = "".join(self._pending), self._pending_logprobs
        self._pending.clear()  # also if this fails: then `finish` tells of it
        self._text_size = 0
        if logprobs:
            self._pending_logprobs, self._logprobs_size = [], 0
        (self._deltas or self._open_message()).append(text, logprobs)
        self.num_events += 1

    def finish(self, outcome: Outcome) -> None:
        """The end: closes the message, if there is one, and adds the terminal event.

        A completed response to a request that generates always has an item, even with no text.
        One that was cancelled or failed before its first text has none.
        """
        self.seal()
        completed = outcome.status == "completed"
        if completed and self._request.generate and not self._output and self._deltas is None:
            self._open_message()
        self._close_message("completed" if completed else "incomplete")
        self._outcome = outcome
        self.status = outcome.status
        self.ended = True
        self._add({"type": f"response.{outcome.status}", "response": self.response()})

    def _open_message(self) -> _Deltas:
        index = len(self._output)
        self._item_id = f"msg_{self.response_id.removeprefix('resp_')}"
        if index:
            self._item_id += f"_{index}"
        where = {"item_id": self._item_id, "output_index": index, "content_index": 0}
        item = self._message("in_progress", [])
        self._add({"type": "response.output_item.added", "output_index": index, "item": item})
        self._add({"type": "response.content_part.added", **where, "part": _part("", [])})
        deltas = self._deltas = _Deltas(self.num_events, where)
        self._log.append(deltas)
        self._starts.append(self.num_events)
        return deltas

    def _close_message(self, status: str) -> None:
        if self._deltas is None:
            return
        index = len(self._output)
        where = {"item_id": self._item_id, "output_index": index, "content_index": 0}
        text, logprobs = self._deltas.text, self._deltas.logprobs
        part = _part(text, logprobs)
        item = self._message(status, [part])
        self._add(
            {"type": "response.output_text.done", **where, "text": text, "logprobs": logprobs}
        )
        self._add({"type": "response.content_part.done", **where, "part": part})
        self._add({"type": "response.output_item.done", "output_index": index, "item": item})
        self._output.append(item)
        self._item_id = self._deltas = None

    # --- Reading --------------------------------------------------------------------------------

    def read(self, start: int, stop: int, *, suffix: bytes, merge: bool) -> list[bytes]:
        """Events `start` to `stop`, less one, as JSON text frames.

        `suffix` ends each: "}", or the viewer's stream_id and "}". With `merge`, neighbouring
        deltas become one.
        """
        messages: list[bytes] = []
        number = start
        while number < stop:
            event = self._log[bisect_right(self._starts, number) - 1]
            if isinstance(event, _Deltas):
                number, message = event.read(number, stop, suffix, merge)
                messages.append(message)
            else:
                event = {**event, "sequence_number": number}
                messages.append(json_text.dumps(event)[:-1] + suffix)
                number += 1
        return messages

    def forget(self) -> None:
        """Drop the log of a response that has ended; the response object stays."""
        self._log.clear()
        self._starts.clear()
        self._deltas = None
        self.num_events = 0

    def response(self) -> dict[str, Any]:
        """The response object, with what is complete of its output."""
        request, outcome = self._request, self._outcome
        response: dict[str, Any] = {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "status": self.status,
            "model": self._model,
            "output": list(self._output),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "metadata": request.metadata,
            "max_output_tokens": request.sampling.get("max_tokens"),
            "parallel_tool_calls": True,
            "temperature": self._chosen("temperature"),
            "top_p": self._chosen("top_p"),
            "top_logprobs": request.top_logprobs or 0,
            "tool_choice": request.tool_choice,
            "tools": list(request.tools),
            "previous_response_id": request.previous_response_id,
            "reasoning": None,
            "text": {"format": request.text_format},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "usage": None if outcome is None else _usage(outcome),
            "tinyvllm": {"tag": self.tag},
        }
        if outcome is not None and outcome.status == "incomplete":
            response["incomplete_details"] = {"reason": outcome.reason}
        if outcome is not None and outcome.status == "failed":
            response["error"] = {"code": outcome.code, "message": outcome.message}
        return response

    def messages(self) -> list[dict[str, Any]]:
        """The output as chat messages, for the requests that follow."""
        messages: list[dict[str, Any]] = []
        for item in self._output:
            if item["type"] == "message":
                messages.append({"role": "assistant", "content": item["content"][0]["text"]})
                continue
            arguments = json_text.loads(item["arguments"])
            call = tool_call_message(item["call_id"], item["name"], arguments)
            if messages:
                # Text and calls of one answer are one message.
                messages[-1].setdefault("tool_calls", []).extend(call["tool_calls"])
            else:
                messages.append(call)
        return messages

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _chosen(self, name: str) -> float:
        value: float = self._request.sampling.get(name, self._defaults.get(name, 1.0))
        return value


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _usage(outcome: Outcome) -> dict[str, Any]:
    return {
        "input_tokens": outcome.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": outcome.num_cached_tokens},
        "output_tokens": outcome.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": outcome.num_prompt_tokens + outcome.num_output_tokens,
    }
