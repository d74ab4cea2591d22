"""`llm-pretrain chat`: a conversation with a trained model in the terminal, or through a pipe, one line a
turn.

The tokenizer's chat template formats the conversation. Without a template (a base model) the model continues
the text of all turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from llm_pretrain.api import TrainedModel, open_model
from llm_pretrain.commands.generate import Sampling, write_out
from llm_pretrain.commands.options import add_parameters, chosen
from llm_pretrain.data.chat import chat_prompt_ids
from llm_pretrain.errors import DataError

EXAMPLES = """\
/reset forgets the conversation, /quit (or the end of input) leaves, Ctrl-C stops an answer. A conversation
that outgrows the model's max_position_embeddings loses its oldest turns. Input that is not a terminal is read
line by line, one turn each, and only the answers are printed.

examples:
  llm-pretrain chat runs/chat/weights/best
  llm-pretrain chat runs/chat --system "Answer in one sentence." --temperature 0.7 --top_p 0.9
  echo "What is a list?" | llm-pretrain chat runs/chat --temperature 0
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_parameters(parser, open_model, positional=["source"])
    parser.add_argument("--system", metavar="TEXT", help="instruction that stands before the conversation")
    add_parameters(parser, Sampling)
    parser.set_defaults(max_new_tokens=512)


def run(arguments: argparse.Namespace) -> int:
    """Answer each line until the input ends; returns the exit code."""
    sampling = chosen(arguments, Sampling)
    source = open_model(**chosen(arguments, open_model))
    conversation = (Conversation if source.tokenizer.chat_template else PlainText)(source, arguments.system)
    if isinstance(conversation, PlainText):
        _note("this tokenizer has no chat template: the model continues the text, turn after turn")
    for line in _lines():
        if not line.strip():
            continue
        command = line.strip()
        if command == "/quit":
            break
        if command == "/reset":
            conversation.turns.clear()
            _note("the conversation starts anew")
        elif command.startswith("/") and command[1:].isalpha():
            _note(f"unknown command {command}; there are /reset and /quit")
        else:
            _answer(source, conversation, line, sampling)
            sampling["seed"] += 1
    return 0


class Conversation:
    """The turns of a conversation, and their token ids by the tokenizer's chat template.

    `turns` has the (role, text) pairs from the oldest to the newest, without the system message.
    """

    def __init__(self, source: TrainedModel, system: str | None):
        self.source, self.system = source, system
        self.turns: list[tuple[str, str]] = []

    def prompt_ids(self) -> list[int]:
        """Token ids of the conversation so far and of the answer's header."""
        turns = [("system", self.system)] if self.system is not None else []
        messages: list[dict[str, Any]] = [
            {"role": role, "content": text} for role, text in [*turns, *self.turns]
        ]
        return chat_prompt_ids(self.source.tokenizer, messages)

    def stop_ids(self) -> frozenset[int]:
        """Token ids that end an answer."""
        from llm_pretrain.export.huggingface import end_of_turn_id

        turn_end = end_of_turn_id(self.source.tokenizer.folder)
        return self.source.stop_ids | ({turn_end} if turn_end is not None else set())

    def fit(self, room: int) -> int:
        """Drop the oldest turns until the prompt takes at most `room` ids; returns how many were dropped.

        The newest turn is kept even if it is too long. An answer is dropped with its question.
        """
        before = len(self.turns)
        while len(self.turns) > 1 and len(self.prompt_ids()) > room:
            del self.turns[0]
            while len(self.turns) > 1 and self.turns[0][0] == "assistant":
                del self.turns[0]
        return before - len(self.turns)


class PlainText(Conversation):
    """A base model's conversation: the text of all turns, concatenated."""

    def prompt_ids(self) -> list[int]:
        """Token ids of the text so far."""
        return self.source.encode((self.system or "") + "".join(text for _, text in self.turns))

    def stop_ids(self) -> frozenset[int]:
        """Token ids that end a text."""
        return self.source.stop_ids


def _answer(source: TrainedModel, conversation: Conversation, line: str, sampling: dict[str, Any]) -> None:
    """Print the answer to `line` while it is generated, and append both to the conversation."""
    from llm_pretrain.model.generation import generate_texts

    limit = source.model.config.longest_sequence
    room = limit - max(1, min(sampling["max_new_tokens"], limit // 4))
    conversation.turns.append(("user", line))
    if dropped := conversation.fit(room):
        _note(f"the oldest {dropped} turns are forgotten: the model has {limit} positions")
    ids = conversation.prompt_ids()
    if len(ids) > room:
        conversation.turns.pop()
        _note(f"too long: {len(ids)} tokens with what belongs to them, and the model has room for {room}")
        return
    how = {name: value for name, value in sampling.items() if name != "no_token_healing"}
    how["token_healing"] = isinstance(conversation, PlainText) and not sampling["no_token_healing"]
    pieces, parts, end = source.tokenizer.token_pieces(), [], None
    try:
        for _, part, reason in generate_texts(
            source.model, [ids], pieces, stop_ids=conversation.stop_ids(), **how
        ):
            parts.append(part)
            write_out(part)
            end = reason
    except KeyboardInterrupt:
        end = "stop"
        write_out("\n")
        _note("stopped")
    else:
        write_out("\n")
    conversation.turns.append(("assistant", "".join(parts)))
    if end != "stop":
        _note("cut off at --max_new_tokens, or at the model's positions")


def _lines() -> Iterator[str]:
    """Yield the user's lines without line ends. A pipe is read as UTF-8, whatever the terminal's encoding."""
    if not sys.stdin.isatty():
        for number, data in enumerate(sys.stdin.buffer, start=1):
            try:
                yield data.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"standard input:{number}: expected UTF-8 text, found byte 0x{data[error.start]:02x}"
                ) from error
        return
    import readline  # noqa: F401  # gives `input` line editing and history

    while True:
        try:
            yield input("> ").encode("utf-8", "surrogateescape").decode("utf-8")
        except UnicodeDecodeError:
            _note("that line is no UTF-8 text")
        except KeyboardInterrupt:
            write_out("\n")
            _note("/quit leaves")
        except EOFError:
            write_out("\n")
            return


def _note(text: str) -> None:
    """Print a message to standard error, apart from the answers."""
    print(f"({text})", file=sys.stderr, flush=True)
