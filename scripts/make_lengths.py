"""How long SmolLM2-135M-Instruct's answers to everyday requests are, from "hi" to a ten-chapter outline.

Arena-Hard, the other labelled data of ``make_ranker.py``, has neither greetings nor one-word answers. The model is
small and rambles, but a greeting it does answer in a line and an essay in a page.

    python scripts/make_lengths.py --out scripts/ranker_data/everyday.jsonl     # a minute or two
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from longtail.core.types import FinishReason
from smollm2_sampler import sample

PROMPTS = Path(__file__).parent / "ranker_data" / "everyday.txt"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=1)
    p.add_argument("--max-tokens", type=int, default=160)
    p.add_argument("--seed", type=int, default=3)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    prompts = PROMPTS.read_text(encoding="utf-8").splitlines()
    answers = sample(
        lambda tokenizer: [tokenizer.encode_prompt(prompt) for prompt in prompts],
        samples=args.samples,
        seed=args.seed,
        name="length",
        max_tokens=args.max_tokens,
        temperature=0.5,
        top_p=0.9,
    )
    with args.out.open("w", encoding="utf-8") as file:
        for i, answer in answers:
            cut = answer.finish is FinishReason.LENGTH
            row = {"prompt": prompts[i], "output_tokens": len(answer.tokens), "censored": cut}
            file.write(json.dumps(row) + "\n")
    print(f"{args.out}: {len(answers)} answers to {len(prompts)} prompts")


if __name__ == "__main__":
    main()
