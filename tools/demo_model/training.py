"""A training run of a Llama model: recipe, steps, checkpoints, evaluation. `tools.demo_model.corpus` makes the rows."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from draftwood_model_runner.errors import InvalidInputError, InvalidValueError
from tools.demo_model.corpus import END, MAX_POSITIONS, PAD, SPECIAL_TOKENS, USER, Exchange, encoded, packed_rows

CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines the result of a training run besides its data. Defaults: the bundled model.

    Attributes:
        mlp: width of the feed-forward layers.
        context: tokens in a training row; a longer document is cut there.
        batch: rows per step.
        peak_rate: learning rate at the end of the warm-up; it then decays along a cosine to a tenth.
        warmup: steps of the warm-up.

    Raises:
        InvalidValueError: a value is out of range.
    """

    vocab_size: int = 4096
    layers: int = 6
    hidden: int = 256
    head_dim: int = 64
    mlp: int = 704
    context: int = 256
    batch: int = 16
    steps: int = 6000
    warmup: int = 100
    peak_rate: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        at_least = {"vocab_size": 256 + len(SPECIAL_TOKENS), "context": 8, "warmup": 0, "seed": 0}
        for name in (
            "vocab_size",
            "layers",
            "hidden",
            "head_dim",
            "mlp",
            "context",
            "batch",
            "steps",
            "warmup",
            "seed",
        ):
            if getattr(self, name) < at_least.get(name, 1):
                raise InvalidValueError(name, getattr(self, name), f"it must be at least {at_least.get(name, 1)}")
        if self.context > MAX_POSITIONS:
            raise InvalidValueError("context", self.context, f"it must be at most {MAX_POSITIONS} tokens")
        if self.head_dim % 2:
            raise InvalidValueError("head_dim", self.head_dim, "it must be even, for rotary positions")
        if self.hidden % self.head_dim:
            raise InvalidValueError(
                "hidden", self.hidden, f"it must be a multiple of head_dim, which is {self.head_dim}"
            )
        if not 0 < self.peak_rate < 1:
            raise InvalidValueError("peak_rate", self.peak_rate, "it must be between 0 and 1")

    def learning_rate(self, step: int) -> float:
        """The rate of step 0, 1, ... `steps` - 1."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.peak_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts answers, given their questions: sums over all answer tokens, `<|end|>` included.

    Attributes:
        nats: negative log-likelihood.
        predicted: tokens that are the argmax of the model's logits.
    """

    answers: int
    tokens: int
    utf8_bytes: int
    nats: float
    predicted: int

    def __str__(self) -> str:
        return (
            f"{self.answers} held-out answers: perplexity {math.exp(self.nats / self.tokens):.3f},"
            f" {self.nats / self.tokens:.4f} nats per token,"
            f" {self.nats / math.log(2) / self.utf8_bytes:.4f} bits per byte,"
            f" next token predicted {self.predicted / self.tokens:.1%}"
        )


@dataclass
class Run:
    """The state of a training run. The optimizer belongs to the model."""

    recipe: Recipe
    documents: list[list[int]]
    model: LlamaForCausalLM
    optimizer: torch.optim.AdamW
    step: int = 0


def new_run(recipe: Recipe, documents: list[list[int]]) -> Run:
    """A run at step 0. The weights depend on the recipe's seed only; AdamW decays matrices, not norms."""
    torch.manual_seed(recipe.seed)
    heads = recipe.hidden // recipe.head_dim
    config = LlamaConfig(
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD,
        bos_token_id=USER,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return Run(recipe, documents, model, torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95)))


def train_until(run: Run, deadline: float, after_step: Callable[[float], None]) -> None:
    """Trains until the recipe's last step or `deadline` (`time.monotonic()`), whichever is first; at least one step.

    `after_step(loss)` gets the mean nats per token of the step's batch. Interruptions do not change the result: step i
    has the same rows and the same learning rate in any case.
    """
    recipe = run.recipe
    rows = islice(packed_rows(run.documents, recipe.context, recipe.seed), run.step * recipe.batch, None)
    run.model.train()
    while run.step < recipe.steps:
        tokens, positions = (torch.tensor(part) for part in zip(*islice(rows, recipe.batch), strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            # Where positions do not increase by one, transformers masks attention between documents.
            logits = run.model(tokens, position_ids=positions, use_cache=False).logits
        targets = tokens.masked_fill(positions == 0, -100)[:, 1:]
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten())
        run.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        for group in run.optimizer.param_groups:
            group["lr"] = recipe.learning_rate(run.step)
        run.optimizer.step()
        run.step += 1
        after_step(loss.item())
        if time.monotonic() >= deadline:
            break


def save_checkpoint(run: Run, folder: Path) -> None:
    """Writes the state of the run atomically: after a crash there is either the previous checkpoint or this one."""
    state = {
        "recipe": asdict(run.recipe),
        "data": _digest(run.documents),
        "step": run.step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
    }
    temporary = folder / f"{CHECKPOINT}.tmp"
    torch.save(state, temporary)
    temporary.replace(folder / CHECKPOINT)


def restore(run: Run, folder: Path) -> None:
    """Sets the run to the state of the checkpoint in `folder`.

    Raises:
        InvalidValueError: the checkpoint has another recipe.
        InvalidInputError: the checkpoint has other data.
    """
    state = torch.load(folder / CHECKPOINT, weights_only=True)
    for field, value in asdict(run.recipe).items():
        if value != state["recipe"][field]:
            raise InvalidValueError(field, value, f"it must be {state['recipe'][field]!r} to resume this run")
    if state["data"] != _digest(run.documents):
        raise InvalidInputError("data", None, "not the data that the run to resume began with")
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.step = state["step"]


def save_model(run: Run, folder: Path) -> None:
    """Writes the current model, rounded to bf16, for `AutoModelForCausalLM`."""
    rounded = LlamaForCausalLM(run.model.config).bfloat16()
    rounded.load_state_dict(run.model.state_dict())
    rounded.save_pretrained(folder)


def _digest(documents: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(documents).encode()).hexdigest()


@torch.inference_mode()
def evaluate_on(model: Any, tokenizer: Any, exchanges: list[Exchange]) -> Evaluation:
    """Teacher-forced evaluation of every answer after its question, one at a time, without truncation."""
    model.eval()
    tokens, nats, predicted = 0, 0.0, 0
    for prompt, answer in encoded(tokenizer, exchanges):
        ids = torch.tensor([prompt + answer])
        logits = model(ids, use_cache=False, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
        targets = ids[0, len(prompt) :]
        nats += F.cross_entropy(logits, targets, reduction="sum").item()
        predicted += int((logits.argmax(-1) == targets).sum())
        tokens += len(answer)
    return Evaluation(len(exchanges), tokens, sum(len(e.answer.encode()) for e in exchanges), nats, predicted)
