"""Writes docs/configuration.md from the configuration models (core/config.py).

python scripts/make_config_reference.py          writes the file
python scripts/make_config_reference.py --check  exits with 1 if it is out of date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from longtail.runtime import schema
from longtail.runtime.schema import Key

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration reference

<!-- Written by scripts/make_config_reference.py; edit core/config.py instead. -->

A job file says which pipelines train, on what. The smallest one:

```yaml
pipelines:
  rev: {model: tiny, task: reverse-text}
```

`longtail run jobs.yaml --check` tells every problem of a file at once, with its line, and trains nothing. A key that
is not listed here is an error. What a run used, defaults included, is written to `runs/NAME/config.yaml`.

## How values are written

* Numbers are decimal: `12`, `0.5`, `.5`, `1e-6`, `1.0E-6`. Where a fraction may stand, a whole number may too, and a
  number in quotes is still a number. `1_000`, `0x10`, `010` and `1:30`, which YAML readers disagree about, are text.
  NaN and infinity are refused.
* Booleans are `true` and `false`. `yes`, `no`, `on`, `off` and dates are text. Below `task_args`, where any type may
  stand, such words and such numbers need quotes, so that nobody has to guess.
* A section with nothing in it (`rollout:`) means its defaults. A key that appears twice is an error.
* Anchors, aliases and merges (`train: &base {...}`, `train: *base`, `<<: *base`) work; tags such as `!!float` do not.
* In `model`, `task`, `ranker`, `costs` and `runs_dir`, `~` and `$VARIABLE` are replaced. Relative models, tasks,
  rankers, cost tables and reward modules are looked up beside the job file; `runs_dir` is relative to the working
  directory.
* Names of runs and pipelines become folders: 1 to 64 ASCII letters, digits, `.`, `_` or `-`, beginning with a letter
  or digit.

## Running again

The same command resumes each pipeline from its newest complete checkpoint. If the job file has changed since:

* {fixed} of a pipeline cannot change; the run is refused and the key named. Undo the change, or start over with
  `--fresh`, which keeps the earlier run as `runs/NAME.1`.
* Every other key takes effect from the resumed step on, and a note says so.
* A new pipeline starts at step 0; one that is gone stays at its last checkpoint.

## Exit codes of `longtail run`

| code | meaning |
|---|---|
| 0 | every pipeline finished |
| 1 | a pipeline failed; the others went on to their end |
| 2 | the job file, a model, the data, a reward or the memory cannot work; nothing was started |
| 130 | interrupted: by Ctrl-C, SIGTERM, or because the terminal was closed |

"""


def render() -> str:
    """The whole page."""
    from longtail.runtime.resume import FIXED

    fixed = ", ".join(f"`{key}`" for key in sorted(FIXED))
    parts = [HEAD.replace("{fixed}", fixed), _table("The file", ())]
    for path, key in schema.keys().items():
        if key.is_section and path != ("pipelines",):
            title = "pipelines.NAME" + "".join(f".{p}" for p in path[2:])
            parts.append(_table(title, path, key.description))
    return "\n".join(parts)


def _table(title: str, section: tuple[str, ...], description: str = "") -> str:
    rows = [_row(key) for path, key in schema.keys().items() if path[:-1] == section and key.name != schema.ANY]
    head = f"## {title if title == 'The file' else f'`{title}`'}\n\n" + (f"{description}\n\n" if description else "")
    return head + "| key | value | unit | default | meaning |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _row(key: Key) -> str:
    if key.is_section:
        value, default, link = "section", "", "pipelinesname" + "".join(key.path[2:])
        meaning = f"{key.description} See [below](#{link})."
    else:
        value, default, meaning = key.allowed, _default(key), key.description
    cells = (f"`{key.name}`", value, key.unit, default, meaning)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(key: Key) -> str:
    if key.default is schema.Required:
        return "required"
    return f"`{schema.number(key.default) if isinstance(key.default, float) else json.dumps(key.default)}`"


def main() -> int:
    text = render()
    if "--check" in sys.argv[1:]:
        if not TARGET.exists() or TARGET.read_text("utf-8") != text:
            print(f"{TARGET} is out of date: run python scripts/make_config_reference.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text, "utf-8")
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
