"""Raw records and their documents: text, prompt and completion, segments, conversations, token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from llm_pretrain.text import reason_of

EMPTY = "empty document"
"""The only cause that is never an error."""

BROKEN = "truncated or damaged file"
UNREADABLE = "unreadable file"
CHANGED = "file changed while it was read"
REPEATED = "file named twice"
TOO_LARGE = "record too large"
NUL = "NUL byte"
EXCLUDED = "validation document of another store"
NO_TARGET = "no loss token"

RECORD_BYTES = 1 << 27
"""Maximum size of a line, element or text file; tokenizing a byte takes 25 to 100 bytes of memory."""

_DETAIL = 300
"""Maximum number of characters shown of an error's detail."""


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record as read from a file.

    `kind` says what `data` is: a JSON object (`json`), the text of a document (`text`), or an error (`bad`:
    the cause, then the detail on a second line). `line` is the number of the line, row or element; it rises
    from 1 within a file. 0 stands for the whole file. `source` is the file's index among all files read.
    """

    name: str
    line: int
    data: bytes
    kind: Literal["json", "text", "bad"] = "json"
    source: int = 0

    @property
    def location(self) -> str:
        """`file:line`, for messages."""
        return f"{self.name}:{self.line}" if self.line else self.name


class RecordError(Exception):
    """A record that cannot be trained on; `cause` is its category in counts, `str()` gives the message."""

    def __init__(self, cause: str, location: str, detail: str):
        self.cause = cause
        detail = " ".join(detail[: 4 * _DETAIL].split())
        shown = detail if len(detail) <= _DETAIL else f"{detail[:_DETAIL]}…"
        super().__init__(f"{location}: {cause}: {shown}")


def bad_record(name: str, line: int, cause: str, detail: str, source: int = 0) -> RawRecord:
    """A record that represents unreadable data; `detail` is joined into one line."""
    text = f"{cause}\n{' '.join(detail.split())}"
    return RawRecord(name, line, text.encode("utf-8", "replace"), "bad", source)


IGNORE_LABEL = -100
"""transformers' label of a token that is not a target."""

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}


@dataclass(frozen=True, slots=True)
class Document:
    """A document: text segments, a conversation, or token ids.

    One of three is set: `segments`, each (text, whether it is a target of the loss); `messages`, each {role,
    content, …}, with `tools`; or `input_ids` with `loss_mask`. `location` is `file:line`, for messages.
    """

    location: str
    segments: tuple[tuple[str, bool], ...] = ()
    input_ids: list[int] | None = None
    loss_mask: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None

    def text(self) -> str:
        """The text, for training a tokenizer; empty for token ids."""
        if self.messages is not None:
            return "\n".join(message["content"] or "" for message in self.messages)
        return "".join(text for text, _ in self.segments)


def parse_record(record: RawRecord, text_column: str = "text") -> Document:
    """The document of a raw record. Raises RecordError.

    A JSON record is, in this order of preference: `{"text"}` (or the field `text_column`); `{"prompt",
    "completion"}` (only the completion is a target); `{"messages"}` or `{"conversations"}` (only the
    assistant's turns are targets); `{"segments": [{"text", "loss"}]}`; or `{"input_ids"}` with `loss_mask` or
    `labels` (not shifted, −100 where not a target). The ids are stored unchanged, except that an
    `attention_mask` cuts off the padding.
    """
    location = record.location
    if record.kind == "bad":
        cause, _, detail = record.data.decode("utf-8").partition("\n")
        raise RecordError(cause, location, detail)
    try:
        text = record.data.decode("utf-8")
    except UnicodeDecodeError as error:
        found = f"found byte 0x{record.data[error.start]:02x} at offset {error.start}"
        raise RecordError("invalid UTF-8", location, found) from error
    if (record.kind == "json" or not record.line) and (place := record.data.find(0)) >= 0:
        found = f"found one at offset {place}; is it text, and was its writer interrupted?"
        raise RecordError(NUL, location, found)
    if record.kind == "text":
        return _text_document(location, ((text, True),))
    try:
        fields = json.loads(text.removeprefix("\ufeff").rstrip("\r\n"))  # line breaks would hide a cut string
    except (ValueError, RecursionError) as error:
        detail = f"expected one JSON object per line, found: {reason_of(error)}"
        raise RecordError("invalid JSON", location, detail) from error
    if not isinstance(fields, dict):
        raise RecordError("wrong type", location, f"expected a JSON object, found {_kind(fields)}")
    return _document_of_fields(location, fields, text_column)


def _document_of_fields(location: str, fields: dict[str, Any], text_column: str) -> Document:
    if text_column in fields:
        return _text_document(location, ((_string(location, fields, text_column), True),))
    if "prompt" in fields and "completion" in fields:
        prompt = _string(location, fields, "prompt")
        return _text_document(location, ((prompt, False), (_string(location, fields, "completion"), True)))
    for key in ("messages", "conversations"):
        if key in fields:
            messages = _messages(location, fields[key], key)
            return Document(location, messages=messages, tools=_tools(location, fields.get("tools")))
    if "segments" in fields:
        return _text_document(location, _segments(location, fields["segments"]))
    if "input_ids" in fields:
        return _token_document(location, fields)
    found = ", ".join(sorted(fields)) or "no field at all"
    expected = f"{text_column}, prompt and completion, messages, segments or input_ids"
    hint = "; name the field of the text with --text_column" if fields else ""
    raise RecordError("no text", location, f"expected {expected}; found {found}{hint}")


def _text_document(location: str, segments: tuple[tuple[str, bool], ...]) -> Document:
    text = "".join(part for part, _ in segments)
    if not text:
        raise RecordError(EMPTY, location, "found no text")
    _check_surrogates(location, text)
    return Document(location, segments=segments)


def _check_surrogates(location: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        detail = f"found the lone surrogate U+{ord(text[error.start]):04X}"
        raise RecordError("invalid UTF-8", location, detail) from error


def _segments(location: str, value: Any) -> tuple[tuple[str, bool], ...]:
    if not isinstance(value, list) or not all(isinstance(segment, dict) for segment in value):
        raise RecordError("wrong type", location, "expected segments to be a list of {text, loss}")
    segments = []
    for number, segment in enumerate(value):
        text, loss = segment.get("text"), segment.get("loss")
        loss = True if loss is None else loss  # Arrow gives each segment the fields of all
        if not isinstance(text, str) or type(loss) not in (bool, int) or loss not in (0, 1):
            found = f"found {_kind(text)} and {_kind(loss)}"
            detail = f"expected segments[{number}] to be a text and a loss of true or false, {found}"
            raise RecordError("wrong type", location, detail)
        segments.append((text, bool(loss)))
    return tuple(segments)


def _messages(location: str, value: Any, key: str) -> list[dict[str, Any]]:
    """Returns messages in transformers' form; `value` has that form or ShareGPT's (`from`, `value`).

    Null fields are left out. If a message with tool calls has no content, its content becomes None.
    """
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise RecordError("wrong type", location, f"expected {key} to be a list of {{role, content}}")
    if not value:
        raise RecordError(EMPTY, location, "found no message")
    messages = []
    for number, fields in enumerate(value):
        message = {name: field for name, field in fields.items() if field is not None}
        if "role" not in message and "from" in message:
            message["role"] = message.pop("from")
            message["content"] = message.pop("value", None)
        content = message.get("content")
        if isinstance(content, list) and all(_is_text_part(part) for part in content):
            content = "".join(part["text"] for part in content)
        is_call = content is None and bool(message.get("tool_calls"))
        if not isinstance(message.get("role"), str) or not (is_call or isinstance(content, str)):
            found = f"found {_kind(message.get('role'))} and {_kind(content)}"
            detail = f"expected {key}[{number}] to have a role and a content that are strings, {found}"
            raise RecordError("wrong type", location, detail)
        if isinstance(content, str):
            _check_surrogates(location, content)
        message["role"] = _ROLES.get(message["role"], message["role"])
        message["content"] = content
        messages.append(message)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        detail = f"expected a message of the assistant in {key}, found {roles}"
        raise RecordError("no assistant turn", location, detail)
    return messages


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _tools(location: str, value: Any) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value or "null")
        except (ValueError, RecursionError) as error:
            raise RecordError(
                "wrong type", location, "expected tools to be JSON, found other text"
            ) from error
    if value is not None and not isinstance(value, list):
        raise RecordError("wrong type", location, f"expected tools to be a list, found {_kind(value)}")
    return value or None


def _token_document(location: str, fields: dict[str, Any]) -> Document:
    ids = fields["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise RecordError("wrong type", location, "expected input_ids to be a list of integers")
    mask, labels = fields.get("loss_mask"), fields.get("labels")
    if labels is not None:
        if mask is not None:
            raise RecordError("wrong type", location, "expected loss_mask or labels, found both")
        mask = _mask_of_labels(location, ids, labels)
    mask = [1] * len(ids) if mask is None else _checked_mask(location, len(ids), "loss_mask", mask)
    kept = _attended(location, len(ids), fields.get("attention_mask"))
    if not ids[kept]:
        raise RecordError(EMPTY, location, "found no token ids")
    return Document(location, input_ids=ids[kept], loss_mask=mask[kept])


def _checked_mask(location: str, length: int, name: str, mask: Any) -> list[int]:
    """Returns the mask as integers: duplicates must have equal masks, also if one mask contains `true`."""
    if not isinstance(mask, list) or not all(type(m) in (int, bool) and m in (0, 1) for m in mask):
        raise RecordError("wrong type", location, f"expected {name} to be a list of 0 and 1")
    if len(mask) != length:
        detail = f"expected {name} to be as long as input_ids ({length}), found {len(mask)}"
        raise RecordError("wrong length", location, detail)
    return [int(each) for each in mask]


def _attended(location: str, length: int, mask: Any) -> slice:
    """Selects the tokens that are not padding; the attention mask marks padding with 0."""
    if mask is None:
        return slice(length)
    mask = _checked_mask(location, length, "attention_mask", mask)
    places = [place for place, attended in enumerate(mask) if attended]
    first, stop = (places[0], places[-1] + 1) if places else (0, 0)
    if len(places) < stop - first:
        raise RecordError(
            "wrong type", location, "expected an attention_mask with 0 at its ends only, found one inside"
        )
    return slice(first, stop)


def _mask_of_labels(location: str, ids: list[int], labels: Any) -> list[int]:
    """The loss mask of labels in transformers' form: not shifted, −100 where not a target."""
    if not isinstance(labels, list):
        raise RecordError("wrong type", location, f"expected labels to be a list, found {_kind(labels)}")
    if len(labels) != len(ids):
        detail = f"expected labels as many as input_ids ({len(ids)}), found {len(labels)}"
        raise RecordError("wrong length", location, detail)
    for place, (token, label) in enumerate(zip(ids, labels, strict=True)):
        if type(label) is not int or label not in (token, IGNORE_LABEL):
            shifted = labels[:-1] == ids[1:]
            hint = "; labels are shifted here, and must not be" if shifted else ""
            detail = f"expected {token} (as in input_ids) or {IGNORE_LABEL} at {place}, found {label}{hint}"
            raise RecordError("wrong labels", location, detail)
    return [int(label != IGNORE_LABEL) for label in labels]


def _string(location: str, fields: dict[str, Any], key: str) -> str:
    value = fields[key]
    if not isinstance(value, str):
        raise RecordError("wrong type", location, f"expected {key} to be a string, found {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")
