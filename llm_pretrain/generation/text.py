"""From token ids to text as they come: whole characters only, and never a change to what is already out.

Works on the bytes that ids stand for. Decoding a growing list of ids anew would not do: a later byte can
change how a tokenizer's decoder reads the ones before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns ids into text, one at a time. What it has returned, joined, is the text so far.

    Bytes of an incomplete character are held back until it is whole; bytes that can begin no character
    become U+FFFD.

    Args:
        pieces: The UTF-8 bytes of each id, empty for ids that stand for no text.
    """

    def __init__(self, pieces: Sequence[bytes]):
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that this id completes; may be empty."""
        return self._decoder.decode(self._pieces[token])

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        return self._decoder.decode(b"", final=True)
