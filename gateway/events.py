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

Events are kept as parts, not as JSON: the text of an answer is in memory once.
"""

from __future__ import annotations

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
"""Characters that one merged delta holds at most, about."""


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


# One output_text.delta: the beginning that is the same for a whole item, text, log-probabilities.
# A plain tuple: of the many objects of a gateway these are the most, and the garbage collector
# does not look at tuples of strings twice.
_Delta = tuple[bytes, str, "list[dict[str, Any]] | None"]


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
        self.pending_size = 0
        """Characters of text, and about those of log-probabilities, that `seal` will put out."""
        self.ended = False
        self._request = request
        self._model = model
        self._created_at = created_at
        self._defaults = defaults
        self._log: list[_Delta | dict[str, Any]] = []
        self._pending: list[str] = []
        self._pending_logprobs: list[dict[str, Any]] = []
        self._output: list[dict[str, Any]] = []  # items that are complete
        self._item_id: str | None = None  # of the message that is being written
        self._text: list[str] = []  # its sealed text
        self._logprobs: list[dict[str, Any]] = []
        self._prefix = b""
        self._outcome: Outcome | None = None
        self._encoded: tuple[int, int, bool, list[bytes]] = (0, 0, False, [])

    # --- Writing --------------------------------------------------------------------------------

    def created(self) -> None:
        """The request was accepted."""
        response = self.response()
        self._log += [
            {"type": "response.created", "response": response},
            {"type": "response.in_progress", "response": response},
        ]

    def queued(self) -> None:
        """The engine has no room for it yet."""
        response = {**self.response(), "status": "queued"}
        self._log.append({"type": "response.queued", "response": response})

    def add_text(self, text: str) -> None:
        self._pending.append(text)
        self.pending_size += len(text)

    def add_logprob(self, entry: dict[str, Any]) -> None:
        """Of one token. Those of tokens without text of their own go with the text that follows."""
        self._pending_logprobs.append(entry)
        self.pending_size += _LOGPROB_CHARS * (1 + len(entry["top_logprobs"]))

    def add_call(self, call: Call, item_id: str, call_id: str) -> None:
        """A whole call of a function; ends the message before it."""
        self.seal()
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
        self._log += [
            {"type": "response.output_item.added", "output_index": index, "item": item},
            {"type": f"{kind}.delta", **where, "delta": arguments},
            {"type": f"{kind}.done", **where, "name": call.name, "arguments": arguments},
            {"type": "response.output_item.done", "output_index": index, "item": done},
        ]
        self._output.append(done)

    def seal(self) -> None:
        """Make one delta of the text that gathered, if any."""
        if not self._pending:
            return
        text = "".join(self._pending)  # also of one: a plain str takes less than a Token
        self._pending.clear()
        self.pending_size = 0
        if self._item_id is None:
            self._open_message()
        self._text.append(text)
        logprobs = None
        if self._pending_logprobs:
            logprobs, self._pending_logprobs = self._pending_logprobs, []
            self._logprobs += logprobs
        self._log.append((self._prefix, text, logprobs))

    def finish(self, outcome: Outcome) -> None:
        """The end: closes the message, if there is one, and adds the terminal event.

        A completed response to a request that generates always has an item, even with no text.
        One that was cancelled or failed before its first text has none.
        """
        self.seal()
        completed = outcome.status == "completed"
        if completed and self._request.generate and not self._output and self._item_id is None:
            self._open_message()
        self._close_message("completed" if completed else "incomplete")
        self._outcome = outcome
        self.status = outcome.status
        self.ended = True
        self._log.append({"type": f"response.{outcome.status}", "response": self.response()})

    def _open_message(self) -> None:
        index = len(self._output)
        self._item_id = f"msg_{self.response_id.removeprefix('resp_')}"
        if index:
            self._item_id += f"_{index}"
        where = {"item_id": self._item_id, "output_index": index, "content_index": 0}
        start = json_text.dumps({"type": "response.output_text.delta", **where})
        self._prefix = start[:-1] + b',"delta":'
        item = self._message("in_progress", [])
        self._log += [
            {"type": "response.output_item.added", "output_index": index, "item": item},
            {"type": "response.content_part.added", **where, "part": _part("", [])},
        ]

    def _close_message(self, status: str) -> None:
        if self._item_id is None:
            return
        index = len(self._output)
        where = {"item_id": self._item_id, "output_index": index, "content_index": 0}
        text, logprobs = "".join(self._text), self._logprobs
        part = _part(text, logprobs)
        item = self._message(status, [part])
        self._log += [
            {"type": "response.output_text.done", **where, "text": text, "logprobs": logprobs},
            {"type": "response.content_part.done", **where, "part": part},
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
        self._output.append(item)
        self._item_id, self._text, self._logprobs = None, [], []

    # --- Reading --------------------------------------------------------------------------------

    @property
    def num_events(self) -> int:
        """Numbers 0 to this, less one, are in the log."""
        return len(self._log)

    def read(self, start: int, stop: int, *, suffix: bytes, merge: bool) -> list[bytes]:
        """Events `start` to `stop`, less one, as JSON text frames.

        `suffix` ends each: "}", or the viewer's stream_id and "}". With `merge`, neighbouring
        deltas become one.
        """
        key = (start, stop, merge)
        if self._encoded[:3] != key:
            # Viewers that keep up ask for the same events, one after the other.
            self._encoded = (*key, self._encode(start, stop, merge))
        return [body + suffix for body in self._encoded[3]]

    def _encode(self, start: int, stop: int, merge: bool) -> list[bytes]:
        bodies: list[bytes] = []
        number = start
        while number < stop:
            event = self._log[number]
            if isinstance(event, dict):
                bodies.append(json_text.dumps({**event, "sequence_number": number})[:-1])
                number += 1
                continue
            first = number
            number += 1
            if merge:
                number = self._end_of_run(first, stop)
                event = self._merged(first, number)
            numbers = b"%d" % (number - 1)
            if number - first > 1:
                numbers += b',"first_sequence_number":%d' % first
            prefix, text, logprobs = event
            bodies.append(
                b'%b%b,"logprobs":%b,"sequence_number":%b'
                % (
                    prefix,
                    json_text.dumps(text),
                    json_text.dumps(logprobs) if logprobs else b"[]",
                    numbers,
                )
            )
        return bodies

    def _end_of_run(self, first: int, stop: int) -> int:
        """One past the last delta that follows `first` in the same message, within bounds."""
        size, number, prefix = 0, first, None
        while number < stop and size < _MAX_MERGED:
            event = self._log[number]
            if isinstance(event, dict) or event[0] is not (prefix or event[0]):
                break
            prefix = event[0]
            size += len(event[1])
            number += 1
        return number

    def _merged(self, first: int, stop: int) -> _Delta:
        deltas = [event for event in self._log[first:stop] if isinstance(event, tuple)]
        entries = [entry for _, _, logprobs in deltas for entry in logprobs or ()]
        return deltas[0][0], "".join(text for _, text, _ in deltas), entries or None

    def forget(self) -> None:
        """Drop the log of a response that has ended; the response object stays."""
        self._log.clear()
        self._encoded = (0, 0, False, [])

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
