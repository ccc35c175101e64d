"""Unlabelled prompts for ``make_ranker.py``, written by SmolLM2-135M-Instruct itself (Apache-2.0).

An instruction-tuned model that is shown only the beginning of a user's turn writes one (as in Magpie, arXiv
2406.08464). Half of the prompts begin freely, half with an opener of ``ranker_data/openers.txt``, so that many kinds of
requests occur.

    python scripts/make_prompts.py --out scripts/ranker_data/prompts.jsonl.gz    # about ten minutes
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from longtail.core.types import FinishReason
from smollm2_sampler import sample

OPENERS = (Path(__file__).parent / "ranker_data" / "openers.txt").read_text(encoding="utf-8").splitlines()
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=7, help="prompts drawn for each opener, and as many without")
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    openers = [o for opener in OPENERS for o in (opener, "")]
    turns = sample(
        lambda tokenizer: [
            np.array(tokenizer.hf(BEFORE + opener, add_special_tokens=False)["input_ids"], np.int32)
            for opener in openers
        ],
        samples=args.samples,
        seed=args.seed,
        name="prompt",
        max_tokens=72,
        temperature=1.0,
        top_p=0.95,
    )
    whole = [(openers[i] + turn.text).strip() for i, turn in turns if turn.finish is FinishReason.STOP]
    prompts = [prompt for prompt in dict.fromkeys(whole) if prompt]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(args.out, "wb", mtime=0) as file:
        file.writelines(json.dumps({"prompt": prompt}, ensure_ascii=False).encode() + b"\n" for prompt in prompts)
    print(f"{args.out}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
