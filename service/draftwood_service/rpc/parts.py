"""Reads what a model writes: separates its reasoning and its calls of tools from its text, as they come.

Works on the text of an answer alone. What was handed out stays: arguments of a call are checked to be JSON before they
are handed out, character by character, so that a call can be cut off, but is never anything else than the beginning of
a JSON object.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable
from itertools import groupby

from draftwood.v1 import generation_pb2 as pb
from draftwood_service.rpc.json_text import JsonObject, OpenObject, behind_blanks, member
from draftwood_service.tools import ReasoningFormat, ToolFormat, is_marked

_DECODER = json.JSONDecoder()
_OBJECT = re.compile(r'\{\s*(?:(["}])|\Z)|\Z')
"""The beginning of a JSON object or, if the group is empty, of what may yet be one."""
_MAX_HEAD = 4096
"""Characters of a call up to its arguments. One with more, such as a name without an end, is read when it is
complete."""
_ID_BYTES = 29
"""Of the id of a call."""
_FRAME_BYTES = 32
"""Of a delta with nothing but the beginning of a call: tags, lengths, indexes, and a token."""


class AnswerReader:
    """Separates the reasoning and the calls of one answer from its text.

    Reasoning is at the start of an answer: behind its marker, or from the first character if the prompt ends with the
    marker. White space around it is none of it, and none of the text.

    Args:
        reasoning: how the model marks it; None reads none.
        opened: the prompt ends with the marker.
        tools: how the model writes calls; None reads none.
        names: of the tools.

    Attributes:
        calls: that are complete.
        reasoning_tokens: that ended within reasoning so far; None if none is read.
    """

    def __init__(
        self,
        reasoning: ReasoningFormat | None = None,
        opened: bool = False,
        tools: ToolFormat | None = None,
        names: Iterable[str] = (),
    ) -> None:
        self._reasoning = None if reasoning is None else _ReasoningReader(reasoning, opened)
        self._calls = None if tools is None else ToolCallReader(tools, names)
        self.reasoning_tokens: int | None = None if reasoning is None else 0
        self._undecided = 0

    @property
    def is_plain(self) -> bool:
        """All of the answer is text."""
        return self._reasoning is None and self._calls is None

    @property
    def calls(self) -> int:
        return 0 if self._calls is None else self._calls.complete

    def push(self, text: str) -> list[pb.Part]:
        """What is certain after the text of one more token."""
        if self._reasoning is None:
            return self._body(text)
        self._undecided += self._reasoning.inside or self._reasoning.at_start
        thought, rest = self._reasoning.push(text)
        if not self._reasoning.at_start:
            assert self.reasoning_tokens is not None
            self.reasoning_tokens += self._undecided if self._reasoning.begun else 0
            self._undecided = 0
        return [*([pb.Part(reasoning=thought)] if thought else ()), *(self._body(rest) if rest else ())]

    def close(self) -> list[pb.Part]:
        """What is left at the end of the answer."""
        parts: list[pb.Part] = []
        if self._reasoning is not None:
            thought, rest = self._reasoning.close()
            parts += [pb.Part(reasoning=thought)] if thought else []
            parts += self._body(rest) if rest else []
        return parts if self._calls is None else [*parts, *self._calls.close()]

    def _body(self, text: str) -> list[pb.Part]:
        if self._calls is not None:
            return self._calls.push(text)
        return [pb.Part(text=text)] if text else []


def joined(parts: Iterable[pb.Part]) -> list[pb.Part]:
    """The parts, pieces of the same one that follow each other as one."""
    whole = []
    for (kind, _), pieces in groupby(parts, lambda part: (part.WhichOneof("part"), part.tool_call.index)):
        first, *others = pieces
        one = pb.Part()
        one.CopyFrom(first)
        if kind == "tool_call":
            one.tool_call.arguments += "".join(piece.tool_call.arguments for piece in others)
        elif kind is not None:
            setattr(one, kind, "".join(getattr(piece, kind) for piece in (first, *others)))
        whole.append(one)
    return whole


def whole_parts(parts: Iterable[pb.Part]) -> list[pb.AnswerPart]:
    """The parts of a whole answer, from all pieces of a stream."""
    whole = []
    for part in joined(parts):
        answered = pb.AnswerPart()
        if part.HasField("tool_call"):
            call = part.tool_call
            answered.tool_call.MergeFrom(pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments))
        elif part.HasField("reasoning"):
            answered.reasoning = part.reasoning
        else:
            answered.text = part.text
        whole.append(answered)
    return whole


def bytes_of_beginnings(names: Iterable[str]) -> int:
    """Upper bound of the bytes of a delta with one token, without details, and the beginning of a call."""
    return max((len(name.encode()) for name in names), default=0) + _ID_BYTES + _FRAME_BYTES


class _ReasoningReader:
    """Separates reasoning from what follows it.

    Attributes:
        at_start: whether the answer begins with the marker cannot be told yet.
        begun: there is reasoning.
        inside: the text goes on within it.
    """

    def __init__(self, form: ReasoningFormat, opened: bool) -> None:
        self._begin, self._end = form.begin.strip(), form.end.strip()
        self._held = ""
        self._at_body = self._blank = False
        self.at_start = True
        self.begun = self.inside = opened

    def push(self, text: str, last: bool = False) -> tuple[str, str]:
        """What is certain: reasoning, and what follows it."""
        if not (self._held or self.at_start or self.inside or self._at_body):
            return "", text
        self._held += text
        if self.at_start and not self._started(last):
            return "", ""
        thought = self._thought(last) if self.inside else ""
        return thought, "" if self.inside else self._rest(last)

    def close(self) -> tuple[str, str]:
        return self.push("", last=True)

    def _started(self, last: bool) -> bool:
        """Reads the marker, if the answer begins with it; False while that cannot be told."""
        begun = self._held.lstrip()
        if len(begun) < len(self._begin) and self._begin.startswith(begun) and not last:
            return False
        if begun.startswith(self._begin):
            self._held, self.inside = begun[len(self._begin) :], True
        self.at_start, self.begun, self._blank = False, self.inside, self.inside
        return True

    def _thought(self, last: bool) -> str:
        """Takes reasoning up to its end, without the white space around it."""
        if self._blank:
            self._held = self._held.lstrip()
            self._blank = not self._held
        at = self._held.find(self._end)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(self._end) :]
            self.inside, self._at_body = False, True
            return thought
        size = len(self._held) if last else len(self._held) - _overlap(self._held, self._end)
        size = size if last else len(self._held[:size].rstrip())
        thought, self._held = self._held[:size], self._held[size:]
        return thought.rstrip() if last else thought

    def _rest(self, last: bool) -> str:
        if self._at_body:
            self._held = self._held.lstrip()
            self._at_body = not self._held and not last
        rest, self._held = self._held, ""
        return rest


class ToolCallReader:
    """Separates the calls of an answer from its text.

    If a call begins with a marker such as "<tool_call>", calls may be anywhere; if it begins with a bracket, only at
    the start of the answer or behind another call, as any text can have brackets. White space around calls is part of
    them.

    A call begins once its name, that of a tool, and the first bracket of its arguments are written, in this order; its
    arguments follow as they come. An object that has them in another order, or more than them before the arguments, is
    read when it is complete, and is a call if its arguments are JSON. What turns out to be no call is text.

    Args:
        form: how the model writes calls.
        names: of the tools; a call of another one is text.

    Attributes:
        complete: calls that were written to their end.
    """

    def __init__(self, form: ToolFormat, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._keys = form.name_key, form.arguments_key
        self._begin, self._end = form.begin.strip(), form.end.strip()
        between = (form.between or "").strip()
        self._between = "" if self._end and between.startswith(self._end) else between
        self._anywhere = is_marked(form.begin)
        self._next_to_each_other = form.between is not None and not self._between and not self._end
        name, arguments = (re.escape(json.dumps(key)) for key in self._keys)
        self._head = re.compile(rf'\{{\s*{name}\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*{arguments}\s*:\s*(?=\{{)')
        self._held = ""
        self._object: OpenObject | None = None
        self._state = self._in_text
        self._json = JsonObject()
        self._at_start, self._called = True, False
        self._begun = 0
        self.complete = 0

    def push(self, text: str) -> list[pb.Part]:
        """What is certain after some more text."""
        self._held += text
        return self._read(last=False)

    def close(self) -> list[pb.Part]:
        """What is left at the end of the answer."""
        return self._read(last=True)

    def _read(self, last: bool) -> list[pb.Part]:
        parts: list[pb.Part] = []
        while self._held and self._state(parts, last):
            pass
        return parts

    def _in_text(self, parts: list[pb.Part], last: bool) -> bool:
        """Takes text up to where a call may begin, and reads its beginning. False if more text must come first."""
        if self._object is None:
            self._take(self._next_call(last), parts)
            if not self._held or (not last and self._may_grow()):
                return False
        held = self._held
        blank = len(held) - len(held.lstrip())
        at = blank + len(self._begin)
        opened = self._opened(at, parts, last) if held.startswith(self._begin, blank) else False
        if opened is False:
            self._take(at if self._anywhere else len(held), parts)
        return opened is not None

    def _opened(self, at: int, parts: list[pb.Part], last: bool) -> bool | None:
        """Whether a call begins at a place of the held text, which is taken then; None if that cannot be told yet."""
        held = self._held
        at = behind_blanks(held, at)
        short = self._object is None or len(held) - at <= _MAX_HEAD
        if short and (head := self._head.match(held, at)) is not None:
            self._object = None
            name = _text_of(head[1])
            if name not in self._names:
                return False
            parts.append(self._begin_call(name, ""))
            self._held, self._json, self._state = held[head.end() :], JsonObject(), self._in_arguments
            return True
        begun = None if last else _OBJECT.match(held, at)
        if begun is not None:
            self._object = self._object or (OpenObject(at) if begun[1] else None)
            if self._object is None or self._object.end(held) is None:
                return None
        self._object = None
        call, end = self._whole_call(held, at)
        if call is None:
            return False
        parts.append(self._begin_call(*call))
        self._held = held[end:]
        self._ended()
        return True

    def _in_arguments(self, parts: list[pb.Part], last: bool) -> bool:
        size = self._json.read(self._held)
        broken = self._json.broken
        if last and not self._json.complete and not broken:
            size = len(self._held)
        if size:
            call = pb.ToolCallDelta(index=self._begun - 1, arguments=self._held[:size])
            parts.append(pb.Part(tool_call=call))
            self._held = self._held[size:]
        if self._json.complete:  # the object with the name goes on behind its arguments
            self._json, self._state = JsonObject(within=True), self._behind_arguments
            return True
        if broken:
            self._to_text(at_start=False)
        return broken

    def _behind_arguments(self, parts: list[pb.Part], last: bool) -> bool:
        """Drops the end of the object of a call."""
        size = self._json.read(self._held)
        if self._json.complete:
            self._held = self._held[size:]
            self._ended()
            return True
        if self._json.broken or last:
            self._to_text(at_start=False)
            return True
        self._held = self._held[size:]
        return False

    def _behind_call(self, parts: list[pb.Part], last: bool) -> bool:
        at = behind_blanks(self._held, 0)
        rest = self._held[at:]
        if self._between and rest.startswith(self._between):
            opened = self._opened(at + len(self._between), parts, last)
            if opened is False:
                self._to_text(at_start=False)
            return opened is not None
        if self._end and rest.startswith(self._end):
            self._held = rest[len(self._end) :]
            self._to_text(at_start=False)
            return True
        if any(mark and mark.startswith(rest) for mark in (self._end, self._between)):
            self._held = "" if last else self._held
            return False
        self._to_text(at_start=self._next_to_each_other)
        return True

    def _ended(self) -> None:
        self.complete += 1
        self._called = True
        self._state = self._behind_call

    def _to_text(self, at_start: bool) -> None:
        self._state, self._at_start = self._in_text, at_start

    def _begin_call(self, name: str, arguments: str) -> pb.Part:
        self._begun += 1
        call = pb.ToolCallDelta(
            index=self._begun - 1, id=f"call_{uuid.uuid4().hex[:24]}", name=name, arguments=arguments
        )
        return pb.Part(tool_call=call)

    def _take(self, size: int, parts: list[pb.Part]) -> None:
        """Text of so many characters; none if it is only the white space behind the last call."""
        text, self._held = self._held[:size], self._held[size:]
        if text and not (self._called and not self._held and not text.strip()):
            self._at_start = self._called = False
            parts.append(pb.Part(text=text))

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

    def _whole_call(self, text: str, at: int) -> tuple[tuple[str, str] | None, int]:
        """Name and arguments of the call at a place, and where it ends; None if there is none, or its arguments are not
        JSON that every reader takes."""
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return None, at
        name, arguments = (value.get(key) for key in self._keys) if isinstance(value, dict) else (None, None)
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None, at
        written, checked = member(text, at, self._keys[1]), JsonObject()
        checked.read(written)
        return ((name, written) if checked.complete else None), end


def _text_of(literal: str) -> str | None:
    """What a JSON string stands for; None if it is not JSON."""
    try:
        text = json.loads(literal)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


def _overlap(text: str, marker: str) -> int:
    """Characters at the end of a text that a marker begins with."""
    return next((size for size in range(min(len(text), len(marker)), 0, -1) if text.endswith(marker[:size])), 0)
