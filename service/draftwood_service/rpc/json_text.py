"""Reads JSON objects in a text that grows."""

from __future__ import annotations

import json
import math
import re

from draftwood_service.tools import MAX_NESTING

_DECODER = json.JSONDecoder()
_MARKS = re.compile(r'\\.|["{}]', re.DOTALL)
_BLANKS = re.compile(r"[ \t\n\r]*")
_IN_STRING = re.compile(
    r'[^"\\\x00-\x1f\ud800-\udfff]+|\\["\\/bfnrt]|\\u(?![dD][89abAB])(?![dD][c-fC-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
"""A piece of a string; an escape of half a surrogate pair, which is no text, is none."""
_BEGUN_ESCAPE = re.compile(
    r"\\(?:u(?:[dD](?:[89abAB][0-9a-fA-F]{0,2}|[0-7]?[0-9a-fA-F]{0,2})|[0-9a-fA-F]{0,3})?)?\Z"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?\Z"
)
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_SCALAR_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]+")


class JsonObject:
    """Reads a JSON object that grows, as RFC 8259 has it and every reader takes it: no NaN, no half of a surrogate
    pair, at most `MAX_NESTING` levels.

    Args:
        within: it reads on behind a member.

    Attributes:
        complete: its last bracket was read.
        broken: what follows is no JSON.
    """

    def __init__(self, within: bool = False) -> None:
        self._stack = ["}"] if within else []
        self._expected = "," if within else "{"
        self._is_key = False
        self.complete = self.broken = False

    def read(self, text: str) -> int:
        """How many characters of a text that goes on where the last one was read to are certain to be part of it."""
        at = 0
        while not self.complete and not self.broken and (end := self._next(text, at)) > at:
            at = end
        return at

    def _next(self, text: str, at: int) -> int:
        """Behind the next token; `at` if it is not complete, or not allowed there."""
        if self._expected == '"':
            return self._string(text, at)
        begin = _BLANKS.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if begin == len(text):
            return at
        mark = text[begin]
        if mark in "{[" and self._expected in ("{", "value", "value]") and (mark == "{" or self._stack):
            self._stack.append("}" if mark == "{" else "]")
            self._expected = "key}" if mark == "{" else "value]"
            self.broken = len(self._stack) > MAX_NESTING
        elif self._stack and mark == self._stack[-1] and self._expected in (",", "key}", "value]"):
            self._close()
        elif mark == '"' and self._expected in ("key", "key}", "value", "value]"):
            self._is_key, self._expected = self._expected.startswith("key"), '"'
        elif mark == "," and self._expected == ",":
            self._expected = "key" if self._stack[-1] == "}" else "value"
        elif mark == ":" and self._expected == ":":
            self._expected = "value"
        elif self._expected in ("value", "value]"):
            return self._scalar(text, at, begin)
        else:
            self.broken = True
        return at if self.broken else begin + 1

    def _close(self) -> None:
        self._stack.pop()
        self._expected = ","
        self.complete = not self._stack

    def _string(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        if text[at] == '"':
            self._expected = ":" if self._is_key else ","
            return at + 1
        if (piece := _IN_STRING.match(text, at)) is not None:
            return piece.end()
        self.broken = _BEGUN_ESCAPE.match(text, at) is None
        return at

    def _scalar(self, text: str, at: int, begin: int) -> int:
        """A number, true, false or null; its end must be seen, for "1" may become "12"."""
        written = _SCALAR_CHARACTERS.match(text, begin)
        if written is None:
            self.broken = True
        elif written.end() < len(text):
            self.broken = _SCALAR.fullmatch(written[0]) is None or not _is_finite(written[0])
            if not self.broken:
                self._expected = ","
                return written.end()
        return at


class OpenObject:
    """Finds where a JSON object ends in a text that grows; each character is looked at once."""

    def __init__(self, at: int) -> None:
        self._at, self._depth, self._in_string = at, 0, False

    def end(self, text: str) -> int | None:
        """Behind its last bracket; None if it goes on behind the text."""
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


def member(text: str, at: int, name: str) -> str:
    """The text of a member of the JSON object at a place, as it was written; the last one of that name."""
    member, at = "", behind_blanks(text, at + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = behind_blanks(text, behind_blanks(text, at) + 1)  # behind the colon
        _, end = _DECODER.raw_decode(text, begin)
        if key == name:
            member = text[begin:end]
        at = behind_blanks(text, end)
        at = behind_blanks(text, at + 1) if text[at] == "," else at
    return member


def _is_finite(scalar: str) -> bool:
    """Whether readers that have 64-bit floats can read it: not 1e999."""
    return not scalar[-1].isdigit() or math.isfinite(float(scalar))


def behind_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at
