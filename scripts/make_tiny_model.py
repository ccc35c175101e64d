"""Make the built-in tiny model: a character-level Llama of 1.8 M parameters, warm-started on the built-in tasks.

    python scripts/make_tiny_model.py --out src/longtail/data/tiny          # about ten minutes on one CPU core

It first learns the tasks from right answers, then is *blurred*: a short phase on demonstrations with mistakes leaves
the knowledge in place but makes samples at temperature 1 wrong often enough for reinforcement learning to have a
signal in nearly every group. The same seed, machine and library versions give the same weights.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longtail.rl.tasks import BUILT_IN, Task, load_task

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
CHARACTERS = sorted({*string.printable[:95], "\n"})
CONTEXT = 1024

TASKS: dict[str, float] = {"collatz": 0.3, "scratchpad": 0.35, "reverse-text": 0.35}
"""Share of each task in the training examples."""
MAX_TOKENS = 256
"""Answers are cut here in training and in evaluation, as in the demo."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; a beginning token in front; characters outside printable ASCII become ``?``."""
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


def with_mistakes(task: str, answer: str, rate: float, rng: random.Random) -> str:
    """``answer`` with each of its elements (numbers, steps, letters) wrong at ``rate``; some stop at the mistake."""
    elements = list(answer) if task == "reverse-text" else answer.split()
    kept = []
    for element in elements:
        if rng.random() < rate:
            if rng.random() < 0.3:
                break
            element = corrupt(element, rng)
        kept.append(element)
    return ("" if task == "reverse-text" else " ").join(kept)


def corrupt(element: str, rng: random.Random) -> str:
    """``element`` with its last digit, or itself, replaced by another of its kind."""
    kind = string.digits if element[-1].isdigit() else string.ascii_lowercase
    return element[:-1] + rng.choice([c for c in kind if c != element[-1]])


class Demonstrations:
    """An endless stream of training batches of similar length, with ``rate`` of mistakes per element."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tasks: dict[str, Task], *, seed: int) -> None:
        self._ids = tokenizer.get_vocab()
        self._tasks, self._rng = tasks, random.Random(seed)
        self._next = 0

    def draw(self, rates: dict[str, float]) -> Demonstration:
        name = self._rng.choices(list(TASKS), list(TASKS.values()))[0]
        example = self._tasks[name].example(self._next)
        self._next += 1
        answer = example.columns["answer"]
        if rates:
            answer = with_mistakes(name, answer, rates[name], self._rng)
        prompt = [self._ids[BOS], *(self._ids[c] for c in example.prompt)]
        completion = [*(self._ids[c] for c in f" {answer}"), self._ids[EOS]][:MAX_TOKENS]
        return Demonstration(prompt + completion, len(prompt))

    def batches(self, batch_tokens: int, rates: dict[str, float]) -> Iterator[tuple[Tensor, Tensor]]:
        """``(tokens_BT, labels_BT)`` with labels -100 on prompts and padding, about ``batch_tokens`` in size."""
        while True:
            pool = sorted((self.draw(rates) for _ in range(2048)), key=lambda d: len(d.tokens))
            batches: list[list[Demonstration]] = [[]]
            for demonstration in pool:
                if batches[-1] and (len(batches[-1]) + 1) * len(demonstration.tokens) > batch_tokens:
                    batches.append([])
                batches[-1].append(demonstration)
            self._rng.shuffle(batches)
            yield from map(self._collate, batches)

    def _collate(self, batch: list[Demonstration]) -> tuple[Tensor, Tensor]:
        width = max(len(d.tokens) for d in batch)
        tokens = torch.full((len(batch), width), self._ids[PAD])
        labels = torch.full((len(batch), width), -100)
        for row, d in enumerate(batch):
            tokens[row, : len(d.tokens)] = torch.tensor(d.tokens)
            labels[row, d.prompt_tokens : len(d.tokens)] = torch.tensor(d.tokens[d.prompt_tokens :])
        return tokens, labels


# Training -----------------------------------------------------------------------------------------------------------


def train(
    model: LlamaForCausalLM,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    phase: str,
    steps: int,
    lr: float,
    matrix_lr: float,
) -> None:
    """Muon on the matrices of the blocks, AdamW on the rest; linear warm-up over 5 % and decay to 0."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim == 2 and "layers" in name)]
    optimizers = [
        torch.optim.Muon(matrices, lr=matrix_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]

    def schedule(step: int) -> float:
        return min(1.0, (step + 1) / max(1, 0.05 * steps)) * (1 - step / steps)

    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, schedule) for o in optimizers]
    began, seen, smooth = time.monotonic(), 0, None
    model.train()
    for step in range(steps):
        tokens, labels = next(batches)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        seen += tokens.numel()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if step % 50 == 49 or step == steps - 1:
            elapsed = time.monotonic() - began
            print(
                f"{phase} {step + 1}/{steps}  loss {smooth:.4f}  {seen / elapsed:,.0f} tok/s  {elapsed:.0f} s",
                flush=True,
            )


# Evaluation ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: dict[str, Task], *, prompts: int, samples: int
) -> dict[str, dict[str, float]]:
    """Mean reward at temperature 1 and greedy, and the share of groups of ``samples`` whose rewards differ."""
    model.eval()
    report = {}
    for name, task in tasks.items():
        examples = [task.example(10**9 + i) for i in range(prompts)]
        sampled = [s for e in examples for s in [e] * samples]
        groups = torch.tensor(rewards(model, tokenizer, task, sampled, greedy=False)).view(prompts, samples)
        greedy = rewards(model, tokenizer, task, examples, greedy=True)
        report[name] = {
            "sampled": groups.mean().item(),
            "greedy": sum(greedy) / len(greedy),
            "varied_groups": (groups.std(dim=1) > 1e-6).float().mean().item(),
        }
    return report


def rewards(model, tokenizer, task: Task, examples, *, greedy: bool) -> list[float]:
    inputs = tokenizer([e.prompt for e in examples], return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    out = (
        model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=not greedy, temperature=1.0, top_k=0, top_p=1.0)
        if not greedy
        else model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
    )
    texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    columns = {key: [e.columns[key] for e in examples] for key in examples[0].columns}
    assert task.score is not None
    return task.score([e.prompt for e in examples], texts, **columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("src/longtail/data/tiny"), help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1200, help="steps on right answers")
    parser.add_argument("--blur-steps", type=int, default=80, help="steps on answers with mistakes")
    parser.add_argument(
        "--blur", type=float, nargs=3, default=(0.1, 0.1, 0.1), help="mistakes per element of each task"
    )
    parser.add_argument("--batch-tokens", type=int, default=3072)
    parser.add_argument("--lr", type=float, default=4e-3, help="AdamW, embeddings and norms")
    parser.add_argument("--matrix-lr", type=float, default=4e-3, help="Muon, matrices")
    parser.add_argument("--save-clean", type=Path)
    parser.add_argument("--from-clean", type=Path)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    tokenizer = make_tokenizer()
    tasks = {name: load_task(name, {}, seed=1 + args.seed, base=Path()) for name in BUILT_IN}
    data = Demonstrations(tokenizer, tasks, seed=args.seed)
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {len(tokenizer)}", flush=True)
    if args.from_clean:
        model.load_state_dict(torch.load(args.from_clean))
    else:
        train(
            model,
            data.batches(args.batch_tokens, {}),
            phase="learn",
            steps=args.steps,
            lr=args.lr,
            matrix_lr=args.matrix_lr,
        )
        if args.save_clean:
            torch.save(model.state_dict(), args.save_clean)
    print(json.dumps(evaluate(model, tokenizer, tasks, prompts=32, samples=8)), flush=True)
    rates = dict(zip(TASKS, args.blur, strict=True))
    train(
        model,
        data.batches(args.batch_tokens, rates),
        phase="blur",
        steps=args.blur_steps,
        lr=args.lr / 4,
        matrix_lr=args.matrix_lr / 4,
    )
    model = model.to(torch.bfloat16)
    report = evaluate(model.float(), tokenizer, tasks, prompts=64, samples=8)
    print(json.dumps(report, indent=1), flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
