"""Draws what a run showed in the terminal, half-way and at its end, from its event log: the picture of the README.

.venv/bin/python scripts/make_demo_picture.py runs/demo docs/demo.svg
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from longtail.core.events import StepEnded
from longtail.observe.live import RunView
from longtail.observe.store import read_events
from longtail.observe.summary import render, summarise
from longtail.observe.terminal import draw

WIDTH = 110


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    args = parser.parse_args()
    events = list(read_events(args.run))
    steps = [i for i, e in enumerate(events) if isinstance(e, StepEnded)]
    half = steps[len(steps) // 3]
    view = RunView()
    for event in events[:half]:
        view.apply(event)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ make demo", style="bold"))
    console.print(draw(view, WIDTH, events[half].t))
    console.print(Text("...", style="dim"))
    console.print(render(summarise(events)))
    args.picture.parent.mkdir(exist_ok=True)
    picture = console.export_svg(title="longtail")
    # No fonts from the network: the reader's own monospace font does.
    args.picture.write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


if __name__ == "__main__":
    main()
