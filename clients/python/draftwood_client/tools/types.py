"""Tools that a model may call, and how it writes calls."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls: `begin`, a JSON object with the name and the arguments, and `end`.

    Attributes:
        begin, end: before the first call and after the last, without special tokens.
        between: between two calls; None for a model that writes one call at most.
        name_key, arguments_key: keys of the object.
    """

    begin: str
    end: str
    between: str | None
    name_key: str
    arguments_key: str

    @property
    def is_marked(self) -> bool:
        """Whether a call begins with a marker such as "<tool_call>", and not as any JSON or list does."""
        return any(character.isalnum() for character in self.begin)
