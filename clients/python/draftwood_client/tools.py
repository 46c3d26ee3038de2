"""Tools that a model may call, and how it writes calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from draftwood.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        parameters: a JSON schema of its arguments, an object, as JSON; "" if it has none.
    """

    name: str
    description: str = ""
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has written.

    Attributes:
        arguments: a JSON object, as JSON: the text that the model wrote.
        id: by which the result refers to it.
    """

    name: str
    arguments: str
    id: str = ""


ToolFormat = pb.ToolFormat
"""How a model writes calls: `begin`, a JSON object with the name and the arguments, and `end`."""


def is_marked(form: ToolFormat) -> bool:
    """Whether a call begins with a marker such as "<tool_call>", and not as any JSON or list does."""
    return any(character.isalnum() for character in form.begin)


_DECODER = json.JSONDecoder()
_OBJECT = re.compile(r'\{\s*(?:(["}])|\Z)|\Z')
"""The beginning of a JSON object or, where the group is empty, of what may yet be one."""
_MARKS = re.compile(r'\\.|["{}]', re.DOTALL)


class ToolCallReader:
    """Separates the calls of an answer from its text, as the answer comes.

    Where a call begins with a marker such as "<tool_call>", calls may be anywhere; where it begins with a bracket, only
    at the start of the answer or behind another call, as any text can have brackets. White space around calls is part
    of them. What turns out to be no call is text; nothing is lost.

    Args:
        form: how the model writes calls.
        names: of the tools; a call of another one is text.
    """

    def __init__(self, form: ToolFormat, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._keys = form.name_key, form.arguments_key
        self._begin, self._end = form.begin.strip(), form.end.strip()
        between = form.between.strip()
        self._between = "" if self._end and between.startswith(self._end) else between
        self._anywhere = is_marked(form)
        self._next_to_each_other = form.HasField("between") and not self._between and not self._end
        self._held = ""
        self._object: _OpenObject | None = None
        self._at_start, self._called = True, False

    def push(self, text: str) -> list[str | ToolCall]:
        """What is certain after some more text: pieces of text and calls, in their order."""
        self._held += text
        if self._object is not None and self._object.end(self._held) is None:
            return []
        return self._read(last=False)

    def close(self) -> list[str | ToolCall]:
        """What is left at the end of the answer."""
        return self._read(last=True)

    def _read(self, last: bool) -> list[str | ToolCall]:
        pieces: list[str | ToolCall] = []
        while self._held:
            pieces += self._take(self._next_call(last))
            if not self._held or (not last and self._may_grow()):
                break
            size, calls = self._calls(last)
            if size is None:
                break
            if calls:
                pieces += calls
                self._held, self._at_start, self._called = self._held[size:], self._next_to_each_other, True
            else:
                pieces += self._take(size)
        return pieces

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
            begun = None if last else _OBJECT.match(held, at)
            if begun is not None:
                self._object = _OpenObject(at) if begun[1] else None
                if self._object is None or self._object.end(held) is None:
                    return None, []
            self._object = None
            call, end = self._call(held, at)
            if call is None:
                return no_call
            calls.append(call)
            if not self._end and not self._between:
                return end, calls
            at = _behind_blanks(held, end)
            rest = held[at:]
            if self._between and rest.startswith(self._between):
                at += len(self._between)
            elif self._end and rest.startswith(self._end):
                return at + len(self._end), calls
            elif last or (not self._end and rest and not self._between.startswith(rest)):
                return (end, calls) if not (rest and self._end) else no_call
            elif self._end.startswith(rest) or self._between.startswith(rest):
                return None, []
            else:
                return no_call

    def _call(self, text: str, at: int) -> tuple[ToolCall | None, int]:
        """The call at a place and where it ends; None if there is none, or not in JSON that every reader takes."""
        try:
            value, end = _DECODER.raw_decode(text, at)
            name, arguments = (value.get(key) for key in self._keys) if isinstance(value, dict) else (None, None)
            if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
                return None, at
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):  # such as NaN, half of a surrogate pair, lists that are nested too deeply
            return None, at
        return ToolCall(name, _member(text, at, self._keys[1]), f"call_{uuid.uuid4().hex[:24]}"), end


class _OpenObject:
    """Finds where a JSON object ends in a text that grows; each character is looked at once."""

    def __init__(self, at: int) -> None:
        self._at, self._depth, self._in_string = at, 0, False

    def end(self, text: str) -> int | None:
        """Behind its last bracket; None where it goes on behind the text."""
        at = self._at
        for mark in _MARKS.finditer(text, at):
            at = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark[0] in "{}":
                self._depth += 1 if mark[0] == "{" else -1
                if not self._depth:
                    return at
        self._at = max(at, len(text) - text.endswith("\\"))  # what is escaped may be yet to come
        return None


def _member(text: str, at: int, name: str) -> str:
    """The text of a member of the JSON object at a place, as it was written; the last one of that name."""
    member, at = "", _behind_blanks(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _behind_blanks(text, _behind_blanks(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, begin)
        if key == name:
            member = text[begin:end]
        at = _behind_blanks(text, end)
        at = _behind_blanks(text, at + 1) if text[at] == "," else at
    return member


def _behind_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text that a marker begins with."""
    return next((size for size in range(min(len(text), len(marker)), 0, -1) if text.endswith(marker[:size])), 0)
