"""Trains a small chat model on questions and answers: tokenizer, Llama weights and chat template.

    python tools/train_demo_model.py train support.jsonl --heldout heldout.jsonl --out model
    python tools/train_demo_model.py evaluate model heldout.jsonl

Each line of the files has an `instruction` and a `response`; `tools.demo_model.corpus` prepares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from draftwood_benchmarks.harness.report import console, progress
from tools.demo_model.corpus import (
    END,
    MAX_POSITIONS,
    PAD,
    USER,
    Exchange,
    encoded,
    packed_rows,
    read_exchanges,
    trained_tokenizer,
    without,
)

app = typer.Typer(
    help="Train and evaluate models like the one in model_runner/draftwood_model_runner/loading/demo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


class Recipe(NamedTuple):
    """Everything that determines the result of a training run besides its data. Defaults: the bundled model.

    Attributes:
        mlp: width of the feed-forward layers.
        context: tokens in a training row; a longer document is cut there.
        batch: rows per step.
        peak_rate: learning rate at the end of the warm-up; it then decays along a cosine to a tenth.
        warmup: steps of the warm-up.
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

    def learning_rate(self, step: int) -> float:
        """The rate of step 0, 1, ... `steps` - 1."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.peak_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="JSONL with 'instruction' and 'response' in each line.")],
    out: Annotated[Path, typer.Option(help="New folder for the model.")],
    heldout: Annotated[Path, typer.Option(help="JSONL of exchanges to evaluate on; they are left out of training.")],
    steps: Annotated[int, typer.Option(min=1, help="The learning rate decays over them.")] = Recipe().steps,
) -> None:
    """Train a model from scratch."""
    exchanges, measured = read_exchanges(data), read_exchanges(heldout)
    out.mkdir(parents=True)
    trained(without(exchanges, measured), out, Recipe(steps=steps))
    evaluate(out, heldout)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="Folder of a model that `train` wrote.")],
    data: Annotated[Path, typer.Argument(help="JSONL of exchanges that the model was not trained on.")],
) -> None:
    """Evaluate how well a model predicts the answers, given the questions, in fp32."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    console.print(f"{model}: {evaluation(loaded, AutoTokenizer.from_pretrained(model), read_exchanges(data))}")


def new_model(recipe: Recipe) -> LlamaForCausalLM:
    """With weights that depend on the recipe's seed only."""
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
    return LlamaForCausalLM(config)


def trained(exchanges: Sequence[Exchange], folder: Path, recipe: Recipe) -> None:
    """Trains a model, and writes it with its tokenizer, rounded to bf16, for `AutoModelForCausalLM`."""
    trained_tokenizer(exchanges, recipe.vocab_size).save_pretrained(folder)
    documents = [prompt + answer for prompt, answer in encoded(AutoTokenizer.from_pretrained(folder), exchanges)]
    model = new_model(recipe)
    groups = [  # AdamW decays matrices, not norms
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95))
    rows = packed_rows(documents, recipe.context, recipe.seed)
    model.train()
    for step in progress(range(recipe.steps), f"{len(documents)} documents, {sum(map(len, documents))} tokens"):
        tokens, positions = (torch.tensor(part) for part in zip(*islice(rows, recipe.batch), strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            # Where positions do not increase by one, transformers masks attention between documents.
            logits = model(tokens, position_ids=positions, use_cache=False).logits
        targets = tokens.masked_fill(positions == 0, -100)[:, 1:]
        loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        optimizer.step()
        if step % 100 == 0:
            console.print(f"step {step}: loss {loss.item():.3f}")
    model.bfloat16().save_pretrained(folder)


class Evaluation(NamedTuple):
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


@torch.inference_mode()
def evaluation(model: Any, tokenizer: Any, exchanges: Sequence[Exchange]) -> Evaluation:
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
    return Evaluation(len(exchanges), tokens, sum(len(answer.encode()) for _, answer in exchanges), nats, predicted)


if __name__ == "__main__":
    app()
