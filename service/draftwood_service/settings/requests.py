"""What requests may ask for, and how their answers are sent."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from draftwood_model_runner.errors import InvalidValueError
from draftwood_service.settings.group import SettingsGroup, Size
from draftwood_tenants.shaping import DeltaShaping


class RequestSettings(SettingsGroup):
    """Limits of requests."""

    max_message_bytes: Size = Field(default=4 * 2**20, ge=1024, le=2**31 - 1)
    """Maximum size of a request in bytes"""
    max_prompt_characters: int | None = Field(default=None, ge=1)
    """Maximum number of characters of a prompt, all chat messages together; unset: 16 for each token of the context, at
    least 65,536"""
    max_chat_messages: int = Field(default=1024, ge=1)
    """Maximum number of chat messages of a prompt"""
    default_timeout: float = Field(default=600.0, gt=0)
    """Seconds for a request without a deadline"""
    max_timeout: float = Field(default=3600.0, gt=0)
    """Maximum number of seconds for any request"""

    @model_validator(mode="after")
    def _check_timeouts(self) -> Self:
        if self.default_timeout > self.max_timeout:
            allowed = f"it must be at most max_timeout = {self.max_timeout:g}"
            raise InvalidValueError("default_timeout", self.default_timeout, allowed)
        return self


class StreamSettings(SettingsGroup):
    """Streams.

    The default of stream_interval was measured, see docs/decisions: "Threads that spin".
    """

    stream_interval: float = Field(default=0.03, ge=0, le=60)
    """Minimum number of seconds between two messages of a stream, except the first and the last"""
    delta_cadence: float = 0.0
    """Seconds between two deltas of an answer, sent with or without new tokens, so that times reveal nothing of them; 0
    sends tokens as they come"""
    delta_padding: Size = 0
    """Size in bytes that each message of an answer is filled up to a multiple of, so that sizes reveal nothing of it; 0
    for no padding"""
    delta_rounding: int = 1
    """With delta_cadence: the number of deltas of an answer is rounded up to a multiple of this"""

    @property
    def delta_shaping(self) -> DeltaShaping:
        """How answers are sent. Raises InvalidValueError for a value outside its range."""
        try:
            return DeltaShaping(self.delta_cadence, self.delta_padding, self.delta_rounding)
        except InvalidValueError as error:
            raise InvalidValueError(f"delta_{error.field}", error.value, error.allowed) from None
