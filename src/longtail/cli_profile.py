"""`longtail profile`: measure what the work of a job file's pipelines costs on this machine, and keep it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType
from rich.text import Text

from longtail.cli_common import FAILED, INTERRUPTED, fail, stderr, stdout

if TYPE_CHECKING:
    from longtail.runtime.check import CheckedJobs
    from longtail.runtime.jobfile import JobFile
    from longtail.runtime.profiler import Measured, Subject

BUSY = 0.5
"""A load per core over the last minute that is worth a word."""


def profile(
    job_file: Annotated[Path, typer.Argument(metavar="JOBS.YAML", help="The job file: which models, on what.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Keep the tables there. Default: 'costs' of the job file, or the cache."
        ),
    ] = None,
    coarse: Annotated[
        bool, typer.Option("--coarse", help="Seconds instead of minutes: what a run measures by itself.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, metavar="N", help="Replace 'workers' of the job file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Draw decode steps by batch and TP degree.")
    ] = None,
) -> None:
    """Measure what work costs on this machine, for runs to plan by.

    \b
    longtail profile jobs.yaml                    # once, while the machine is idle
    longtail profile jobs.yaml --plot steps.png
    longtail profile jobs.yaml --out costs        # with 'costs: costs' in the job file

    Decode steps by tensor-parallel degree, batch and context; prefill; moving of KV; training; and how much work slows
    other work down, of the same model and of any two. Models that several pipelines share are measured once.
    docs/profiling.md tells more.

    Exit codes:

    \b
      0    measured and saved
      1    measuring failed
      2    the jobs cannot work as they are, or the tables cannot be written; nothing was started
      130  interrupted
    """
    from longtail.core.errors import LongtailError

    try:
        from longtail.runtime.jobfile import load_jobs

        jobs = load_jobs(job_file, workers=workers)
        from longtail.launch import costs_folder  # imports torch: only for files that are well-formed
        from longtail.runtime.check import check_jobs

        folder = out or costs_folder(jobs)
        _check_writable(folder / "table", "--out" if out else "costs")
        if plot is not None:
            _check_writable(plot, "--plot")
        _warn_if_busy()
        checked = check_jobs(jobs)
    except LongtailError as error:
        fail(error)
    try:
        measured = list(_measure(checked, jobs, folder, fine=not coarse))
        if plot is not None:
            _draw(measured, plot)
    except LongtailError as error:
        fail(error, code=FAILED)
    except KeyboardInterrupt:
        stderr.print("interrupted", style="red")
        raise typer.Exit(INTERRUPTED) from None


def _check_writable(path: Path, option: str) -> None:
    """Before minutes of measuring: the file could be written. Raises ``ConfigError``."""
    from longtail.core.errors import ConfigError

    folder = path.parent
    try:
        if path.is_dir():
            raise ConfigError(f"{option} {path}: this is a folder; give a file")
        missing = [f for f in (folder, *folder.parents) if not f.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
        for made in missing:  # they are made again when there is something to put into them
            made.rmdir()
    except OSError as error:
        raise ConfigError(f"{option} {folder}: cannot be written: {error.strerror or error}") from error


def _warn_if_busy() -> None:
    from longtail.runtime.machine import cores

    load, own = os.getloadavg()[0], cores()
    if load > BUSY * own:
        text = (
            f"this machine is busy (load {load:.1f} on {own} cores), so work will seem to cost more than it does alone"
        )
        stderr.print(Text("warning: ", style="yellow").append(text, style="default"))


def _measure(checked: CheckedJobs, job_file: JobFile, folder: Path, *, fine: bool) -> Iterator[Measured]:
    """Measure, save and print each model, which is yielded, and unless it is to be quick, each pair of models."""
    from longtail.costs import interference_file, store
    from longtail.launch import compile_for, start_cluster
    from longtail.profile_report import render, render_pair
    from longtail.rank_console import Bar
    from longtail.runtime.profiler import Profiler

    for warning in checked.warnings:
        stderr.print(Text("warning: ", style="yellow").append(warning, style="default"))
    compile_for(checked, job_file, tell=_tell)
    cluster = start_cluster(checked, job_file.jobs, tell=_tell)
    profiler = Profiler(cluster)

    def told_by(bar: Bar) -> Callable[[str, float], None]:
        return lambda what, share: bar.update(round(100 * share), 100, what)

    def saved(shown: RenderableType, path: Path) -> None:
        stdout.print(shown)
        stderr.print(Text(f"{path}: saved", style="green"))

    try:
        all_of_them = subjects(checked, job_file)
        for subject in all_of_them:
            with Bar(f"profiling {subject.name}") as bar:
                found = profiler.profile(subject, fine=fine, tell=told_by(bar))
            saved(render(found), store.save(folder, found.table))
            yield found
        for first, second in combinations(all_of_them, 2) if fine else ():
            with Bar(f"profiling {first.name} beside {second.name}") as bar:
                pair = profiler.profile_pair(first, second, tell=told_by(bar))
            saved(render_pair(pair), interference_file.save(folder, pair))
    finally:
        cluster.close()


def subjects(checked: CheckedJobs, job_file: JobFile) -> Sequence[Subject]:
    """The pipelines to measure: of those that share a table the one with the most samples."""
    from longtail.cluster.measure_key import model_name
    from longtail.runtime.profiler import Subject

    found: dict[tuple[str, str], Subject] = {}
    for name, pipeline in checked.pipelines.items():
        config = job_file.jobs.pipelines[name]
        key = model_name(pipeline.model), config.dtype
        subject = Subject(
            name=name,
            config=config,
            model_folder=pipeline.model_folder,
            kv_blocks=pipeline.kv_blocks,
            kv_heads=pipeline.model.kv_heads,
        )
        if key not in found or subject.samples > found[key].samples:
            found[key] = subject
    return list(found.values())


def _tell(text: str) -> None:
    stderr.print(Text(text, style="dim"))


def _draw(measured: Sequence[Measured], path: Path) -> None:
    from longtail.core.errors import ConfigError
    from longtail.profile_plot import draw

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw([m.table for m in measured]))
    except OSError as error:
        raise ConfigError(f"--plot {path}: cannot be written: {error.strerror or error}") from error
    stderr.print(Text(f"{path}: drawn", style="green"))
