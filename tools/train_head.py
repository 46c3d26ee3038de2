"""Trains a draft head for a model, in the form of EAGLE-3, from texts that the model writes itself.

    python -m tools.train_head texts --out texts.jsonl
    python -m tools.train_head train texts.jsonl --out head

The questions are the model's own as well (Magpie, arXiv 2406.08464), so that no data of others is needed. Training is
that of EAGLE-3 (arXiv 2503.01840): the head reads what three layers of the model hand on, then its own output as often
as it will in drafts ("training-time test"), and learns the model's probabilities of the tokens that it can draft. On
two cores, for SmolLM2 135M, texts take half an hour and training takes one.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import typer
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from draftwood_benchmarks.harness.models import ModelOptions, choose_model
from draftwood_benchmarks.harness.report import console
from draftwood_benchmarks.replay import Recording, read_trace
from draftwood_model_runner.engine import Engine, EngineConfig
from draftwood_model_runner.loading.draft_heads import WEIGHTS, EagleHead
from draftwood_model_runner.loading.loaded import LoadedModel, adopt
from draftwood_model_runner.loading.tokenizer import Tokenizer, load_tokenizer
from draftwood_model_runner.request import Request, SamplingParams, StopParams
from draftwood_model_runner.runners.batch import BatchRow, lay_out
from draftwood_model_runner.sequence import Sequence as EngineSequence
from draftwood_strategies.arrays import Int32Array
from draftwood_strategies.draft import EMPTY_TREE

app = typer.Typer(
    help="Train a draft head in the form of EAGLE-3 for a model, from the model's own texts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

BEGINNINGS = (
    "", "", "", "", "", "", "",
    "Write a Python function", "Complete this Python function:\n\ndef ", "def ", "Fix the bug in this code:\n",
    "Rewrite this code with better names:\n", "Explain this code:\n",
    "Solve this problem: ", "A shop sells", "If a train", "How many", "Calculate",
    "Write a short story", "Write an email", "Summarize the following text: ", "Correct the grammar: ",
    "Rewrite the following text: ", "What is the difference between", "Give me a list of", "Explain how",
    "Answer in JSON: ", "I need help with my order",
)  # fmt: skip
"""With what questions begin; the model writes on. Empty ones become what it was asked most in its training."""
_AT_ONCE, _ROUND = 64, 256
"""Sequences of a step, and questions of a round, after which what was written so far is saved."""
_QUESTION_TOKENS, _ANSWER_TOKENS = 128, 384
_SHORTEST = 8
"""Characters of a question."""
_MARKER = "\x00"
ModelOption = Annotated[str, typer.Option(help="Folder, GGUF file, hub id or name of the model.")]


@app.command()
def texts(
    out: Annotated[Path, typer.Option(help="New trace: JSON lines with prompt_ids and output_ids.")],
    model: ModelOption = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=1, help="Of all answers.")] = 250_000,
    seed: Annotated[int, typer.Option(min=0, max=1000)] = 0,
) -> None:
    """Let the model ask questions, and answer them, half of them greedily."""
    loaded = choose_model(ModelOptions(model=model)).load()
    capacity = _AT_ONCE * 2 * (_QUESTION_TOKENS + _ANSWER_TOKENS)
    config = EngineConfig(_AT_ONCE, adaptive_budget=False, kv_cache_tokens=capacity, prefix_cache=False)
    engine = Engine(loaded, config)
    written, total, number = 0, 0, seed << 32
    with out.open("w", encoding="utf-8") as lines:
        while total < tokens:
            for prompt, output in _answers(engine, loaded, _questions(engine, loaded, number), number):
                print(
                    json.dumps({"prompt_ids": prompt.tolist(), "output_ids": output.tolist()}), file=lines, flush=True
                )
                written, total = written + 1, total + output.size
            number += _ROUND
            console.print(f"{written:,} conversations, {total:,} tokens of answers")
    engine.close()


def _questions(engine: Engine, model: LoadedModel, first: int) -> list[str]:
    """Questions, sampled at temperature 1; those that are too short are left out."""
    before = model.tokenizer.render([{"role": "user", "content": _MARKER}], None).partition(_MARKER)[0]
    beginnings = [BEGINNINGS[i % len(BEGINNINGS)] for i in range(_ROUND)]
    prompts = [model.tokenizer.encode(before + beginning) for beginning in beginnings]
    sampling = [SamplingParams(temperature=1.0, top_k=50)] * _ROUND
    outputs = _finish(engine, prompts, sampling, first, _QUESTION_TOKENS)
    asked = [b + model.tokenizer.decode(output) for b, output in zip(beginnings, outputs, strict=True)]
    return [question.strip() for question in asked if len(question.strip()) >= _SHORTEST]


def _answers(engine: Engine, model: LoadedModel, asked: Sequence[str], first: int) -> list[Recording]:
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": question}]) for question in asked]
    greedy, sampled = SamplingParams(), SamplingParams(temperature=0.8, top_k=50)
    outputs = _finish(engine, prompts, [(greedy, sampled)[i % 2] for i in range(len(asked))], first, _ANSWER_TOKENS)
    return [pair for pair in zip(prompts, outputs, strict=True) if pair[1].size]


def _finish(
    engine: Engine, prompts: Sequence[Int32Array], sampling: Sequence[SamplingParams], first: int, most: int
) -> list[Int32Array]:
    """What the model writes after prompts; seeds count from `first`."""
    sequences = []
    for i, (prompt, how) in enumerate(zip(prompts, sampling, strict=True)):
        stop = StopParams(max_tokens=most)
        request = Request(request_id=str(i), prompt=prompt, stop=stop, sampling=replace(how, seed=first + i))
        sequences.append(EngineSequence(request))
        engine.add(sequences[-1])
    while engine.has_work:
        engine.step()
    return [np.array(sequence.output, np.int32) for sequence in sequences]


class Recipe(NamedTuple):
    """Everything that determines a training run besides its texts.

    Attributes:
        draft_vocab_size: the most frequent tokens of the texts, which the head can draft.
        unrolled: levels that are trained: at each but the first the head reads its own output.
        first_share: of the steps, in which the first level alone is trained, on which the others build.
        decay: of the loss with each level.
        batch: texts of a step.
        warmup: steps; the rate then decays along a cosine to a twentieth.
        longest: tokens of a text; a longer one is cut there.
        held_out: share of the texts that are not trained on.
    """

    draft_vocab_size: int = 7168
    unrolled: int = 3
    first_share: float = 0.75
    decay: float = 0.8
    batch: int = 2
    warmup: int = 40
    peak_rate: float = 1.5e-3
    longest: int = 448
    held_out: float = 0.03
    seed: int = 0

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step 0, 1, ... `steps` - 1."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(steps - self.warmup, 1)
        return self.peak_rate * (0.05 + 0.475 * (1 + math.cos(math.pi * done)))


class Example(NamedTuple):
    """A text as it is trained on, of n tokens.

    Attributes:
        tokens: int64[n].
        features: bfloat16[n, f + d], what the head reads of the target, and what the target's output head does.
        answer: where the answer begins.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    answer: int


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="A trace, such as `texts` writes.")],
    out: Annotated[Path, typer.Option(help="Folder for the head; written again after every epoch.")],
    model: ModelOption = "smollm2-135m",
    most: Annotated[int | None, typer.Option(min=8, show_default=False, help="Texts to read, at most.")] = None,
    epochs: Annotated[int, typer.Option(min=1)] = 8,
    threads: Annotated[int, typer.Option(min=1)] = 2,
) -> None:
    """Train a head, and show how often each of its levels is right on texts that were held out."""
    torch.set_num_threads(threads)
    recipe = Recipe()
    torch.manual_seed(recipe.seed)
    chosen = choose_model(ModelOptions(model=model))
    target = AutoModelForCausalLM.from_pretrained(chosen.path, dtype=torch.float32).eval().requires_grad_(False)
    tokenizer = load_tokenizer(chosen.path)
    recordings = [*read_trace(data, most)]
    head = new_head(target, recordings, recipe)
    began = time.monotonic()
    examples = [*_examples(target, tokenizer, head, recordings, recipe)]
    console.print(f"{len(examples):,} texts read in {time.monotonic() - began:.0f} s")
    held_out = examples[: round(recipe.held_out * len(examples))]
    trained = examples[len(held_out) :]
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.peak_rate, betas=(0.9, 0.95), weight_decay=0.0)
    batches = [b for epoch in range(epochs) for b in shuffled(trained, recipe, epoch)]
    trainer = Trainer(head, target, recipe, scale_of(trained))
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step, len(batches))
        levels = 1 if step < recipe.first_share * len(batches) else recipe.unrolled
        loss, _ = trainer.loss([trained[i] for i in batch], levels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        if step % 50 == 0:
            took = time.monotonic() - began
            console.print(f"step {step:,} of {len(batches):,}: loss {loss.item():.3f}, {took:.0f} s")
        if (step + 1) % (len(batches) // epochs) == 0:
            trainer.save(out)
            right = ", ".join(f"{share:.1%}" for share in trainer.right(held_out))
            console.print(f"after {step + 1:,} steps, right at each level where those before are read: {right}")
    trainer.save(out)


def new_head(target: Any, recordings: Sequence[Recording], recipe: Recipe) -> EagleHead:
    """A head of the target's width, whose output layer is that of the target for the most frequent tokens."""
    of = target.config
    tokens = np.concatenate([tokens for recording in recordings for tokens in recording])
    counts = np.bincount(tokens, minlength=of.vocab_size).astype(np.float64)
    frequent = np.sort(np.argsort(-counts, kind="stable")[: recipe.draft_vocab_size])  # of equals the lower ids
    config: Any = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        hidden_size=of.hidden_size,
        intermediate_size=of.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=of.num_attention_heads,
        num_key_value_heads=of.num_key_value_heads,
        head_dim=getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads,
        max_position_embeddings=of.max_position_embeddings,
        rms_norm_eps=of.rms_norm_eps,
        rope_parameters=of.rope_parameters,
        vocab_size=of.vocab_size,
        dtype="bfloat16",
    )
    config.draft_vocab_size, config.norm_before_residual = recipe.draft_vocab_size, True
    head = EagleHead(config)
    rows = torch.from_numpy(frequent)
    head.d2t.copy_(rows - torch.arange(recipe.draft_vocab_size))
    with torch.no_grad():
        head.lm_head.weight.copy_(target.get_output_embeddings().weight[rows])
        # Less than the target's: nothing is known yet, so that no token should be much more probable than others.
        head.norm.weight.copy_(target.get_decoder().norm.weight / 4)
    head.train()
    return head


def _examples(
    target: Any, tokenizer: Tokenizer, head: EagleHead, recordings: Sequence[Recording], recipe: Recipe
) -> Iterator[Example]:
    """What the target computes for each text, by the runner that will show it to the head."""
    layers = int(target.config.num_hidden_layers)
    read = (*head.layers_read(layers), layers)
    model = adopt(target, tokenizer, name="target", runner="openvino", feature_layers=read)
    runner = model.factory.runner(recipe.longest)
    pages = np.arange(runner.pages, dtype=np.int32)
    for prompt, output in recordings:
        tokens = np.concatenate([prompt, output])[: recipe.longest]
        if prompt.size + recipe.unrolled + 2 < tokens.size:
            row = BatchRow(pages, 0, tokens, EMPTY_TREE, logits_from=tokens.size - 1)
            features = torch.from_numpy(runner.step(lay_out([row]), 0).features).bfloat16()
            yield Example(torch.from_numpy(tokens).long(), features, prompt.size)


def scale_of(examples: Sequence[Example]) -> torch.Tensor:
    """float32[f + d], how large features usually are, by the median, as those of first tokens may be a thousand times
    as large as others."""
    some = torch.cat([example.features[1:] for example in examples[:: max(1, len(examples) // 64)]]).float()
    return some.abs().median(dim=0).values.clamp(min=1e-3)


def shuffled(examples: Sequence[Example], recipe: Recipe, epoch: int) -> list[list[int]]:
    """Batches of texts of about the same length, in an order of their own in each epoch."""
    generator = torch.Generator().manual_seed(1000 * recipe.seed + epoch)
    noise = torch.rand(len(examples), generator=generator) * 32
    order = sorted(range(len(examples)), key=lambda i: examples[i].tokens.shape[0] + float(noise[i]))
    batches = [order[i : i + recipe.batch] for i in range(0, len(order) - recipe.batch + 1, recipe.batch)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


class Trainer:
    """Computes the loss of a head.

    Args:
        head: that is trained; its first layer reads features over their `scale` until it is saved.
        target: in float32; nothing of it is changed.
    """

    def __init__(self, head: EagleHead, target: Any, recipe: Recipe, scale: torch.Tensor) -> None:
        self._head, self._recipe = head, recipe
        self._scale = scale[: head.fc.in_features]
        self._embed = target.get_input_embeddings()
        self._rows = head.token_ids
        self._output = target.get_output_embeddings().weight[self._rows]
        self._drafted = torch.zeros(target.config.vocab_size, dtype=torch.bool)
        self._drafted[self._rows] = True

    def loss(self, batch: Sequence[Example], levels: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """The loss of a batch, and of each level how many tokens of answers it had, and how many were right."""
        head, recipe = self._head, self._recipe
        longest = max(example.tokens.shape[0] for example in batch)

        def padded(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return torch.stack([F.pad(t, (0, 0) * (t.dim() - 1) + (0, longest - t.shape[0])) for t in tensors])

        tokens = padded([example.tokens for example in batch])
        lengths = torch.tensor([example.tokens.shape[0] for example in batch])
        answers = torch.tensor([example.answer for example in batch])
        features = padded([example.features for example in batch]).float()
        read = head.fc.in_features
        hidden = head.fc(features[..., :read] / self._scale)
        with torch.no_grad():
            wanted = features[..., read:] @ self._output.T
            best = wanted.max(dim=-1).indices
        places, keys, values = torch.arange(longest), list[torch.Tensor](), list[torch.Tensor]()
        total, counted, weight = torch.zeros(()), list[tuple[int, int]](), 1.0
        for level in range(levels):
            following = self._embed(torch.roll(tokens, -1 - level, dims=1))
            hidden = self._level(following, hidden, places + level, keys, values)
            # Entry i predicts token i + 2 + level, which the target did from token i + 1 + level on.
            at = 1 + level + places
            inside = (at[None] + 1 < lengths[:, None]) & (at[None] + 1 >= answers[:, None])
            rows = inside.nonzero(as_tuple=True)
            of_target = rows[0], rows[1] + 1 + level
            drafts = self._drafted[tokens[rows[0], rows[1] + 2 + level]]
            logits = head.logits(hidden[rows])
            probabilities = wanted[of_target].softmax(dim=-1)
            losses = -(probabilities * logits.log_softmax(dim=-1)).sum(dim=-1)
            total = total + weight * (losses * drafts).sum() / drafts.sum().clamp(min=1)
            weight *= recipe.decay
            right = (logits.argmax(dim=-1) == best[of_target]) & drafts
            counted.append((rows[0].shape[0], int(right.sum())))
        return total, counted

    def _level(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """[B, T, d]. Entry i of a level attends to the first level's entries up to i, and to entry i of the others.

        Args:
            keys, values: of the levels before; those of this one are added.
        """
        head, attention = self._head, self._head.midlayer.self_attn
        heads, [shape] = int(head.config.num_attention_heads), head.kv_shapes
        groups = shape.kv_heads
        rotation = head.rotary_emb(hidden, positions[None])

        def attend(inputs: torch.Tensor) -> torch.Tensor:
            batch, length = inputs.shape[:2]

            def by_head(projected: torch.Tensor, count: int) -> torch.Tensor:
                return projected.view(batch, length, count, shape.key_dim).transpose(1, 2)

            query = by_head(attention.q_proj(inputs), heads)
            key, value = by_head(attention.k_proj(inputs), groups), by_head(attention.v_proj(inputs), groups)
            query, key = apply_rotary_pos_emb(query, key, *rotation)
            keys.append(key.repeat_interleave(heads // groups, dim=1))
            values.append(value.repeat_interleave(heads // groups, dim=1))
            causal = torch.ones(length, length, dtype=torch.bool).tril()
            scores = (query @ keys[0].transpose(2, 3)).masked_fill(~causal, -math.inf)
            own = [(query * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
            weights = (torch.cat([scores, *own], dim=-1) * attention.scaling).softmax(dim=-1)
            attended = weights[..., :length] @ values[0]
            for i, value in enumerate(values[1:]):
                attended = attended + weights[..., length + i, None] * value
            output: torch.Tensor = attention.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
            return output

        updated: torch.Tensor = head.midlayer(embedded, hidden, attend)
        return updated

    @torch.no_grad()
    def right(self, examples: Sequence[Example]) -> list[float]:
        """Of each level, the share of tokens of answers that it has most probable, as the target has."""
        sums = np.zeros((self._recipe.unrolled, 2))
        for example in examples:
            sums += np.array(self.loss([example], self._recipe.unrolled)[1])
        return [float(right / tokens) for tokens, right in sums]

    def save(self, folder: Path) -> None:
        """Writes the head in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        self._head.config.to_json_file(folder / "config.json")
        tensors = self._head.state_dict()
        tensors["fc.weight"] = tensors["fc.weight"] / self._scale
        stored = {name: t if t.dtype == torch.int64 else t.bfloat16() for name, t in tensors.items()}
        save_file({name: t.contiguous() for name, t in stored.items()}, folder / WEIGHTS, metadata={"format": "pt"})


if __name__ == "__main__":
    app()
