"""`longtail up`, `submit`, `jobs` and `stop` on the command line: jobs come and go while the workers stay."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from longtail.cli_common import FAILED, INTERRUPTED, fail, print_error, stderr, stdout

if TYPE_CHECKING:
    from longtail.jobs.client import JobsClient
    from longtail.jobs.wire import JobList, JobStatus
    from longtail.launch import RunResult

POLL_S = 0.5
STATE_STYLE = {"failed": "red", "stopped": "yellow", "ending": "yellow", "finished": "green", "waiting": "dim"}
SECURITY, WHERE = "Security", "Where"

To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="RUN|ADDRESS",
        help="The name of a run on this machine, or HOST:PORT. Default: the only run that is up here.",
        rich_help_panel=WHERE,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="The token, in a file that only you can read; `longtail up` makes it where there is none. Default: "
        "~/.config/longtail/token.",
        rich_help_panel=SECURITY,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option("--ca", metavar="FILE", help="Certificates to trust for --to.", rich_help_panel=SECURITY),
]


def up(
    cluster: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.YAML]", help="A job file without pipelines: workers, ray, policy, ..."),
    ] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=1, metavar="N", help="Worker processes.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the run and of its folder runs/NAME.")
    ] = None,
    jobs_dir: Annotated[
        Path, typer.Option("--jobs-dir", metavar="DIR", help="Where relative paths and reward modules of jobs are.")
    ] = Path(),
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="MODULE",
            help="A module or package whose functions jobs may name as rewards; may be repeated.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    bind: Annotated[
        str,
        typer.Option("--bind", metavar="HOST:PORT", help="Beyond this machine only by TLS.", rich_help_panel=WHERE),
    ] = "127.0.0.1:8790",
    token_file: TokenFile = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", metavar="FILE", rich_help_panel=SECURITY)] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", rich_help_panel=SECURITY)] = None,
) -> None:
    """Start workers that stay, for jobs that are submitted while they run.

    \b
    longtail up --workers 2 --allow my_rewards    # in one terminal
    longtail submit job.yaml                      # in another one
    longtail jobs
    longtail stop sums

    Ctrl-C (or SIGTERM) saves all jobs and ends the workers; started again under the same name, jobs that were not over
    go on. docs/jobs.md has the rest.

    Exit codes:

    \b
      0    ended as asked, and every job was saved
      1    a job failed, or the workers were lost
      2    it cannot start
      130  ended at once, by a second Ctrl-C
    """
    from longtail.core.errors import LongtailError

    try:
        from longtail.jobs.halves import cluster_file

        job_file = cluster_file(cluster, name=name, workers=workers)
        from longtail.jobs.listen import Bind
        from longtail.jobs.presence import default_token_file
        from longtail.jobs.rules import AllowList
        from longtail.up import UpOptions, run_up

        options = UpOptions(
            bind=Bind.parse(bind, certificate=tls_cert, private_key=tls_key),
            allow=AllowList.of(allow or []),
            jobs_dir=jobs_dir,
            token_file=token_file or default_token_file(),
        )
        result = run_up(job_file, options)
    except LongtailError as error:
        fail(error)
    except KeyboardInterrupt:  # before the workers were there
        stderr.print("interrupted", style="red")
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(_show(result))


def submit(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.YAML", help="A job file that has 'pipelines' only.")],
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; what a job of this name has saved is kept as NAME~1, ...")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Until the jobs are over.")] = False,
    to: To = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Give jobs to a `longtail up`.

    \b
    longtail submit job.yaml
    longtail submit job.yaml --wait --to lab

    All checks of `longtail run --check` are made there before anything starts. Paths in the file are those of that
    machine. The name of a job that is over may be used again: it resumes from its checkpoint.

    Exit codes: 0 admitted (with --wait: finished), 1 not finished, 2 refused, 130 interrupted while waiting.
    """
    from longtail.core.errors import LongtailError

    with _client(to, token_file, ca_file) as client:
        try:
            from longtail.jobs.wire import Submission
            from longtail.runtime.jobfile import read_text

            admitted = client.submit(Submission(text=read_text(job_file), file=str(job_file), fresh=fresh))
        except LongtailError as error:
            fail(error)
        for warning in admitted.warnings:
            stderr.print(Text("warning: ", style="yellow").append(warning, style="default"))
        for job in admitted.jobs:
            begins = f"step {job.step} of {job.steps} done" if job.step else f"{job.steps} steps"
            stdout.print(Text(f"{job.name}: admitted, {begins}", style="green"))
        names = [job.name for job in admitted.jobs]
        if not wait:
            stdout.print(f"watch with `longtail jobs`, end with `longtail stop {names[0]}`")
            return
        try:
            over = [_until_over(client, name) for name in names]
        except LongtailError as error:
            fail(error, code=FAILED)
        except KeyboardInterrupt:
            stderr.print(f"not waiting any more; {' and '.join(names)} go{'es' * (len(names) == 1)} on", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
    for job in over:
        stdout.print(_over(job))
    raise typer.Exit(0 if all(job.state == "finished" for job in over) else FAILED)


def jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    to: To = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Show the jobs of a `longtail up`, those that are over too.

    \b
    longtail jobs
    longtail jobs --json | jq '.jobs[] | select(.state == "failed").error'
    """
    from longtail.core.errors import LongtailError

    with _client(to, token_file, ca_file) as client:
        try:
            found = client.list()
        except LongtailError as error:
            fail(error)
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
    else:
        _print_jobs(found, time.time())


def stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The job.")],
    to: To = None,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Let one job save and end; the others go on. Waits until it is over.

    Exit codes: 0 it is over and saved, 1 it failed, 2 there is no such job.
    """
    from longtail.core.errors import LongtailError

    with _client(to, token_file, ca_file) as client:
        try:
            client.stop(name)
            job = _until_over(client, name)
        except LongtailError as error:
            fail(error)
        except KeyboardInterrupt:
            stderr.print(f"not waiting any more; {name} saves and ends all the same", style="yellow")
            raise typer.Exit(INTERRUPTED) from None
    stdout.print(_over(job))
    raise typer.Exit(FAILED if job.state == "failed" else 0)


@contextmanager
def _client(to: str | None, token_file: Path | None, ca_file: Path | None) -> Iterator[JobsClient]:
    from longtail.core.errors import LongtailError
    from longtail.jobs.client import JobsClient, find

    try:
        client = JobsClient(find(to, token_file=token_file, ca_file=ca_file))
    except LongtailError as error:
        fail(error)
    with client:
        yield client


def _until_over(client: JobsClient, name: str, *, pause: Callable[[float], None] = time.sleep) -> JobStatus:
    """Raises :class:`ServerError` if the run ends meanwhile."""
    while not (job := client.job(name)).over:
        pause(POLL_S)
    return job


def _over(job: JobStatus) -> Text:
    from longtail.observe.text import about

    line = Text(f"{job.name}: {job.state} at step {job.step} of {job.steps}", style=STATE_STYLE.get(job.state, ""))
    if job.error:
        line.append(f": {about(job.name, job.error)}")
    elif job.checkpoint:
        line.append(f", saved in {job.checkpoint}")
    return line


def _show(result: RunResult) -> int:
    """The table of the whole run, and the exit code."""
    from longtail.observe.summary import render

    stdout.print(render(result.summary()))
    for error in result.errors.values():
        print_error(error)
    return FAILED if result.errors else 0


def _print_jobs(found: JobList, now: float) -> None:
    from longtail.observe.text import about, duration, reward

    workers = f"{found.workers} worker{'s' * (found.workers != 1)}"
    stdout.print(Text(f"{found.run}: {workers} ({', '.join(dict.fromkeys(found.devices))}), {found.folder}", "dim"))
    if not found.jobs:
        stdout.print("no jobs yet: longtail submit JOB.YAML")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("job", overflow="fold")
    table.add_column("state")
    for column in ("step", "reward", "since"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error", overflow="fold")
    for job in found.jobs:
        state = f"{job.state} ({job.stage})" if job.state == "running" and job.stage else job.state
        table.add_row(
            job.name,
            Text(state, style=STATE_STYLE.get(job.state, "")),
            f"{job.step}/{job.steps if job.steps is not None else '?'}",
            reward(job.reward),
            duration(max(0.0, now - job.since)),
            Text(about(job.name, job.error or ""), style="red"),
        )
    stdout.print(table)
