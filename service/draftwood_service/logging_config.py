"""Log format: structlog for this program, with the same renderer for libraries that use the standard `logging`."""

from __future__ import annotations

import logging
import os
import sys
from typing import Literal, TextIO

import structlog
from structlog.tracebacks import ExceptionDictTransformer

# One list for good: loggers keep the one that they saw first, so that another would not reach them.
_PROCESSORS: list[structlog.typing.Processor] = []


def configure_logging(level: str, style: Literal["console", "json"], stream: TextIO | None = None) -> None:
    """Writes log lines of `level` and above to `stream` (None: standard error), as text or one JSON object a line."""
    stream = sys.stderr if stream is None else stream
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    colors = stream.isatty() and not os.environ.get("NO_COLOR")
    # Tracebacks without local variables, which may contain prompts.
    renderer: list[structlog.typing.Processor] = (
        [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            structlog.processors.JSONRenderer(),
        ]
        if style == "json"
        else [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)]
    )
    _PROCESSORS[:] = [
        structlog.stdlib.filter_by_level,
        *shared,
        structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
    ]
    structlog.configure(
        processors=_PROCESSORS,
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
