"""Tools that a model may call, and the calls in its answers."""

from draftwood_client.tools.reader import ToolCallReader
from draftwood_client.tools.types import Tool, ToolCall, ToolFormat

__all__ = ["Tool", "ToolCall", "ToolCallReader", "ToolFormat"]
