"""The ``longtail rank`` commands: their options and help. What they do is in ``rank_commands.py``, imported late."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from longtail.cli_common import FAILED, INTERRUPTED, fail, stderr
from longtail.cli_rank_data import (
    CensoredColumnOption,
    DataArgument,
    FormatName,
    FormatOption,
    LengthColumnOption,
    ModelOption,
    PromptColumnOption,
    ResponseColumnOption,
    SkipBadOption,
    SplitOption,
    UnitOption,
    data_options,
)  # fmt: skip

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Predict which prompts get long answers: train, judge and use rankers.

    \b
    longtail rank score --text "hi" --text "write a compiler"
    longtail rank from-server http://localhost:8000 --prompts prompts.txt --out lengths.jsonl
    longtail rank train lengths.jsonl --out my-ranker
    longtail rank eval other-lengths.jsonl --ranker my-ranker --out report

    docs/ranking.md says which data can be read and what the figures mean.

    Exit codes: 0 done, 1 a server could not be used, 2 wrong input, 130 interrupted.
    """,
)


class BackendName(StrEnum):
    LIGHT = "light"
    ENCODER = "encoder"


class ObjectiveName(StrEnum):
    MARGIN = "margin"
    LISTMLE = "listmle"
    POINTWISE = "pointwise"
    CLASSIFICATION = "classification"


RankerOption = Annotated[
    Path | None,
    typer.Option("--ranker", metavar="DIR", help="A trained ranker. Default: the one that comes with Longtail."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

TRAINING = "Training"


@app.command()
def train(
    data: DataArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder of the new ranker and its report.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a ranker that --out holds.")] = False,
    test: Annotated[
        float,
        typer.Option(
            "--test",
            min=0.0,
            max=0.9,
            help="Share of the prompts held out for the report; 0: no report.",
        ),
    ] = 0.1,
    backend: Annotated[
        BackendName,
        typer.Option(
            "--backend",
            help="light: microseconds a prompt, no torch. encoder: a transformer, slower and better.",
            rich_help_panel=TRAINING,
        ),
    ] = BackendName.LIGHT,
    objective: Annotated[
        ObjectiveName,
        typer.Option("--objective", help="Loss; margin on pairs is what PARS uses.", rich_help_panel=TRAINING),
    ] = ObjectiveName.MARGIN,
    delta: Annotated[
        float,
        typer.Option(
            "--delta",
            min=0.0,
            max=0.99,
            help="Pairs must differ by this share of the longer length, to be learned from and to be judged.",
            rich_help_panel=TRAINING,
        ),
    ] = 0.2,
    margin: Annotated[
        float,
        typer.Option(
            "--margin",
            min=0.0,
            max=1000.0,
            help="Margin of the margin loss.",
            rich_help_panel=TRAINING,
        ),
    ] = 1.0,
    partners: Annotated[
        int, typer.Option("--partners", min=1, help="Random partners of each prompt.", rich_help_panel=TRAINING)
    ] = 10,
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs",
            min=1,
            help="Passes over the data. Default: 3 for an encoder, 240 steps on all of it for light.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            "--encoder",
            metavar="MODEL",
            help="Folder or Hugging Face id of the encoder to start from, or minilm.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(
            "--teacher",
            metavar="MODEL",
            help="Fine-tune this encoder first, and let the light backend learn from its scores too.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    unlabelled: Annotated[
        Path | None,
        typer.Option(
            "--unlabelled",
            metavar="FILE",
            help="Prompts without lengths, which the teacher scores: lines of text, or rows with a prompt.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    max_length: Annotated[
        int,
        typer.Option("--max-length", min=8, help="Tokens that an encoder reads of a prompt.", rich_help_panel=TRAINING),
    ] = 128,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", min=0, help="Of the held-out share, of training, of the report.", rich_help_panel=TRAINING
        ),
    ] = 0,
    unit: UnitOption = None,
    format: FormatOption = FormatName.AUTO,
    prompt_column: PromptColumnOption = None,
    response_column: ResponseColumnOption = None,
    length_column: LengthColumnOption = None,
    censored_column: CensoredColumnOption = None,
    model: ModelOption = None,
    split: SplitOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Train a ranker on prompts and the lengths of their answers.

    \b
    longtail rank train lengths.jsonl --out my-ranker
    longtail rank train chats.jsonl --unit tokens:smollm2-135m --out my-ranker
    longtail rank train batch_in.jsonl batch_out.jsonl --out my-ranker
    longtail rank train runs/demo --out my-ranker          # our own runs
    longtail rank train served.jsonl --out my-ranker       # what `longtail gateway` recorded
    longtail rank train a.jsonl b.jsonl --backend encoder --out my-ranker

    A share of the prompts is held out; the report on it stands beside the weights.
    """
    with _errors():
        from longtail.core.errors import ConfigError
        from longtail.lengths.train import TrainConfig
        from longtail.rank_commands import train_command

        if encoder is not None and backend is not BackendName.ENCODER:
            raise ConfigError("--encoder names the transformer of --backend encoder; the light backend has none")
        if unlabelled is not None and teacher is None:
            raise ConfigError("--unlabelled needs a --teacher that scores those prompts")
        config = TrainConfig(
            backend=backend.value, objective=objective.value, delta=delta, margin=margin, partners=partners,
            epochs=epochs, seed=seed, encoder=encoder, max_length=max_length, teacher=teacher,
        )  # fmt: skip
        columns = (prompt_column, response_column, length_column, censored_column)
        options = data_options(data, unit, format, columns, model, split, skip_bad)
        train_command(options, config, out, test=test, force=force, unlabelled=unlabelled)


@app.command("eval")
def evaluate(
    data: DataArgument,
    ranker: RankerOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write report.html, report.png, report.json there.")
    ] = None,
    delta: Annotated[
        float,
        typer.Option(
            "--delta",
            min=0.0,
            max=0.99,
            help="Pairs that differ by this share of the longer length are counted.",
        ),
    ] = 0.2,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the bootstrap interval.")] = 0,
    as_json: JsonOption = False,
    unit: UnitOption = None,
    format: FormatOption = FormatName.AUTO,
    prompt_column: PromptColumnOption = None,
    response_column: ResponseColumnOption = None,
    length_column: LengthColumnOption = None,
    censored_column: CensoredColumnOption = None,
    model: ModelOption = None,
    split: SplitOption = None,
    skip_bad: SkipBadOption = False,
) -> None:
    """Judge a ranker by prompts whose answers' lengths are known.

    \b
    longtail rank eval lengths.jsonl                       # the built-in one
    longtail rank eval lengths.jsonl --ranker my-ranker --out report
    longtail rank eval lengths.jsonl --json | jq .overall.tau
    """
    with _errors():
        from longtail.rank_commands import eval_command

        columns = (prompt_column, response_column, length_column, censored_column)
        options = data_options(data, unit, format, columns, model, split, skip_bad)
        eval_command(options, ranker, out, delta=delta, seed=seed, as_json=as_json)


@app.command()
def score(
    prompts: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPTS|-]", help="Lines of text, or rows with a prompt; - is standard input."),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", metavar="TEXT", help="A prompt itself; may be given several times.")
    ] = None,
    ranker: RankerOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt.")] = False,
    prompt_column: PromptColumnOption = None,
) -> None:
    """Score prompts: a higher score, and a higher quantile in [0, 1], mean a longer answer.

    \b
    longtail rank score --text "hi" --text "write a compiler"
    longtail rank score prompts.jsonl --json
    cat prompts.txt | longtail rank score -
    """
    with _errors():
        from longtail.core.errors import ConfigError
        from longtail.rank_commands import score_command

        if prompts is None and not text:
            raise ConfigError('nothing to score: give --text "a prompt", a file, or - for standard input')
        if prompts is not None and text:
            raise ConfigError("give prompts either as --text or as a file, not both")
        score_command(prompts, text or [], ranker, column=prompt_column, as_json=as_json)


@app.command()
def inspect(
    ranker: RankerOption = None,
    text: Annotated[
        list[str] | None,
        typer.Option("--text", metavar="TEXT", help="Say what pushes the score of this prompt up and down."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a ranker is: its card, its data, how good it was found to be.

    \b
    longtail rank inspect --ranker my-ranker
    longtail rank inspect --text "list the primes below 10"
    """
    with _errors():
        from longtail.rank_commands import inspect_command

        inspect_command(ranker, text or [], as_json=as_json)


@app.command("from-server")
def from_server(
    url: Annotated[str, typer.Argument(metavar="URL", help="An OpenAI-compatible server, as http://localhost:8000.")],
    prompts: Annotated[
        Path,
        typer.Option("--prompts", metavar="FILE", help="Lines of text, or rows with a prompt or messages."),
    ],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE.jsonl", help="Rows are appended; what is there is not asked again.")
    ],
    model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="Default: the only model that the server has.")
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, max=1000, help="Answers for each prompt.")] = 1,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, max=1024, help="Requests at a time.")] = 8,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Limit of an answer. Default: the server's.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", min=0.0, max=100.0, help="Default: the server's."),
    ] = None,
    api_key_env: Annotated[
        str | None,
        typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat/--completions", help="Ask for chat completions, or complete plain text.")
    ] = True,
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Keep the answers too, not only lengths.")] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=1.0, max=86400.0, metavar="SECONDS", help="For one answer."),
    ] = 600.0,
    prompt_column: PromptColumnOption = None,
) -> None:
    """Ask a server for answers and keep how long they are: data for `rank train`.

    \b
    longtail rank from-server http://localhost:8000 --prompts prompts.txt --out lengths.jsonl
    longtail rank from-server https://api.openai.com --model gpt-4o-mini --api-key-env OPENAI_API_KEY \\
        --prompts prompts.jsonl --out lengths.jsonl --samples 3

    The same command goes on where it was stopped. Busy servers are asked again after the pause that they name.

    Exit codes: 0 collected, 1 nothing could be collected, 2 wrong input, 130 interrupted (what is there is kept).
    """
    with _errors():
        from longtail.core.errors import ConfigError
        from longtail.lengths.collect import CollectConfig
        from longtail.rank_commands import from_server_command

        if not chat and max_tokens is None:
            raise ConfigError(
                "--completions needs --max-tokens: many servers stop plain text after 16 tokens otherwise"
            )
        config = CollectConfig(
            url=url, out=out, model=model, samples=samples, concurrency=concurrency, max_tokens=max_tokens,
            temperature=temperature, chat=chat, keep_text=keep_text, api_key=_api_key(api_key_env), timeout_s=timeout,
        )  # fmt: skip
        code = from_server_command(prompts, config, column=prompt_column)
    raise typer.Exit(code)


def _api_key(variable: str | None) -> str | None:
    """The key itself, never to be shown: not even what was given for the variable's name if it may be the key."""
    if variable is None:
        return None
    from longtail.core.errors import ConfigError

    key = os.environ.get(variable, "").strip()
    if key:
        return key
    if variable in os.environ:
        raise ConfigError(f"--api-key-env: the environment variable {variable} is empty")
    if re.fullmatch(r"[A-Z][A-Z0-9_]*", variable):
        raise ConfigError(f"--api-key-env: the environment variable {variable} is not set")
    raise ConfigError(
        "--api-key-env takes the name of an environment variable that holds the key, not the key itself; there is no "
        "variable of the given name"
    )


@contextmanager
def _errors() -> Iterator[None]:
    """Errors become one sentence and an exit code."""
    from longtail.core.errors import LongtailError, ServerError

    try:
        yield
    except ServerError as error:
        fail(error, code=FAILED)
    except LongtailError as error:
        fail(error)
    except KeyboardInterrupt:
        stderr.print("interrupted", style="red")
        raise typer.Exit(INTERRUPTED) from None
