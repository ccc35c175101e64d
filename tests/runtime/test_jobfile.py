"""Job files: what is accepted, and the exact sentence for what is not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.config import NAME, Algorithm, Checkpoints, Jobs, Pipeline, Rollout, Train
from longtail.core.errors import ConfigError
from longtail.runtime import schema
from longtail.runtime.jobfile import dump_resolved, jobs_from_python, load_jobs

HEAD = "pipelines:\n  sums:\n    model: tiny\n    task: collatz\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str | bytes, **options):
    with open("jobs.yaml", "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    return load_jobs("jobs.yaml", **options)


def problems(text: str | bytes, **options) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(text, **options)
    return str(caught.value).splitlines()


def value(line: str, *path: str):
    """The value that ``line``, put into the pipeline, gives to the key ``path``."""
    found = load(HEAD + f"    {line}\n").jobs.pipelines["sums"]
    for name in path:
        found = getattr(found, name)
    return found


TP = "must be a whole number from 1 to 1024, auto, oracle or threshold:K"
K = "K is a whole number from 1 to 9999999, such as threshold:16."

# One bad line in a pipeline (line 5 of the file), and what is said about it.
BAD_LINES = {
    # numbers
    "steps: 0": "steps = 0: must be at least 1.",
    "steps: -3": "steps = -3: must be at least 1.",
    "steps: two": "steps = 'two': must be a whole number of at least 1, not text.",
    "steps: 1e3": "steps = 1e3: must be a whole number of at least 1. Write 1000.",
    "steps: 2.5": "steps = 2.5: must be a whole number of at least 1.",
    'steps: "20"': "steps = '20': must be a whole number of at least 1, not text. Remove the quotes.",
    "steps: true": "steps = true: must be a whole number of at least 1, not true or false.",
    "steps: [1]": "steps = [1]: must be a whole number of at least 1, not a list.",
    "steps: {a: 1}": "steps = {...}: must be a whole number of at least 1, not a section of keys.",
    "steps:": "steps = (empty): has no value; give a whole number of at least 1 (or leave it out for 100).",
    "steps: ~": "steps = ~: has no value; give a whole number of at least 1 (or leave it out for 100).",
    "steps: .nan": "steps = .nan: must be a whole number of at least 1.",
    f"steps: {'9' * 5000}": f"steps = {'9' * 57}...: must be a whole number of at least 1.",
    "seed: -1": "seed = -1: must be from 0 to 9223372036854775807.",
    "train: {lr: -1}": "train.lr = -1: must be above 0 and at most 10.",
    "train: {lr: 0}": "train.lr = 0: must be above 0 and at most 10.",
    "train: {lr: .nan}": "train.lr = .nan: must be a finite number.",
    "train: {lr: -.inf}": "train.lr = -.inf: must be a finite number.",
    "train: {lr: 1e999}": "train.lr = 1e999: must be a finite number.",
    "train: {lr: fast}": "train.lr = 'fast': must be a number above 0 and at most 10, not text.",
    "train: {lr: true}": "train.lr = true: must be a number above 0 and at most 10, not true or false.",
    "rollout: {top_p: 0}": "rollout.top_p = 0: must be above 0 and at most 1.",
    "rollout: {top_p: 1.5}": "rollout.top_p = 1.5: must be above 0 and at most 1.",
    "rollout: {top_k: -1}": "rollout.top_k = -1: must be at least 0.",
    "rollout: {temperature: null}": "rollout.temperature = null: has no value; give a number from 0 to 100 "
    "(or leave it out for 1.0).",
    "algorithm: {clip_low: 1}": "algorithm.clip_low = 1: must be at least 0 and below 1.",
    "algorithm: {group_size: 1}": "algorithm.group_size = 1: GRPO compares the samples of one prompt with each other, "
    "so group_size must be at least 2.",
    "algorithm: {group_size: 0}": "algorithm.group_size = 0: must be from 2 to 4096.",
    # numbers that other YAML readers see and this one does not
    "rollout: {prompts: 1_000}": "rollout.prompts = '1_000': must be a whole number from 1 to 1000000, not text. "
    "Numbers are written in plain decimal digits, such as 1000, 0.5 or 1e-6.",
    "rollout: {prompts: 0x10}": "rollout.prompts = '0x10': must be a whole number from 1 to 1000000, not text. "
    "Numbers are written in plain decimal digits, such as 1000, 0.5 or 1e-6.",
    "rollout: {prompts: 010}": "rollout.prompts = '010': must be a whole number from 1 to 1000000, not text. "
    "Numbers are written in plain decimal digits, such as 1000, 0.5 or 1e-6.",
    "rollout: {prompts: 1:30}": "rollout.prompts = '1:30': must be a whole number from 1 to 1000000, not text. "
    "Numbers are written in plain decimal digits, such as 1000, 0.5 or 1e-6.",
    "train: {lr: 1_000.5}": "train.lr = '1_000.5': must be a number above 0 and at most 10, not text. "
    "Numbers are written in plain decimal digits, such as 1000, 0.5 or 1e-6.",
    "steps: yes": "steps = 'yes': must be a whole number of at least 1, not text.",
    # a number or one of some words
    "rollout: {tp: 0}": f"rollout.tp = 0: {TP}.",
    "rollout: {tp: -1}": f"rollout.tp = -1: {TP}.",
    "rollout: {tp: 2000}": f"rollout.tp = 2000: {TP}.",
    'rollout: {tp: "4"}': f"rollout.tp = '4': {TP}. Remove the quotes.",
    "rollout: {tp: fast}": f"rollout.tp = 'fast': {TP}.",
    "rollout: {tp: Auto}": f"rollout.tp = 'Auto': {TP}; did you mean 'auto'?",
    "rollout: {tp: orcale}": f"rollout.tp = 'orcale': {TP}; did you mean 'oracle'?",
    "rollout: {tp: treshold:8}": f"rollout.tp = 'treshold:8': {TP}; did you mean 'threshold:K'?",
    "rollout: {tp: threshold}": f"rollout.tp = 'threshold': {TP}. {K}",
    "rollout: {tp: threshold:0}": f"rollout.tp = 'threshold:0': {TP}. {K}",
    "rollout: {tp: threshold:x}": f"rollout.tp = 'threshold:x': {TP}. {K}",
    "rollout: {tp: threshold:-4}": f"rollout.tp = 'threshold:-4': {TP}. {K}",
    "rollout: {tp: threshold:10000000}": f"rollout.tp = 'threshold:10000000': {TP}. {K}",
    "rollout: {tp: 2.5}": f"rollout.tp = 2.5: {TP}.",
    "rollout: {tp: 2.0}": f"rollout.tp = 2.0: {TP}. Write 2.",
    "rollout: {tp: .nan}": f"rollout.tp = .nan: {TP}.",
    "rollout: {tp: 0x2}": f"rollout.tp = '0x2': {TP}. Numbers are written in plain decimal digits, such as 1000, 0.5 "
    "or 1e-6.",
    "rollout: {tp: true}": f"rollout.tp = true: {TP}, not true or false.",
    "rollout: {tp: [2]}": f"rollout.tp = [2]: {TP}, not a list.",
    "rollout: {tp: {degree: 2}}": f"rollout.tp = {{...}}: {TP}, not a section of keys.",
    'rollout: {tp: ""}': f"rollout.tp = '': {TP}.",
    "rollout: {tp: }": f"rollout.tp = (empty): has no value; give {TP[8:]} (or leave it out for auto).",
    # words and texts
    "dtype: float16": "dtype = 'float16': must be float32, bfloat16 or float64; did you mean 'bfloat16'?",
    "dtype: 32": "dtype = 32: must be float32, bfloat16 or float64.",
    "dtype: [float32]": "dtype = ['float32']: must be float32, bfloat16 or float64.",
    "dtype:": "dtype = (empty): has no value; give float32, bfloat16 or float64 (or leave it out for float32).",
    "algorithm: {name: PPO}": "algorithm.name = 'PPO': must be grpo.",
    "algorithm: {loss: Token}": "algorithm.loss = 'Token': must be token, sequence or constant; did you mean 'token'?",
    "rollout: {stop: END}": "rollout.stop = 'END': must be a list of texts, not text. Write ['END'].",
    "rollout: {stop: [END, 3]}": "rollout.stop[1] = 3: must be text, not a number. Put it in quotes: \"3\".",
    'rollout: {stop: [""]}': "rollout.stop[0] = '': must not be empty.",
    "reward: 3": 'reward = 3: must be text, a list of texts or null, not a number. Put it in quotes: "3".',
    "reward: {a: b}": "reward = {...}: must be text, a list of texts or null, not a section of keys.",
    "reward: [a:b, 3]": "reward[1] = 3: must be text, not a number. Put it in quotes: \"3\".",
    "reward: []": "reward = []: a reward is named as module:function; leave the key out for the task's own reward.",
    'reward: ""': "reward = '': a reward is named as module:function; leave the key out for the task's own reward.",
    # lists and sections
    "train: {betas: [0.9]}": "train.betas = [0.9]: must be a list of 2 numbers each at least 0 and below 1.",
    "train: {betas: [0.9, 0.99, 1]}": "train.betas = [0.9, 0.99, 1]: must be a list of 2 numbers each at least 0 and "
    "below 1.",
    "train: {betas: [0.9, 1]}": "train.betas[1] = 1: must be at least 0 and below 1.",
    "train: {betas: [0.9, b]}": "train.betas[1] = 'b': must be a number, not text.",
    "train: {betas: 0.9}": "train.betas = 0.9: must be a list of 2 numbers each at least 0 and below 1.",
    "train: fast": "train = 'fast': must be a section of keys, not text.",
    "train: [lr]": "train = ['lr']: must be a section of keys, not a list.",
    "train: {warmup_steps: 101}": "train.warmup_steps = 101: warm-up takes more steps than the pipeline has "
    "(steps = 100).",
    # task_args, where any type may stand
    "task_args: {shuffle: no}": "task_args.shuffle = no: this is text; write true or false, or put it in quotes "
    "if text "
    "is meant.",
    "task_args: {n: 0x10}": "task_args.n = 0x10: this is text; write the number in plain decimal digits, or put it in "
    "quotes if text is meant.",
    "task_args: {n: [1, 1_000]}": "task_args.n[1] = 1_000: this is text; write the number in plain decimal digits, or "
    "put it in quotes if text is meant.",
    "task_args: {n: .inf}": "task_args.n = .inf: must be a finite number.",
}  # fmt: skip

BAD_KEYS = {
    "reward_fn: x": "unknown key 'reward_fn'; did you mean 'reward'?",
    "stpes: 3": "unknown key 'stpes'; did you mean 'steps'?",
    "lr: 1e-6": "unknown key 'lr'; did you mean 'train.lr'?",
    "max_token: 5": "unknown key 'max_token'; did you mean 'rollout.max_tokens'?",
    "workers: 2": "unknown key 'workers'; it stands at the top of the file, beside 'pipelines'.",
    "zzz: 1": "unknown key 'zzz'; known keys are model, task, task_args, reward, reward_timeout_s, algorithm, rollout, "
    "train, checkpoint, steps, priority, max_slowdown, max_staleness, seed, dtype.",
    "rollout: {steps: 3}": "unknown key 'steps'; did you mean 'pipelines.sums.steps'?",
    "train: {learning_rate: 3}": "unknown key 'learning_rate'; known keys are lr, micro_tokens, warmup_steps, "
    "schedule, "
    "betas, eps, weight_decay, max_grad_norm.",
    "tp: 2": "unknown key 'tp'; did you mean 'rollout.tp'?",
    "rollout: {communicator: shm}": "unknown key 'communicator'; it stands at the top of the file, beside 'pipelines'.",
    "rollout: {group_size: 4}": "unknown key 'group_size'; did you mean 'algorithm.group_size'?",
}  # fmt: skip

BAD_FILES = {
    "workers: 0\n" + HEAD: ["jobs.yaml:1: workers = 0: must be from 1 to 100000."],
    "workers: two\n" + HEAD: ["jobs.yaml:1: workers = 'two': must be a whole number from 1 to 100000 or null, "
    "not text."],
    "name: a/b\n" + HEAD: [
        "jobs.yaml:1: name = 'a/b': the name 'a/b' cannot be a folder name: use 1 to 64 ASCII letters, digits, "
        "'.', '_' "
        "or '-', starting with a letter or digit."
    ],
    "name: 12\n" + HEAD: ['jobs.yaml:1: name = 12: must be text or null, not a number. Put it in quotes: "12".'],
    "runs_dir: ''\n" + HEAD: ["jobs.yaml:1: runs_dir = '': must not be empty."],
    "ray: locl\n" + HEAD: [
        "jobs.yaml:1: ray = 'locl': must be local, auto, or an address such as 10.0.0.1:6379 or ray://10.0.0.1:10001."
    ],
    "piplines:\n  a: {}\n": ["jobs.yaml:1: unknown key 'piplines'; did you mean 'pipelines'?"],
    "communicator: mpi\n" + HEAD: ["jobs.yaml:1: communicator = 'mpi': must be auto, shm, gloo or nccl."],
    "communicator: NCCL\n" + HEAD: [
        "jobs.yaml:1: communicator = 'NCCL': must be auto, shm, gloo or nccl; did you mean 'nccl'?"
    ],
    "communicator:\n" + HEAD: [
        "jobs.yaml:1: communicator = (empty): has no value; give auto, shm, gloo or nccl (or leave it out for auto)."
    ],
    "costs: ''\n" + HEAD: ["jobs.yaml:1: costs = '': must not be empty."],
    "costs: 3\n" + HEAD: [
        'jobs.yaml:1: costs = 3: must be text that is not empty or null, not a number. Put it in quotes: "3".'
    ],
    "costs: [a]\n" + HEAD: ["jobs.yaml:1: costs = ['a']: must be text that is not empty or null, not a list."],
    "tp: 2\n" + HEAD: ["jobs.yaml:1: unknown key 'tp'; did you mean 'pipelines.NAME.rollout.tp'?"],
    "lr: 1\n" + HEAD: ["jobs.yaml:1: unknown key 'lr'; did you mean 'pipelines.NAME.train.lr'?"],
    "workers: 2\n": ["jobs.yaml:1: the key 'pipelines' is missing: the pipelines by name."],
    "pipelines:\n": ["jobs.yaml:1: pipelines: at least one pipeline is needed, such as 'sums:' with its keys."],
    "pipelines: {}\n": ["jobs.yaml:1: pipelines: at least one pipeline is needed, such as 'sums:' with its keys."],
    "pipelines: [a]\n": ["jobs.yaml:1: pipelines = ['a']: must be a section of keys, not a list."],
    "pipelines:\n  sums:\n": [
        "jobs.yaml:2: pipelines.sums: the key 'model' is missing: a built-in name (tiny, smollm2-135m), a folder "
        "(relative to the job file), or a Hugging Face hub id.",
        "jobs.yaml:2: pipelines.sums: the key 'task' is missing: collatz, scratchpad, reverse-text, "
        "reasoning_gym/NAME, "
        "or a .jsonl file (relative to the job file).",
    ],
    "pipelines:\n  sums: {modle: tiny, task: collatz}\n": [
        "jobs.yaml:2: pipelines.sums: unknown key 'modle'; did you mean 'model'?"
    ],
    "pipelines:\n  sums: {model: , task: collatz}\n": [
        "jobs.yaml:2: pipelines.sums.model = (empty): has no value; give text that is not empty (it has no default)."
    ],
    "pipelines:\n  sums: {model: '', task: 3}\n": [
        "jobs.yaml:2: pipelines.sums.model = '': must not be empty.",
        'jobs.yaml:2: pipelines.sums.task = 3: must be text that is not empty, not a number. Put it in quotes: "3".',
    ],
    "pipelines:\n  ..: {model: tiny, task: collatz}\n": [
        "jobs.yaml:2: pipelines...: the name '..' cannot be a folder name: use 1 to 64 ASCII letters, digits, "
        "'.', '_' or "
        "'-', starting with a letter or digit."
    ],
    HEAD + "    task: rev\n": ["jobs.yaml:5: pipelines.sums: the key 'task' appears twice, first on line 4."],
    HEAD + "  sums: {}\n": ["jobs.yaml:5: pipelines: the key 'sums' appears twice, first on line 2."],
    # not YAML, or not a job file
    "": ["jobs.yaml: the file is empty; a job file begins with keys such as 'pipelines:'."],
    "# nothing\n": ["jobs.yaml: the file is empty; a job file begins with keys such as 'pipelines:'."],
    "- a\n- b\n": ["jobs.yaml: the file is not a mapping of keys; a job file begins with keys such as 'pipelines:'."],
    "hello\n": ["jobs.yaml: the file is not a mapping of keys; a job file begins with keys such as 'pipelines:'."],
    "pipelines:\n\tsums: {}\n": ["jobs.yaml:2: a tab indents this line; YAML is indented with spaces."],
    "workers: 2: 3\n": [
        "jobs.yaml:1: a ':' is not expected here; check the indentation, or quote text that contains ': '."
    ],
    HEAD + "---\n" + HEAD: ["jobs.yaml:5: a second document begins here ('---'); a job file has one."],
    HEAD + "    train: *base\n": ["jobs.yaml:5: no anchor defines the alias in 'train: *base'."],
    HEAD + '    reward: "a\n': [
        "jobs.yaml:5: the quote that opens on this line is not closed or holds an unknown escape."
    ],
    "pipelines:\n  a: {}\n b: {}\n": ["jobs.yaml:3: 'b: {}' is not indented like its neighbours, or lacks a ':'."],
    HEAD + "    steps: !!int 3\n": ["jobs.yaml:5: tags such as !!int are not used here; write the plain value."],
    HEAD + "    ? [a]\n    : 1\n": ["jobs.yaml:5: pipelines.sums: a key must be plain text."],
    HEAD + "    task_args: &a\n      x: *a\n": [
        "jobs.yaml:6: pipelines.sums.task_args.x: an alias refers to the value that it is part of."
    ],
    HEAD + "    train: {<<: 3}\n": [
        "jobs.yaml:5: pipelines.sums.train: '<<' merges a section, such as *name of one with the anchor &name."
    ],
    HEAD + '    reward: "a\\0b"\n': [
        "jobs.yaml:5: pipelines.sums.reward: the text contains a character that no file or tokenizer can hold."
    ],
    HEAD + "    reward: a\x07b\n": ["jobs.yaml:5: the character U+0007 is not allowed in YAML."],
    HEAD + "    steps: [" * 3000 + "\n": ["jobs.yaml: the file is nested too deeply."],
}  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_value_is_named_with_file_line_key_value_and_what_is_allowed(line):
    assert problems(HEAD + f"    {line}\n") == [f"jobs.yaml:5: pipelines.sums.{BAD_LINES[line]}"]


@pytest.mark.parametrize("line", BAD_KEYS)
def test_an_unknown_key_is_named_with_the_nearest_known_one(line):
    section = f".{line.partition(':')[0]}" if "{" in line else ""
    assert problems(HEAD + f"    {line}\n") == [f"jobs.yaml:5: pipelines.sums{section}: {BAD_KEYS[line]}"]


@pytest.mark.parametrize("text", BAD_FILES)
def test_a_bad_file_is_explained(text):
    assert problems(text) == BAD_FILES[text]


def test_all_problems_of_a_file_are_told_in_its_order():
    text = """\
workers: -1
pipelines:
  b:
    model: tiny
    tsk: collatz
    train: {lr: x, warmup_steps: 5}
    steps: 0
  a: {model: tiny, task: collatz, seed: 1.5}
threads: 2
"""
    assert [line.partition(": ")[0] + ": " + line.split(": ")[1] for line in problems(text)] == [
        "jobs.yaml:1: workers = -1",
        "jobs.yaml:5: pipelines.b",
        "jobs.yaml:6: pipelines.b.train.lr = 'x'",
        "jobs.yaml:7: pipelines.b.steps = 0",
        "jobs.yaml:8: pipelines.a.seed = 1.5",
        "jobs.yaml:9: unknown key 'threads'; did you mean 'threads_per_worker'?",
    ]


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "1.0E-06", "+1e-6", "0.000001", '"1.0e-6"', "'1e-6'"])
def test_a_learning_rate_is_a_number_however_it_is_spelled(text):
    assert value(f"train: {{lr: {text}}}", "train", "lr") == 1e-6


def test_a_fraction_needs_no_digit_before_the_point_and_a_whole_number_is_a_fraction_too():
    assert value("rollout: {top_p: .5}", "rollout", "top_p") == 0.5
    assert value("rollout: {temperature: 2}", "rollout", "temperature") == 2.0
    assert value("train: {betas: [0, .95]}", "train", "betas") == (0.0, 0.95)


@pytest.mark.parametrize(
    ("text", "found", "threshold"),
    [("1", 1, None), ("1024", 1024, None), ("auto", "auto", None), ('"oracle"', "oracle", None)]
    + [(f"threshold:{k}", f"threshold:{k}", k) for k in (1, 16, 9999999)],
)
def test_a_tensor_parallel_degree_is_a_number_or_a_policy(text, found, threshold):
    rollout = value(f"rollout: {{tp: {text}}}", "rollout")
    assert (rollout.tp, rollout.tp_threshold) == (found, threshold)


@pytest.mark.parametrize("key", [key for key in schema.keys().values() if key.words], ids=lambda key: key.name)
def test_words_that_may_stand_instead_of_a_number_are_accepted(key):
    for word in key.words:
        text = word.text.replace("K", "3")
        assert value(f"{key.path[2]}: {{{key.name}: {text}}}", *key.path[2:]) == text


@pytest.mark.parametrize("empty", ["", "null", "~"])
def test_empty_means_the_default_where_nothing_or_a_section_may_stand(empty):
    text = (
        HEAD
        + f"    reward: {empty}\n    rollout: {empty}\n    task_args: {empty}\n    train: {{max_grad_norm: {empty}}}\n"
    )
    pipeline = load(text).jobs.pipelines["sums"]
    assert pipeline.reward is None
    assert pipeline.rollout == Rollout()
    assert pipeline.task_args == {}
    assert pipeline.train.max_grad_norm is None
    assert value(f"rollout: {{stop: {empty}}}", "rollout", "stop") == []


@pytest.mark.parametrize("word", ["on", "yes", "no", "2026-01-02", "1:30", "0x10", "012"])
def test_text_stays_text_where_text_is_wanted(word):
    assert load(f"name: n\npipelines:\n  p: {{model: {word}, task: collatz}}\n").jobs.pipelines["p"].model == word


def test_a_date_is_a_name_and_a_number_is_a_pipeline_name():
    job_file = load("name: 2026-01-02\npipelines:\n  1: {model: tiny, task: collatz}\n")
    assert job_file.run_name == "2026-01-02"
    assert list(job_file.jobs.pipelines) == ["1"]


def test_task_args_keep_their_types():
    line = 'task_args: {a: 1, b: 1.5, c: true, d: "no", e: text, f: [1, {g: null}], h: "0x10"}'
    expected = {"a": 1, "b": 1.5, "c": True, "d": "no", "e": "text", "f": [1, {"g": None}], "h": "0x10"}
    found = value(line, "task_args")
    assert found == expected
    assert type(found["a"]) is int


def test_anchors_and_merges_share_sections():
    jobs = load("""\
pipelines:
  a: &a
    model: tiny
    task: collatz
    train: &train {lr: 1e-4, eps: 1e-7}
  b:
    <<: *a
    task: reverse-text
    train: {<<: *train, lr: 1e-3}
  c: {<<: [{steps: 7}, *a]}
""").jobs
    a, b, c = (jobs.pipelines[name] for name in "abc")
    assert (b.model, b.task, b.train.lr, b.train.eps) == ("tiny", "reverse-text", 1e-3, 1e-7)
    assert c == a.model_copy(update={"steps": 7})


def test_aliases_that_multiply_are_stopped():
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    assert problems("a0: &a0 [x]\n" + levels) != []


def test_byte_order_marks_windows_line_ends_and_comments_change_nothing():
    plain = load(HEAD).jobs
    assert load(b"\xef\xbb\xbf" + HEAD.encode()).jobs == plain
    assert load(HEAD.replace("\n", "\r\n")).jobs == plain
    assert load("%YAML 1.2\n---\n# first\n" + HEAD.replace("tiny", "tiny # the model") + "...\n").jobs == plain
    assert problems("\r\n" + HEAD.replace("\n", "\r\n") + "    steps: 0\r\n")[0].startswith("jobs.yaml:6: ")


def test_a_file_that_is_not_utf_8_is_named_with_the_line():
    assert problems(HEAD.encode() + b"    reward: caf\xe9\n") == [
        "jobs.yaml:5: the file is not UTF-8 text; save it as UTF-8."
    ]


def test_missing_files_and_folders_are_explained(tmp_path):
    (tmp_path / "jobs.yml").write_text(HEAD)
    for path, message in {
        "jobs.yaml": "jobs.yaml: there is no such file; did you mean jobs.yml?",
        "elsewhere/x.yaml": "elsewhere/x.yaml: there is no such file.",
        ".": ".: this is a folder; give the job file in it, such as jobs.yaml.",
        "jobs.yml/x": "jobs.yml/x: the file cannot be read: Not a directory.",
    }.items():
        with pytest.raises(ConfigError) as caught:
            load_jobs(path)
        assert str(caught.value) == message


def test_a_huge_file_is_not_read(tmp_path):
    with open(tmp_path / "weights.yaml", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match=r"larger than 1 MiB"):
        load_jobs("weights.yaml")


def test_home_and_variables_are_replaced_in_paths_only(monkeypatch):
    monkeypatch.setenv("HOME", "/home/東京 ü")
    monkeypatch.setenv("DATA", "/data")
    text = 'runs_dir: ~/runs\npipelines:\n  p: {model: "~/m", task: "${DATA}/a.jsonl", reward: "$DATA:f"}\n'
    jobs = load(text).jobs
    pipeline = jobs.pipelines["p"]
    assert (jobs.runs_dir, pipeline.model, pipeline.task) == ("/home/東京 ü/runs", "/home/東京 ü/m", "/data/a.jsonl")
    assert pipeline.reward == "$DATA:f"


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("NOWHERE", raising=False)
    assert problems("pipelines:\n  p: {model: $NOWHERE/m, task: collatz}\n") == [
        "jobs.yaml:2: pipelines.p.model = '$NOWHERE/m': the environment variable $NOWHERE is not set."
    ]


def test_a_run_is_named_by_option_or_key_or_file(tmp_path):
    assert load(HEAD).run_name == "jobs"
    assert load("name: mine\n" + HEAD).run_name == "mine"
    assert load("name: mine\n" + HEAD, name="other").run_name == "other"
    (tmp_path / "東京.yaml").write_text(HEAD, "utf-8")
    with pytest.raises(ConfigError, match=r"^東京.yaml: a run is named after its file, but .* set 'name:' in the file"):
        load_jobs("東京.yaml")
    assert load_jobs("東京.yaml", name="tokyo").run_name == "tokyo"
    with pytest.raises(ConfigError, match=r"^--name: the name '\.\.' cannot be a folder name"):
        load(HEAD, name="..")


def test_later_checks_can_say_where_a_key_stands():
    job_file = load("workers: 2\n" + HEAD + "    rollout:\n      max_tokens: 8\n", workers=3)
    assert (
        job_file.where("pipelines", "sums", "rollout", "max_tokens") == "jobs.yaml:7: pipelines.sums.rollout.max_tokens"
    )
    assert job_file.where("pipelines", "sums", "rollout", "top_p") == "jobs.yaml:6: pipelines.sums.rollout.top_p"
    assert job_file.where("pipelines", "sums", "steps") == "jobs.yaml:3: pipelines.sums.steps"
    assert job_file.where("workers") == "jobs.yaml:1: workers"
    assert job_file.jobs.workers == 3


def test_jobs_from_python_look_beside_the_working_directory(tmp_path):
    jobs = Jobs(pipelines={"p": Pipeline(model="tiny", task="collatz")})
    job_file = jobs_from_python(jobs, "mine")
    assert job_file.base == tmp_path
    assert job_file.where("pipelines", "p", "model") == "pipelines.p.model"
    with pytest.raises(ConfigError, match="cannot be a folder name"):
        jobs_from_python(jobs, "a/b")


names = st.from_regex(NAME, fullmatch=True)
texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)
paths = texts.filter(lambda text: "$" not in text and not text.startswith("~"))
fractions = st.floats(1e-12, 0.99) | st.sampled_from([1e-06, 0.5, 1e-05])
arguments = st.dictionaries(
    texts.filter(lambda text: text != "<<"),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
pipelines = st.builds(
    Pipeline,
    model=paths,
    task=paths,
    task_args=arguments,
    reward=st.none() | texts | st.lists(texts, min_size=1, max_size=3),
    algorithm=st.builds(Algorithm, group_size=st.integers(2, 64), clip_low=fractions, beta=fractions),
    rollout=st.builds(
        Rollout,
        prompts=st.integers(1, 99),
        stop=st.lists(texts, max_size=3),
        top_p=fractions,
        tp=st.integers(1, 1024) | st.sampled_from(["auto", "oracle", "threshold:1", "threshold:16"]),
        kv_gib=st.none() | fractions,
    ),
    train=st.builds(Train, lr=fractions, betas=st.tuples(fractions, fractions), max_grad_norm=st.none() | fractions),
    checkpoint=st.builds(Checkpoints, keep=st.integers(1, 9)),
    seed=st.integers(0, 2**63 - 1),
)
all_jobs = st.builds(
    Jobs,
    name=st.none() | names,
    runs_dir=paths,
    ray=st.sampled_from(["local", "auto", "10.0.0.1:6379", "ray://head:10001"]),
    workers=st.none() | st.integers(1, 9),
    communicator=st.sampled_from(["auto", "shm", "gloo", "nccl"]),
    costs=st.none() | paths,
    pipelines=st.dictionaries(names, pipelines, min_size=1, max_size=3),
)


@settings(max_examples=60, deadline=None)
@given(jobs=all_jobs)
def test_the_resolved_configuration_loads_again_with_equal_values(tmp_path_factory, jobs):
    folder = tmp_path_factory.mktemp("run")
    dump_resolved(jobs, folder / "config.yaml")
    loaded = load_jobs(folder / "config.yaml").jobs
    assert loaded == jobs
    assert [p.name for p in folder.iterdir()] == ["config.yaml"]


def test_the_resolved_configuration_names_every_key(tmp_path):
    jobs = Jobs(pipelines={"p": Pipeline(model="no", task="0x10", reward="on")})
    dump_resolved(jobs, tmp_path / "config.yaml")
    text = (tmp_path / "config.yaml").read_text()
    assert 'model: "no"' in text
    assert "lr: 1.0e-06" in text
    for section in (Jobs, Pipeline, Algorithm, Rollout, Train, Checkpoints):
        for key in section.model_fields:
            assert f"{key}:" in text


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60) | st.text(alphabet="abc:-[]{}&*!|>'\"%@#?,~<\n\t 012._", max_size=60))
def test_no_text_makes_the_reader_fail_in_any_other_way(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("any") / "jobs.yaml"
    path.write_text(text, "utf-8", newline="")
    with pytest.raises(ConfigError) as caught:
        load_jobs(path)
    assert all(line.startswith(str(path)) for line in str(caught.value).split("\n"))


def test_every_default_is_within_its_own_range():
    pipeline = Pipeline(model="tiny", task="collatz")
    assert Pipeline.model_validate(pipeline.model_dump()) == pipeline
