"""How one token of a vocabulary becomes bytes, read off the decoder that tokenizer.json declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def components(part: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The parts of a normaliser, pre-tokenizer or decoder that may be a sequence of them."""
    if part is None:
        return
    inner = part.get("decoders") or part.get("pretokenizers")
    if inner is None:
        yield part
    else:
        for component in inner:
            yield from components(component)


def piece_decoder(spec: dict[str, Any]) -> Callable[[str], bytes]:
    """What gives the bytes of one token; `spec` is the whole tokenizer.json."""
    parts = [*components(spec.get("decoder")), *components(spec.get("pre_tokenizer"))]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        byte_of = {character: byte for byte, character in enumerate(_byte_level_alphabet())}
        return lambda token: (
            bytes(byte_of[c] for c in token) if all(c in byte_of for c in token) else token.encode()
        )
    has_space_symbol = "Metaspace" in kinds or any(
        part["type"] == "Replace" and part.get("pattern") == {"String": "▁"} for part in parts
    )

    def decode(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        if match and "ByteFallback" in kinds:
            return bytes([int(match[1], 16)])
        return (token.replace("▁", " ") if has_space_symbol else token).encode("utf-8")

    return decode


def _byte_level_alphabet() -> list[str]:
    """What byte-level BPE writes for each byte: its own character if that prints, or the next above 255."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    free = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(free)) for byte in range(256)]
