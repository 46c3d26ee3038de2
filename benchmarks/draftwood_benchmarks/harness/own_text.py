"""What benchmarks say of the model's own text, which a service writes while it is idle."""

from __future__ import annotations

from typing import Annotated

import typer

OwnTextOption = Annotated[
    int, typer.Option(min=0, help="Tokens that the model writes by itself first, as the setting own_text_tokens.")
]


def own_text_title(tokens: int) -> str:
    """For the title of a table; "" without."""
    return f"; after {tokens:,} tokens of the model's own" if tokens else ""
