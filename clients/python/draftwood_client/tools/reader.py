"""Separates calls of tools from the text of an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable

from draftwood_client.tools.types import ToolCall, ToolFormat

_DECODER = json.JSONDecoder()
_LONGEST_WORD = 9
"""Characters of JSON that may be the beginning of one word: "-Infinity"."""


class ToolCallReader:
    """Separates the calls of an answer from its text, as the answer comes.

    Where a call begins with a marker such as "<tool_call>", calls may be anywhere; where it begins with a bracket, only
    at the start of the answer, as any text can have brackets. White space around calls is part of them. What turns out
    to be no call is text; nothing is lost.

    Args:
        form: how the model writes calls.
        names: of the tools; a call of another one is text.
    """

    def __init__(self, form: ToolFormat, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._keys = form.name_key, form.arguments_key
        self._begin, self._end = form.begin.strip(), form.end.strip()
        between = (form.between or "").strip()
        self._between = "" if self._end and between.startswith(self._end) else between
        self._anywhere = form.is_marked
        self._held = ""
        self._at_start, self._called = True, False

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain after some more text: pieces of text and calls, in their order."""
        self._held += text
        return self._read(last=False)

    def close(self) -> list[str | ToolCall]:
        """What is left at the end of the answer."""
        return self._read(last=True)

    def _read(self, last: bool) -> list[str | ToolCall]:
        found: list[str | ToolCall] = []
        while self._held:
            found += self._take(self._next_call(last))
            if not self._held or (not last and self._may_grow()):
                break
            size, calls = self._calls(last)
            if size is None:
                break
            if calls:
                found += calls
                self._held, self._at_start, self._called = self._held[size:], False, True
            else:
                found += self._take(size)
        return found

    def _take(self, size: int) -> list[str | ToolCall]:
        """Text of so many characters; none if it is only the white space behind the last call."""
        text, self._held = self._held[:size], self._held[size:]
        if not text or (self._called and not self._held and not text.strip()):
            return []
        self._at_start = self._called = False
        return [text]

    def _next_call(self, last: bool) -> int:
        """Where the text ends behind which a call may begin, with white space before it."""
        held = self._held
        at = len(held) if last else len(held) - _overlap(held, self._begin)
        if self._anywhere and self._begin in held:
            at = held.index(self._begin)
        elif not self._anywhere and self._at_start:
            at = 0
        elif last:
            return at
        return len(held[:at].rstrip())

    def _may_grow(self) -> bool:
        """Whether what is held may yet become the beginning of a call, or the white space before more text."""
        written, begin = "".join(self._held.split()), "".join(self._begin.split()) + "{"
        return len(written) < len(begin) and begin.startswith(written)

    def _calls(self, last: bool) -> tuple[int | None, list[str | ToolCall]]:
        """The calls that the held text begins with, and their size in characters. Without calls, the size of what is
        text instead; None as long as that cannot be told."""
        held = self._held
        blank = len(held) - len(held.lstrip())
        no_call = (blank + len(self._begin) if self._anywhere else len(held)), list[str | ToolCall]()
        if not held.startswith(self._begin, blank):
            return no_call
        at, calls = blank + len(self._begin), list[str | ToolCall]()
        while True:
            at = _behind_blanks(held, at)
            written, stop = _decoded(held, at)
            call = self._call(written)
            if call is None:
                return (None, []) if stop is None and not last else no_call
            assert stop is not None
            calls.append(call)
            if not self._end and not self._between:
                return stop, calls
            at = _behind_blanks(held, stop)
            rest = held[at:]
            if self._between and rest.startswith(self._between):
                at += len(self._between)
            elif self._end and rest.startswith(self._end):
                return at + len(self._end), calls
            elif last or (not self._end and rest and not self._between.startswith(rest)):
                return (stop, calls) if not (rest and self._end) else no_call
            elif self._end.startswith(rest) or self._between.startswith(rest):
                return None, []
            else:
                return no_call

    def _call(self, written: object) -> ToolCall | None:
        if not isinstance(written, dict):
            return None
        name, arguments = (written.get(key) for key in self._keys)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False), f"call_{uuid.uuid4().hex[:24]}")


def _decoded(text: str, at: int) -> tuple[object, int | None]:
    """The JSON value at a place and where it ends; where it may go on behind the text, None and None."""
    try:
        return _DECODER.raw_decode(text, at)
    except RecursionError:
        return None, at
    except json.JSONDecodeError as error:
        unfinished = error.msg.startswith("Unterminated string") or error.pos >= len(text) - _LONGEST_WORD
        return None, None if unfinished else at


def _behind_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text that a marker begins with."""
    return next((size for size in range(min(len(text), len(marker)), 0, -1) if text.endswith(marker[:size])), 0)
