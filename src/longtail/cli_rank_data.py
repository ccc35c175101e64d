"""The options that say which data the ``longtail rank`` commands read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from longtail.rank_inputs import DataOptions


class FormatName(StrEnum):
    AUTO = "auto"
    JSONL = "jsonl"
    OPENAI = "openai"
    DATASETS = "datasets"
    RUN = "run"


DATA = "Data"

DataArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="DATA",
        help="JSON lines, a `datasets` folder, parquet, a request log, or a run folder. Several are kept apart: "
        "lengths of different sources are never compared.",
    ),
]
UnitOption = Annotated[
    str | None,
    typer.Option(
        "--unit",
        metavar="UNIT",
        help="words, chars, tokens (as the data gives them), or tokens:MODEL to count responses with a model's "
        "tokenizer. Default: what the data gives, else words.",
        rich_help_panel=DATA,
    ),
]
FormatOption = Annotated[
    FormatName, typer.Option("--format", help="How to read DATA; auto looks at it.", rich_help_panel=DATA)
]
PromptColumnOption = Annotated[
    str | None,
    typer.Option(
        "--prompt-column", metavar="NAME", help="The column with the prompt (recognised).", rich_help_panel=DATA
    ),
]
ResponseColumnOption = Annotated[
    str | None,
    typer.Option(
        "--response-column", metavar="NAME", help="The column whose text is to be counted.", rich_help_panel=DATA
    ),
]
LengthColumnOption = Annotated[
    str | None,
    typer.Option("--length-column", metavar="NAME", help="The column with the length.", rich_help_panel=DATA),
]
CensoredColumnOption = Annotated[
    str | None,
    typer.Option(
        "--censored-column",
        metavar="NAME",
        help="The column that marks answers cut off at a limit: true, or a finish reason.",
        rich_help_panel=DATA,
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Only the answers of this model, where rows name several.", rich_help_panel=DATA
    ),
]
SplitOption = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="Split of a `datasets` folder.", rich_help_panel=DATA)
]
SkipBadOption = Annotated[
    bool,
    typer.Option(
        "--skip-bad", help="Leave bad rows out and count them; else the first one ends it.", rich_help_panel=DATA
    ),
]


def data_options(
    paths: list[Path],
    unit: str | None,
    format: FormatName,
    columns: tuple[str | None, str | None, str | None, str | None],
    model: str | None,
    split: str | None,
    skip_bad: bool,
) -> DataOptions:
    """``columns``: of the prompt, the response, the length, and what marks cut-off answers."""
    from longtail.lengths.data import Columns
    from longtail.rank_inputs import DataOptions

    return DataOptions(
        paths=paths,
        unit=unit,
        format=format.value,
        columns=Columns(*columns),
        model=model,
        split=split,
        skip_bad=skip_bad,
    )
