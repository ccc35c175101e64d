"""What all commands share: exit codes, the two consoles, and how an error is shown."""

from __future__ import annotations

import os
from typing import NoReturn

import typer
from rich.console import Console
from rich.text import Text

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

stdout = Console(highlight=False, soft_wrap=True)
stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(error: Exception, *, code: int = BAD_INPUT) -> NoReturn:
    """End with the error's sentences and an exit code; with ``LONGTAIL_DEBUG=1`` with its traceback."""
    if os.environ.get("LONGTAIL_DEBUG") == "1":
        raise error
    print_error(str(error))
    raise typer.Exit(code)


def print_error(message: str) -> None:
    """Each line in red; control characters, which may come from a file or a server, are taken out."""
    from longtail.observe.text import lines

    for line in lines(message):
        stderr.print(Text(line, style="red"))
