"""Make the built-in tiny model: a character-level Llama of 1.8 M parameters, warm-started on the built-in tasks.

    python scripts/make_tiny_model.py          # about ten minutes on one CPU core

It first *learns* the tasks from right answers. Then it is *blurred*: a short phase on demonstrations with mistakes
leaves the knowledge in place but makes samples at temperature 1 wrong so often that rewards differ in nearly every
group, which is what GRPO learns from. The same seed, machine and library versions give the same weights.
"""

from __future__ import annotations

import argparse
import random
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from longtail.core.seeds import derive_seed
from longtail.rl.tasks import Example, Task, load_task

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
CHARACTERS = ["\n", *map(chr, range(32, 127))]
CONTEXT = 1024

ANSWER_TOKENS = 256
"""Answers are cut here, in training and evaluation, as in the demo."""

SHARES = {"collatz": 0.2, "scratchpad": 0.3, "reverse-text": 0.5}
"""Share of each task among the demonstrations."""

BLUR = {"collatz": 0.1, "scratchpad": 0.15, "reverse-text": 0.12}
"""Share of elements (numbers, steps, letters) that are wrong in the second phase."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, a beginning token in front; what is not printable ASCII or a line end becomes ``?``."""
    vocab = {token: i for i, token in enumerate([PAD, BOS, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.normalizer = normalizers.Replace(Regex(r"[^\x20-\x7e\n]"), "?")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        rms_norm_eps=1e-5,
    )
    return LlamaForCausalLM(config)


# Demonstrations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demonstration:
    tokens: list[int]
    prompt_tokens: int


class Demonstrations:
    """An endless stream of examples of the tasks with answers, batched by length."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tasks: dict[str, Task], *, seed: int) -> None:
        self._ids = tokenizer.get_vocab()
        self._tasks, self._rng = tasks, random.Random(seed)
        self._next = 0

    def batches(self, batch_tokens: int, blur: dict[str, float]) -> Iterator[tuple[Tensor, Tensor]]:
        """``(tokens_BT, labels_BT)`` of at most ``batch_tokens``; labels are -100 on prompts and padding."""
        while True:
            pool = sorted((self._draw(blur) for _ in range(2048)), key=lambda d: len(d.tokens))
            batches: list[list[Demonstration]] = [[]]
            for demonstration in pool:
                if batches[-1] and (len(batches[-1]) + 1) * len(demonstration.tokens) > batch_tokens:
                    batches.append([])
                batches[-1].append(demonstration)
            self._rng.shuffle(batches)
            yield from map(self._collate, batches)

    def _draw(self, blur: dict[str, float]) -> Demonstration:
        name = self._rng.choices(list(SHARES), list(SHARES.values()))[0]
        example = self._tasks[name].example(self._next)
        self._next += 1
        answer = example.columns["answer"]
        if name in blur:
            answer = with_mistakes(name, answer, blur[name], self._rng)
        prompt = [self._ids[BOS], *(self._ids[c] for c in example.prompt)]
        completion = [*(self._ids[c] for c in f" {answer}"), self._ids[EOS]][:ANSWER_TOKENS]
        return Demonstration(prompt + completion, len(prompt))

    def _collate(self, batch: list[Demonstration]) -> tuple[Tensor, Tensor]:
        width = max(len(d.tokens) for d in batch)
        tokens_BT = torch.full((len(batch), width), self._ids[PAD])
        labels_BT = torch.full((len(batch), width), -100)
        for row, d in enumerate(batch):
            tokens_BT[row, : len(d.tokens)] = torch.tensor(d.tokens)
            labels_BT[row, d.prompt_tokens : len(d.tokens)] = torch.tensor(d.tokens[d.prompt_tokens :])
        return tokens_BT, labels_BT


def with_mistakes(task: str, answer: str, rate: float, rng: random.Random) -> str:
    """``answer`` with each of its elements wrong at ``rate``; at 3 of 10 mistakes it stops instead."""
    letters = task == "reverse-text"
    kept = []
    for element in answer if letters else answer.split():
        if rng.random() < rate:
            if rng.random() < 0.3:
                break
            kind = string.digits if element[-1].isdigit() else string.ascii_lowercase
            element = element[:-1] + rng.choice([c for c in kind if c != element[-1]])
        kept.append(element)
    return ("" if letters else " ").join(kept)


# Training -----------------------------------------------------------------------------------------------------------


def train(
    model: LlamaForCausalLM, batches: Iterator[tuple[Tensor, Tensor]], *, phase: str, steps: int, lr: float
) -> None:
    """Muon on the matrices of the blocks, AdamW on the rest; linear warm-up over 5 % of the steps, decay to 0."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "layers" in name]
    others = [p for name, p in named if not (p.ndim == 2 and "layers" in name)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / (0.05 * steps)) * (1 - step / steps)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in optimizers]
    began, losses = time.monotonic(), []
    model.train()
    for step in range(1, steps + 1):
        tokens_BT, labels_BT = next(batches)
        logits_BTV = model(input_ids=tokens_BT[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 50 == 0 or step == steps:
            recent = sum(losses[-50:]) / len(losses[-50:])
            print(f"{phase} {step}/{steps}  loss {recent:.3f}  {time.monotonic() - began:.0f} s", flush=True)


# Evaluation ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Score:
    """Mean rewards at temperature 1 and greedy, and the share of groups of 8 samples whose rewards differ."""

    sampled: float
    greedy: float
    varied: float


def evaluate(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, task: Task, *, prompts: int) -> Score:
    examples = [task.example(10**12 + i) for i in range(prompts)]
    sampled = rewards(model, tokenizer, task, [e for e in examples for _ in range(8)], do_sample=True).view(prompts, 8)
    greedy = rewards(model, tokenizer, task, examples, do_sample=False)
    varied = (sampled.std(dim=1) > 1e-6).float().mean()
    return Score(sampled.mean().item(), greedy.mean().item(), varied.item())


@torch.no_grad()
def rewards(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    examples: list[Example],
    *,
    do_sample: bool,
) -> Tensor:
    """The task's own reward of one answer to each example, ``[examples]``."""
    assert task.score is not None
    sampling: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} if do_sample else {}
    prompts = [e.prompt for e in examples]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
    model.eval()
    out = model.generate(**inputs, max_new_tokens=ANSWER_TOKENS, do_sample=do_sample, **sampling)
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    columns = {key: [e.columns[key] for e in examples] for key in examples[0].columns}
    return torch.tensor(task.score(prompts, texts, **columns))


CARD = """\
---
license: apache-2.0
library_name: transformers
---

# Longtail's tiny model

A character-level Llama of {parameters:,} parameters (4 layers, hidden size 192, 8 query heads on 4 KV heads, context
{context}), for demonstrations and tests. It is not a language model: it knows three synthetic tasks, and those only
partly, so that reinforcement learning has something to raise.

Made by `scripts/make_tiny_model.py` (seed {seed}) from nothing but demonstrations that the script generates: {learn}
steps on right answers, then {blur} steps on answers with mistakes. Weights are bfloat16.

Mean reward on {prompts} unseen prompts of each task (default arguments, at most {answer_tokens} tokens):

| task | samples at temperature 1 | greedy | groups of 8 samples whose rewards differ |
|---|---|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("src/longtail/data/tiny"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, data and evaluation")
    parser.add_argument("--learn-steps", type=int, default=1500, help="steps on right answers")
    parser.add_argument("--blur-steps", type=int, default=80, help="steps on answers with mistakes")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="most tokens in a batch")
    parser.add_argument("--prompts", type=int, default=64, help="prompts of each task in the evaluation")
    args = parser.parse_args()

    logging.disable_progress_bar()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    task_seed = derive_seed(args.seed, "tiny model")
    tasks = {name: load_task(name, {}, seed=task_seed, base=Path()) for name in SHARES}
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(tokenizer)} tokens", flush=True)

    data = Demonstrations(tokenizer, tasks, seed=args.seed)
    train(model, data.batches(args.batch_tokens, {}), phase="learn", steps=args.learn_steps, lr=4e-3)
    train(model, data.batches(args.batch_tokens, BLUR), phase="blur", steps=args.blur_steps, lr=1e-3)

    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    model = LlamaForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    rows = []
    for name, task in tasks.items():
        score = evaluate(model, tokenizer, task, prompts=args.prompts)
        rows.append(f"| {name} | {score.sampled:.2f} | {score.greedy:.2f} | {100 * score.varied:.0f} % |")
        print(rows[-1], flush=True)
    card = CARD.format(
        parameters=parameters,
        context=CONTEXT,
        seed=args.seed,
        learn=args.learn_steps,
        blur=args.blur_steps,
        prompts=args.prompts,
        answer_tokens=ANSWER_TOKENS,
        rows="\n".join(rows),
    )
    (args.out / "README.md").write_text(card)
    for path in args.out.iterdir():
        path.chmod(0o644)


if __name__ == "__main__":
    main()
