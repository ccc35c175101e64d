"""The `longtail` command, its exit codes, and the same from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import longtail
from longtail.api import named_after_tasks, to_job_file
from longtail.cli import app
from longtail.core.config import Jobs, Pipeline
from longtail.core.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SMALL = """\
workers: 2
pipelines:
  rev:
    model: tiny
    task: reverse-text
    rollout: {prompts: 2, max_tokens: 8}
    algorithm: {group_size: 2}
    steps: 1
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LONGTAIL_DEBUG", raising=False)


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments)


def command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-c", "from longtail.cli import app; app()", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        **options,
    )


def write(text: str, path: str = "jobs.yaml") -> str:
    Path(path).write_text(text)
    return path


def test_help_teaches_by_example():
    assert "longtail run examples/demo.yaml" in invoke("--help").output
    run = invoke("run", "--help").output
    for words in ("longtail run jobs.yaml --check", "longtail run jobs.yaml --fresh", "pipelines:", "130  interrupted"):
        assert words in run
    assert "longtail doctor --json" in invoke("doctor", "--help").output


def test_help_and_version_import_nothing_heavy():
    code = "import sys, longtail.cli as c; c.app(['--help'], standalone_mode=False); print(sorted(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "ray", "numba", "transformers", "pydantic", "numpy"} & set(eval(out.splitlines()[-1]))
    assert invoke("--version").output == f"longtail {longtail.__version__}\n"


def test_the_version_is_that_of_the_package():
    assert f'version = "{longtail.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (SMALL + "    stpes: 3\n", ["jobs.yaml:9: pipelines.rev: unknown key 'stpes'; did you mean 'steps'?"]),
        (
            SMALL.replace("tiny", "tinny") + "    reward: x\n",
            [
                "jobs.yaml:4: pipelines.rev.model: there is no model 'tinny'; did you mean 'tiny'?",
                "jobs.yaml:9: pipelines.rev.reward: reward 'x' must have the form module:function, for example "
                "my_rewards:chain.",
            ],
        ),
    ],
)
def test_bad_jobs_are_one_line_for_each_problem_and_exit_code_2(text, lines):
    result = invoke("run", write(text), "--check")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == lines
    assert result.stdout == ""
    assert list(Path().iterdir()) == [Path("jobs.yaml")]


def test_square_brackets_in_messages_are_shown_as_they_are():
    result = invoke("run", write(SMALL + "    reward: [a:b, 3]\n"))
    assert result.stderr.splitlines() == [
        'jobs.yaml:9: pipelines.rev.reward[1] = 3: must be text, not a number. Put it in quotes: "3".'
    ]


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("LONGTAIL_DEBUG", "1")
    result = invoke("run", "nowhere.yaml")
    assert isinstance(result.exception, ConfigError)


def test_missing_arguments_and_impossible_options_are_exit_code_2():
    assert invoke("run").exit_code == 2
    assert invoke("run", write(SMALL), "--workers", "0").exit_code == 2
    assert invoke("run", write(SMALL), "--name", "a/b").exit_code == 2
    assert invoke("fly").exit_code == 2


def test_check_says_what_would_run_and_starts_nothing():
    result = invoke("run", write(SMALL), "--check", "--workers", "1", "--name", "mine")
    assert result.exit_code == 0, result.output
    assert "rev: llama" in result.output
    assert "on each of 1 " in result.output
    assert result.output.endswith("jobs.yaml: ready to run as mine\n")
    assert list(Path().iterdir()) == [Path("jobs.yaml")]


@pytest.mark.parametrize("name", ["demo.yaml", "smollm2_gsm8k.yaml"])
def test_the_examples_pass_their_check(name):
    text = (ROOT / "examples" / name).read_text()
    Path("gsm8k_sample.jsonl").write_bytes((ROOT / "examples" / "gsm8k_sample.jsonl").read_bytes())
    result = invoke("run", write(text.replace("smollm2-135m", "tiny"), name), "--check")
    assert result.exit_code == 0, result.output


def test_every_example_is_a_well_formed_job_file():
    for path in (ROOT / "examples").glob("*.yaml"):
        assert to_job_file(path, workers=None, name=None).jobs.pipelines


def test_the_gsm8k_sample_rewards_its_own_answers():
    from longtail.rl.rewards import final_number

    rows = [json.loads(line) for line in (ROOT / "examples" / "gsm8k_sample.jsonl").read_text().splitlines()]
    answers = [row["answer"] for row in rows]
    assert len({row["question"] for row in rows}) == 40
    assert final_number([""] * 40, answers, answer=answers) == [1.0] * 40
    assert final_number([""] * 40, ["none"] * 40, answer=answers) == [0.0] * 40


def test_doctor_exits_with_0_where_run_can_work():
    result = invoke("doctor", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["ok"]


def test_doctor_exits_with_1_where_it_cannot():
    Path("runs").write_text("a file is in the way")
    result = invoke("doctor")
    assert result.exit_code == 1
    assert "cannot work here yet: runs" in result.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_resumes_refuses_another_task_starts_afresh_and_fails_by_exit_code():
    write(SMALL)
    first = command("run", "jobs.yaml")
    assert first.returncode == 0, first.stderr
    (saved,) = [path.name for path in Path("runs/jobs/rev").glob("step-*")]

    write(SMALL.replace("steps: 1", "steps: 2"))
    resumed = command("run", "jobs.yaml")
    assert resumed.returncode == 0, resumed.stderr
    assert "pipelines.rev.steps was 1 when this run began and is 2 now" in resumed.stdout + resumed.stderr
    assert len(list(Path("runs/jobs/rev").glob("step-*"))) == 2

    write(SMALL.replace("reverse-text", "collatz"))
    refused = command("run", "jobs.yaml")
    assert refused.returncode == 2
    assert refused.stderr.startswith("jobs.yaml: pipelines.rev.task was 'reverse-text' when this run began and is")

    Path("broken.py").write_text("def f(prompts, completions, **columns): return [1.0]\n")
    write(SMALL.replace("reverse-text", "collatz") + "    reward: broken:f\n")
    failed = command("run", "jobs.yaml", "--fresh")
    assert failed.returncode == 1, failed.stderr
    assert "broken:f returned 1 value" in failed.stderr
    assert saved in {path.name for path in Path("runs/jobs.1/rev").iterdir()}
    for result in (first, resumed, refused, failed):
        assert "Traceback" not in result.stdout + result.stderr


def test_the_package_offers_its_names_when_asked():
    assert longtail.Pipeline is Pipeline
    assert longtail.Jobs is Jobs
    assert callable(longtail.run)
    assert {"Pipeline", "Jobs", "run", "__version__"} <= set(dir(longtail))
    with pytest.raises(AttributeError, match="has no attribute 'simulate_everything'"):
        longtail.simulate_everything  # noqa: B018


def test_pipelines_of_a_list_are_named_after_their_tasks():
    tasks = [
        "reverse-text",
        "reasoning_gym/chain_sum",
        "data/my set.jsonl",
        "reverse-text",
        "reverse-text",
        "東京.jsonl",
    ]
    named = named_after_tasks([Pipeline(model="tiny", task=task) for task in tasks])
    assert list(named) == ["reverse-text", "chain_sum", "my-set", "reverse-text-2", "reverse-text-3", "pipeline"]
    Jobs(pipelines=named)


def test_python_runs_have_names_of_their_own_unless_given():
    pipelines = [Pipeline(model="tiny", task="collatz")]
    a, b = (to_job_file(pipelines, workers=None, name=None).run_name for _ in range(2))
    assert a != b
    assert to_job_file(pipelines, workers=3, name="mine").jobs.workers == 3
    assert to_job_file(Jobs(name="kept", pipelines={"p": pipelines[0]}), workers=None, name=None).run_name == "kept"


def test_run_refuses_bad_jobs_before_anything_starts():
    with pytest.raises(
        ConfigError, match=r"^pipelines\.colatz\.task: unknown task 'colatz'; did you mean 'collatz'\?$"
    ):
        longtail.run([Pipeline(model="tiny", task="colatz")], workers=1)
    assert list(Path().iterdir()) == []


def test_the_configuration_reference_is_up_to_date():
    script = ROOT / "scripts" / "make_config_reference.py"
    result = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
