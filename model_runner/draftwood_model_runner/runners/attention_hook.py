"""How models of transformers come to call an attention function of ours, and how it knows the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

Step = TypeVar("Step")


@contextmanager
def setting(variable: ContextVar[Step], step: Step) -> Iterator[None]:
    """While it lasts, the variable has this value."""
    token = variable.set(step)
    try:
        yield
    finally:
        variable.reset(token)


class AttentionHook(Generic[Step]):
    """An attention function by its name, and the step that the model of this thread computes.

    The step is in a context variable, as some models do not hand on extra arguments of their forward. So no modelling
    file is touched.

    Args:
        name: by which transformers knows the function.
        function: takes module, query [1, head, T, key_dim], key [1, kv_head, T, key_dim], value [1, kv_head, T,
            value_dim], a mask, and keywords such as `scaling` and `sliding_window`; returns [1, T, head, value_dim] and
            no weights.
    """

    def __init__(self, name: str, function: Callable[..., tuple[Any, None]]) -> None:
        self._name, self._function = name, function
        self._step: ContextVar[Step] = ContextVar(name)

    def install(self, module: Any) -> None:
        """Lets a model call the function in place of its own attention."""
        from transformers import AttentionInterface  # imports modelling code, which most loading does without

        AttentionInterface.register(self._name, self._function)
        module.set_attn_implementation(self._name)

    def during(self, step: Step) -> AbstractContextManager[None]:
        """While it lasts, `step` is what `get` returns."""
        return setting(self._step, step)

    def get(self) -> Step:
        """The step, within `during`."""
        return self._step.get()
