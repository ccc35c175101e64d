"""The ``longtail`` command. Each command imports what it needs when it runs, so that ``--help`` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from longtail import __version__
from longtail.cli_common import FAILED, INTERRUPTED, fail, print_error, stderr, stdout
from longtail.cli_jobs import jobs, stop, submit, up
from longtail.cli_profile import profile
from longtail.cli_rank import app as rank_app
from longtail.cli_serve import gateway, keys_app, serve

if TYPE_CHECKING:
    from longtail.runtime.check import CheckedJobs
    from longtail.runtime.jobfile import JobFile

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (up, submit, jobs, stop, profile):
    app.command()(_command)
app.command()(serve)
app.command()(gateway)
app.add_typer(rank_app, name="rank")
app.add_typer(keys_app, name="keys")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"longtail {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train several RL post-training pipelines on the same workers; serve requests with short answers first.

    \b
    longtail doctor                                    # has this machine what is needed?
    longtail run examples/demo.yaml                    # two small pipelines, some minutes
    longtail up                                        # workers that wait for jobs: longtail submit job.yaml
    longtail profile examples/demo.yaml                # what work costs here, for runs to plan by
    longtail gateway --upstream http://localhost:8000  # in front of a model server
    """


@app.command()
def run(
    job_file: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The job file: which pipelines, on what.")],
    check: Annotated[
        bool, typer.Option("--check", help="Only check the file, the models, the data and the memory; train nothing.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, metavar="N", help="Replace 'workers' of the job file.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the run and of its folder runs/NAME.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; an earlier runs/NAME is kept as runs/NAME.1, NAME.2, ...")
    ] = False,
) -> None:
    """Train the pipelines of a job file together, with live progress.

    \b
    longtail run jobs.yaml --check      # is all there, and does it fit?
    longtail run jobs.yaml              # train; once more: resume
    longtail run jobs.yaml --fresh      # start over, keep the earlier run
    longtail run jobs.yaml --name lr3   # a second run, in runs/lr3

    The smallest job file:

    \b
    pipelines:
      rev: {model: tiny, task: reverse-text}

    docs/configuration.md lists every key. One Ctrl-C saves and ends the run, a second one ends it at once.

    Exit codes:

    \b
      0    every pipeline finished
      1    a pipeline failed; the others went on to their end
      2    the jobs cannot work as they are, and nothing was started
      130  interrupted
    """
    from longtail.core.errors import LongtailError

    try:
        code = _run(job_file, check=check, workers=workers, name=name, fresh=fresh)
    except LongtailError as error:
        fail(error)
    except KeyboardInterrupt:
        stderr.print("interrupted", style="red")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(code)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")] = False,
) -> None:
    """Say what this machine has, what is missing, and what to do about it.

    \b
    longtail doctor
    longtail doctor --json | jq .ok

    Exit codes: 0 if `longtail run` can work here, 1 if it cannot.
    """
    from longtail.runtime.doctor import diagnose, print_findings, to_json

    findings = diagnose()
    if as_json:
        typer.echo(to_json(findings))
    else:
        print_findings(findings, stdout)
    raise typer.Exit(FAILED if any(f.status == "missing" for f in findings) else 0)


def _run(path: Path, *, check: bool, workers: int | None, name: str | None, fresh: bool) -> int:
    from longtail.runtime.jobfile import load_jobs

    job_file = load_jobs(path, name=name, workers=workers)
    from longtail.runtime.check import check_jobs  # imports torch: only for files that are well-formed

    checked = check_jobs(job_file)
    if check:
        _print_checked(checked, job_file)
        return 0
    from longtail.launch import run_jobs
    from longtail.observe.summary import render

    result = run_jobs(checked, job_file, fresh=fresh)
    stdout.print(render(result.summary()))
    for error in result.errors.values():
        print_error(error)
    return {"finished": 0, "failed": FAILED, "interrupted": INTERRUPTED}[result.reason]


def _print_checked(checked: CheckedJobs, job_file: JobFile) -> None:
    for warning in checked.warnings:
        stdout.print(Text("warning: ", style="yellow").append(warning, style="default"))
    for line in checked.describe():
        stdout.print(line)
    stdout.print(Text(f"{job_file.path}: ready to run as {job_file.run_name}", style="green"))
