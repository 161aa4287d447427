"""Fitting results into a context window: token estimates, shares, and shortened texts that say how to read on."""

from __future__ import annotations

from collections.abc import Sequence

from .types import Message, ToolSpec

BYTES_PER_TOKEN = 3.5  # about right for English; UTF-8 bytes make it cautious for Chinese (0.86 tokens a character)
UNKNOWN_WINDOW = 32_768  # assumed when neither the user nor the server names a window
LEAST_CHARACTERS = 200  # a share smaller than this is not worth a result


def estimate_tokens(text: str) -> int:
    size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    return int(size / BYTES_PER_TOKEN) + 1


def message_tokens(message: Message) -> int:
    total = 4 + estimate_tokens(message.content)
    for call in message.tool_calls:
        total += 8 + estimate_tokens(call.arguments)
    return total + (estimate_tokens(message.reasoning) if message.reasoning else 0)


def tools_tokens(tools: Sequence[ToolSpec]) -> int:
    return sum(16 + estimate_tokens(spec.description) + estimate_tokens(str(spec.parameters)) for spec in tools)


class ContextMeter:
    """How full one agent's context is. The server's own count replaces the estimate at every reply."""

    def __init__(self, window: int | None, reserve: int | None):
        self.window = window or UNKNOWN_WINDOW
        self.reserve = min(reserve or 2048, self.window // 4)  # for the next reply
        self.used = 0

    def add(self, message: Message) -> None:
        self.used += message_tokens(message)

    def measured(self, tokens_in: int, tokens_out: int) -> None:
        if tokens_in > 0:
            self.used = tokens_in + tokens_out

    @property
    def remaining(self) -> int:
        return max(0, self.window - self.reserve - self.used)

    def share(self, results: int) -> int:
        """Characters that each of ``results`` results may take: 1/(n+1) of what is left, so that a share stays free."""
        return max(LEAST_CHARACTERS, int(self.remaining / (results + 1) * BYTES_PER_TOKEN))


def shorten(text: str, characters: int, handle: str | None) -> tuple[str, bool]:
    """(text, False) if it fits, else its beginning with a note on how much is missing and how to read on."""
    if len(text) <= characters and (text.isascii() or estimate_tokens(text) * BYTES_PER_TOKEN <= characters + 4):
        return text, False
    room = max(0, characters - 160)
    if not text.isascii():
        room = len(text.encode("utf-8", "surrogatepass")[:room].decode("utf-8", "ignore"))
    how = f'; read_result(handle="{handle}", offset={room}) continues' if handle else ""
    return f"{text[:room]}\n[shortened: the first {room} of {len(text)} characters{how}]", True
