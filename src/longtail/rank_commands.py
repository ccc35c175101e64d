"""What the ``longtail rank`` commands do: wires data, ranker, evaluation and report together."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from longtail.cli_common import FAILED, INTERRUPTED, stderr
from longtail.core.errors import ConfigError, DataError, RankerError
from longtail.lengths.data import LengthData, split
from longtail.lengths.data_prompts import read_prompts
from longtail.lengths.data_values import digest
from longtail.lengths.evaluate import evaluate_sources
from longtail.lengths.messages import prompt_text, whole_text
from longtail.lengths.report import HTML, JSON, PNG, Latency, Report, plain, write_report
from longtail.lengths.seen import seen_share
from longtail.observe.text import one_line
from longtail.rank_console import (
    SHOWN_PROMPT,
    Bar,
    counted,
    done,
    print_explained,
    print_flat,
    print_line,
    print_report,
    short,
    warn,
)  # fmt: skip
from longtail.rank_inputs import DataOptions, load, read

if TYPE_CHECKING:
    from longtail.lengths.collect import CollectConfig, Collected
    from longtail.lengths.ranker import Ranker
    from longtail.lengths.train import TrainConfig

REPORT_FILES = (HTML, JSON, PNG)
BATCH = 256
"""Prompts that are scored in one call, and the batch whose time a report states."""
TIMED_CALLS = 300
TIMED_S = 4.0
"""Timing single prompts takes at most so many calls and seconds; batches at most half of the time."""
LEAST_TO_SPLIT = 10
"""With fewer prompts none is held out."""


# -- train ----------------------------------------------------------------------------------------------------------


def train_command(
    data: DataOptions, config: TrainConfig, out: Path, *, test: float, force: bool, unlabelled: Path | None
) -> None:
    """Train on the data but a held-out share ``test``, save, and write the report on that share beside the weights."""
    from longtail.lengths.train import train

    _check_out(out, force)
    more = [] if unlabelled is None else [prompt_text(prompt) for prompt in read_prompts(unlabelled)]
    everything = read(data)
    few = len(set(map(digest, everything.inputs))) < LEAST_TO_SPLIT
    if test and not few:
        learn, held_out = split(everything, test=test, seed=config.seed)
    else:
        learn, held_out = everything, everything.take(np.empty(0, np.int64))
    if test and few:
        warn(f"{counted(len(everything), 'prompt')}: too few to hold any out, so there will be no report")
    unlabelled_text = f" and {len(more):,} without lengths" if more else ""
    stderr.print(
        f"training ({config.backend}, {config.objective}) on {counted(len(learn), 'prompt')}{unlabelled_text}; "
        f"{len(held_out):,} held out"
    )
    with Bar("training") as bar:
        ranker = train(learn, config, held_out=held_out, unlabelled=more, progress=bar.follow)
    report = None
    if len(held_out):
        report = judge(ranker, held_out, delta=config.delta, seed=config.seed, name=str(out))
        ranker.card["held_out"] = summary(report)
    ranker.save(out)
    for name in REPORT_FILES:
        (out / name).unlink(missing_ok=True)  # of the ranker that was there before
    if report is not None:
        write_report(report, out)
        print_report(report)
    done(f"{out}: ranker saved" + (", with report.html, report.png and report.json" if report else ""))


def _check_out(out: Path, force: bool) -> None:
    """Before hours of training: the folder can be written, and nothing in it is lost unasked."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / "ranker.json").is_file():
            raise ConfigError(f"--out {out}: this folder holds other things; give a new or empty one")
        if not force:
            raise ConfigError(f"--out {out}: a ranker is there already; give another folder, or --force to replace it")
    _check_writable(out)


def _check_writable(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: this is a file; give a folder")
    is_new = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
        if is_new:  # it is made again when there is something to put into it
            out.rmdir()
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error


# -- eval -----------------------------------------------------------------------------------------------------------


def eval_command(
    data: DataOptions, folder: Path | None, out: Path | None, *, delta: float, seed: int, as_json: bool
) -> None:
    """Judge a ranker by data; print the figures, and write the report where ``out`` says."""
    if out is not None:
        _check_writable(out)
    ranker = load(folder)
    report = judge(ranker, read(data), delta=delta, seed=seed, name=_name(folder))
    if out is not None:
        write_report(report, out)
    if as_json:
        print_line(json.dumps(plain(report.to_json()), allow_nan=False))
    else:
        print_report(report)
    if out is not None:
        done(f"{out}: report.html, report.png and report.json written")


def judge(ranker: Ranker, data: LengthData, *, delta: float, seed: int, name: str) -> Report:
    """Score all prompts, time the scoring (of texts; of features it would leave out most), and compare with the
    lengths."""
    from longtail.lengths.feature_rows import score_inputs
    from longtail.lengths.ranker import quantiles

    scores = np.empty(len(data), np.float32)
    with Bar("scoring") as bar:
        for first in range(0, len(data), BATCH):
            part = slice(first, first + BATCH)
            scores[part] = score_inputs(ranker.backend, data.inputs[part])
            bar.update(min(first + BATCH, len(data)), len(data))
    bad = np.flatnonzero(~np.isfinite(scores))
    if len(bad):
        first_bad = data.inputs[bad[0]]
        shown = repr(one_line(first_bad)[:SHOWN_PROMPT]) if isinstance(first_bad, str) else f"{first_bad.digest:016x}"
        raise RankerError(f"the ranker gives {len(bad):,} scores that are no numbers, first for {shown}: train it anew")
    predicted = quantiles(scores, ranker.knots)
    overall, by_source = evaluate_sources(data, scores, delta=delta, seed=seed, quantiles=predicted)
    return Report(
        data=data,
        quantiles=predicted,
        overall=overall,
        by_source=by_source,
        ranker=about(ranker, name),
        latency=measure(ranker.score, [prompt for prompt in data.inputs if isinstance(prompt, str)]),
        seen=seen_share(ranker.card.get("seen"), data.inputs),
        command=shlex.join(["longtail", *sys.argv[1:]]),
    )


def measure(score: Callable[[Sequence[str]], np.ndarray], prompts: Sequence[str]) -> Latency | None:
    """Scoring times on this machine, warm; None without prompts."""
    if not prompts:
        return None
    single = _times(score, [[p] for p in prompts[:TIMED_CALLS]], TIMED_S)
    batch = [prompts[i % len(prompts)] for i in range(BATCH)]
    batched = _times(score, [batch] * 5, TIMED_S / 2)
    p50, p99 = np.quantile(single, [0.5, 0.99])
    return Latency(float(p50), float(p99), BATCH, float(np.median(batched)) / BATCH)


def _times(score: Callable[[Sequence[str]], np.ndarray], calls: list[list[str]], limit_s: float) -> np.ndarray:
    """Milliseconds of each call, after a first pass of a few that is not counted."""
    for call in calls[:3]:
        score(call)
    times, end = [], time.perf_counter() + limit_s
    for call in calls:
        start = time.perf_counter()
        score(call)
        times.append(1000 * (time.perf_counter() - start))
        if start > end:
            break
    return np.array(times)


def summary(report: Report) -> dict[str, Any]:
    """The figures that go into a ranker's card."""
    e, t = report.overall, report.latency
    return plain({
        "prompts": e.n, "unit": report.data.unit, "tau": e.tau, "tau_low": e.tau_low, "tau_high": e.tau_high,
        "pair_accuracy": e.pair_accuracy, "delta": e.delta, "reasons": e.reasons,
        "single_p50_ms": t.single_p50_ms if t else None, "single_p99_ms": t.single_p99_ms if t else None,
    })  # fmt: skip


# -- score ----------------------------------------------------------------------------------------------------------


def score_command(
    source: str | None, texts: Sequence[str], folder: Path | None, *, column: str | None, as_json: bool
) -> None:
    """Print score and quantile of every prompt, as they come."""
    from longtail.lengths.ranker import quantiles

    ranker = load(folder)
    prompts: Iterator[str] = map(whole_text, texts)
    if source is not None:
        if source != "-" and not Path(source).exists():
            advice = f"to score a prompt itself, write --text {shlex.quote(short(source))}"
            raise DataError(f"{short(source)!r}: there is no such file; {advice}")
        prompts = (prompt_text(prompt) for prompt in read_prompts(source, column=column))
    header = not as_json
    batch = 1 if source == "-" and sys.stdin.isatty() else BATCH
    while part := list(islice(prompts, batch)):
        if header:
            print_line(f"{'score':>9}  quantile  prompt")
            header = False
        scores = ranker.score(part)
        for prompt, score, quantile in zip(part, scores, quantiles(scores, ranker.knots), strict=True):
            if as_json:
                row = {"prompt": prompt, "score": _number(score), "quantile": _number(quantile)}
                print_line(json.dumps(row, allow_nan=False))
            else:
                print_line(f"{score:9.4f}  {quantile:8.3f}  {short(prompt)}")


def _number(value: np.float32) -> float | None:
    """As short as float32 is exact."""
    return float(str(value)) if np.isfinite(value) else None


# -- inspect --------------------------------------------------------------------------------------------------------


def inspect_command(folder: Path | None, texts: Sequence[str], *, as_json: bool) -> None:
    """Print what a ranker is and how good it was found to be; with texts, what moves their scores."""
    ranker = load(folder)
    record = about(ranker, _name(folder)) | _files(folder)
    explained = [explain(ranker, whole_text(text)) for text in texts]
    if as_json:
        if texts:
            record["texts"] = explained
        print_line(json.dumps(plain(record), allow_nan=False, indent=2))
        return
    if not texts:
        print_flat(record)
    for found in explained:
        print_explained(found)


def explain(ranker: Ranker, text: str) -> dict[str, Any]:
    """Score, quantile, and the contributions of features, largest first; None where the backend has none to tell."""
    explainer = getattr(ranker.backend, "explain", None)
    parts = sorted(explainer(text), key=lambda part: -abs(part[1])) if explainer is not None else None
    return {
        "prompt": text,
        "score": float(ranker.score([text])[0]),
        "quantile": float(ranker.quantile([text])[0]),
        "contributions": [(str(name), float(value)) for name, value in parts] if parts else None,
    }


def about(ranker: Ranker, name: str) -> dict[str, Any]:
    """A ranker in plain JSON: name, backend, card, and the scores at some quantiles."""
    share = np.linspace(0, 1, len(ranker.knots))
    at = {f"{100 * q:g} %": float(np.interp(q, share, ranker.knots)) for q in (0.05, 0.25, 0.5, 0.75, 0.95)}
    card = {key: value for key, value in ranker.card.items() if key != "seen"}
    return plain({"name": name, "backend": ranker.backend.name, "card": card, "score_at_quantile": at})


def _name(folder: Path | None) -> str:
    return "built-in" if folder is None else str(folder)


def _files(folder: Path | None) -> dict[str, Any]:
    """Size in bytes and SHA-256 of the ranker's files."""
    from longtail.lengths.ranker import RANKER_FILE, SHIPPED

    where = folder or SHIPPED
    digests = json.loads((where / RANKER_FILE).read_text(encoding="utf-8"))["files"]
    return {"files": {name: {"bytes": (where / name).stat().st_size, "sha256": sha} for name, sha in digests.items()}}


# -- from-server ----------------------------------------------------------------------------------------------------


def from_server_command(prompts_file: Path, config: CollectConfig, *, column: str | None) -> int:
    """Collect lengths; returns the exit code."""
    from longtail.lengths.collect import collect

    prompts = list(read_prompts(prompts_file, column=column))
    if not prompts:
        raise DataError(f"{prompts_file} has no prompts")
    if config.out.exists() and prompts_file.exists() and os.path.samefile(prompts_file, config.out):
        raise ConfigError("--prompts and --out are the same file; give another --out")
    state: list[Collected] = []
    with Bar("collecting") as bar:

        def follow(now: Collected) -> None:
            state[:] = [now]
            failed = f", {now.failed:,} failed" if now.failed else ""
            bar.update(now.done + now.failed, now.wanted, f"{now.tokens:,} tokens{failed}", now.waiting)

        try:
            result = asyncio.run(collect(prompts, config, progress=follow))
        except KeyboardInterrupt:
            kept = state[0].done if state else 0
            stderr.print(f"interrupted: {kept:,} new answers are kept; the same command goes on from here", style="red")
            return INTERRUPTED
    return _print_collected(result, config)


def _print_collected(result: Collected, config: CollectConfig) -> int:
    for text, count in result.errors.most_common(5):
        warn(f"{count:,} failed: {text}")
    if result.repeated_prompts:
        warn(f"{counted(result.repeated_prompts, 'prompt')} repeated in the file: each is asked for once")
    if result.cut_off > 0.2 * max(1, result.done):
        warn(
            f"{result.cut_off:,} of {result.done:,} answers were cut off at the token limit: their true length is not "
            "known; a higher --max-tokens tells a ranker more"
        )
    if not result.done and not result.skipped:
        return FAILED
    before = f", {result.skipped:,} were there before" if result.skipped else ""
    done(f"{config.out}: {counted(result.done, 'answer')} of {result.model} added{before}")
    stderr.print(Text(f"next: longtail rank train {shlex.quote(str(config.out))} --out my-ranker"))
    return 0
