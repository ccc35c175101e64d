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
import torch

from longtail.core.seeds import derive_seed
from longtail.core.types import FinishReason, Request, SamplingParams
from longtail.engine.checkpoint import load_model
from longtail.engine.engine import Engine
from longtail.engine.lanes import LanePool
from longtail.engine.models import resolve_model
from longtail.engine.tokenizer import Tokenizer

OPENERS = (Path(__file__).parent / "ranker_data" / "openers.txt").read_text(encoding="utf-8").splitlines()
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=7, help="prompts drawn for each opener, and as many without")
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    folder = resolve_model("smollm2-135m")
    tokenizer = Tokenizer.load(folder)
    model = load_model(folder, dtype=torch.float32)
    lanes = LanePool(model.config, blocks=3 * 64 * 16, dtype=torch.float32)
    engine = Engine(model, lanes, detokenize=tokenizer.decode, max_running=64)
    params = SamplingParams(max_tokens=72, temperature=1.0, top_p=0.95, end_token_ids=tokenizer.end_token_ids)
    openers = [o for opener in OPENERS for o in (opener, "")]
    for i, opener in enumerate(openers):
        ids = tokenizer.hf(BEFORE + opener, add_special_tokens=False)["input_ids"]
        seeds = tuple(derive_seed(args.seed, "prompt", i, j) for j in range(args.samples))
        engine.add(Request(request_id=str(i), prompt=np.array(ids, np.int32), seeds=seeds, params=params))
    found: dict[tuple[int, int], str] = {}
    ended = 0
    while engine.has_work:
        for completion in engine.step().completions:
            ended += 1
            if completion.finish is FinishReason.STOP:
                i = int(completion.request_id)
                found[i, completion.sample] = (openers[i] + completion.text).strip()
            if ended % 200 == 0:
                print(f"{ended} of {len(openers) * args.samples}", flush=True)
    prompts = list(dict.fromkeys(found[key] for key in sorted(found) if found[key]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(args.out, "wb", mtime=0) as file:
        file.writelines(json.dumps({"prompt": prompt}, ensure_ascii=False).encode() + b"\n" for prompt in prompts)
    print(f"{args.out}: {len(prompts)} prompts")


if __name__ == "__main__":
    main()
