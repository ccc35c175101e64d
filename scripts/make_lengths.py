"""How long SmolLM2-135M-Instruct's answers to everyday requests are, from "hi" to a ten-chapter outline.

Arena-Hard, the other labelled data of ``make_ranker.py``, has neither greetings nor one-word answers. The model is
small and rambles, but a greeting it does answer in a line and an essay in a page.

    python scripts/make_lengths.py --out scripts/ranker_data/everyday.jsonl     # a minute or two
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from longtail.core.seeds import derive_seed
from longtail.core.types import Completion, FinishReason, Request, SamplingParams
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer

PROMPTS = Path(__file__).parent / "ranker_data" / "everyday.txt"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=1)
    p.add_argument("--max-tokens", type=int, default=160)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    folder = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, dtype=torch.float32)
    lanes = LanePool(model.config, blocks=3 * 64 * 40, dtype=torch.float32)
    engine = Engine(model, lanes, detokenize=tokenizer.decode, max_running=64)
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=0.5, top_p=0.9, end_token_ids=tokenizer.end_token_ids
    )
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    for i, prompt in enumerate(prompts):
        seeds = tuple(derive_seed(args.seed, "length", i, j) for j in range(args.samples))
        engine.add(Request(request_id=str(i), prompt=tokenizer.encode_prompt(prompt), seeds=seeds, params=params))
    done: dict[tuple[int, int], Completion] = {}
    while engine.has_work:
        for completion in engine.step().completions:
            done[int(completion.request_id), completion.sample] = completion
            if len(done) % 20 == 0:
                print(f"{len(done)} of {len(prompts) * args.samples}", flush=True)
    with args.out.open("w", encoding="utf-8") as file:
        for (i, _), completion in sorted(done.items()):
            cut = completion.finish is FinishReason.LENGTH
            row = {"prompt": prompts[i], "output_tokens": len(completion.tokens), "censored": cut}
            file.write(json.dumps(row) + "\n")
    print(f"{args.out}: {len(done)} answers to {len(prompts)} prompts")


if __name__ == "__main__":
    main()
