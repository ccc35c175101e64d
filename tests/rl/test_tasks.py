"""Tasks: what they ask, how they judge, in which order, and what they say about input that cannot work."""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import ConfigError, DataError
from longtail.rl.tasks import BUILT_IN, load_task, prompt_indices
from longtail.rl.tasks.gym import final_answer
from longtail.rl.tasks.scoring import last_number, matched

HERE = Path()


def task_of(spec, base=HERE, seed=0, **args):
    return load_task(spec, args, seed=seed, base=base)


def score(task, index, text):
    example = task.example(index)
    return task.score([example.prompt], [text], **{k: [v] for k, v in example.columns.items()})[0]


# The built-in tasks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", BUILT_IN)
@settings(deadline=None)
@given(index=st.integers(0, 10**12), seed=st.integers(0, 2**63 - 1), chat=st.booleans())
def test_the_reference_answer_earns_one_and_every_way_to_spoil_it_less(spec, index, seed, chat):
    task = task_of(spec, seed=seed)
    example = task.example(index)
    answer = example.columns["answer"]

    def earned(text):
        return score(task, index, [{"role": "assistant", "content": text}] if chat else text)

    assert earned(f" {answer}") == pytest.approx(1.0)
    assert earned(answer[:-1]) < 1
    assert earned(f"{answer} 7") < 1
    assert earned("") == 0
    assert task_of(spec, seed=seed).example(index) == example


@pytest.mark.parametrize("spec", BUILT_IN)
def test_a_longer_right_beginning_never_earns_less(spec):
    task = task_of(spec)
    for index in range(50):
        pieces = task.example(index).columns["answer"]
        earned = [score(task, index, pieces[:n]) for n in range(len(pieces) + 1)]
        words = [e for e, c in zip(earned, pieces + " ", strict=True) if c == " "]
        assert words == sorted(words)
        assert words[-1] == pytest.approx(1.0)


def test_running_on_after_the_end_costs_more_the_longer_it_is():
    task = task_of("collatz", min_n=6, max_n=6)
    earned = [score(task, 0, "3 10 5 16 8 4 2 1" + " 4 2 1" * n) for n in range(4)]
    assert earned[0] == 1
    assert earned == sorted(earned, reverse=True)
    assert len(set(earned)) == 4


def test_a_right_sum_earns_its_share_without_right_steps():
    task = task_of("scratchpad", min_operands=3, max_operands=3)
    total = sum(task.example(0).columns["operands"])
    assert score(task, 0, f"={total}") == pytest.approx(0.2)


def test_collatz_answers_have_a_long_tail():
    lengths = sorted(len(task_of("collatz").example(i).columns["answer"]) for i in range(2000))
    assert lengths[1000] < 60
    assert lengths[-200] > 400


@pytest.mark.parametrize("spec", BUILT_IN)
def test_seeds_and_indices_give_different_examples(spec):
    prompts = [task_of(spec, seed=seed).example(i).prompt for seed in range(2) for i in range(30)]
    assert len(set(prompts)) > 25


@pytest.mark.parametrize(
    ("spec", "args", "says"),
    [
        ("colatz", {}, "unknown task 'colatz'; did you mean 'collatz'?"),
        ("summing", {}, "known: FILE.jsonl, collatz, reasoning_gym/NAME"),
        ("data.json", {}, "end in .jsonl"),
        ("collatz", {"maxn": 9}, "task collatz has no argument 'maxn'; did you mean 'max_n'"),
        ("collatz", {"max_n": "9"}, "max_n must be a whole number, not '9'"),
        ("collatz", {"max_n": True}, "max_n must be a whole number, not True"),
        ("collatz", {"min_n": 10, "max_n": 9}, "min_n = 10 is more than max_n = 9"),
        ("collatz", {"min_n": 1}, "min_n = 1 must be from 2"),
        ("scratchpad", {"max_value": 0}, "max_value = 0 must be from 1"),
        ("scratchpad", {"min_operands": 1}, "min_operands = 1 must be from 2"),
        ("reverse-text", {"max_syllables": 0}, "max_syllables = 0 must be from 1"),
        ("reasoning_gym/chain_sums", {}, "no generator 'chain_sums'; did you mean 'chain_sum'"),
        ("reasoning_gym/chain_sum", {"min_term": 3}, "no argument 'min_term'; did you mean 'min_terms'"),
        ("reasoning_gym/chain_sum", {"min_terms": -3}, "task reasoning_gym/chain_sum: min_terms must be positive"),
        ("reasoning_gym/chain_sum", {"size": 0}, "size must be a whole number from 1, not 0"),
        ("reasoning_gym/composite", {}, "task reasoning_gym/composite: Must specify at least one dataset"),
    ],
)
def test_what_cannot_work_is_one_clear_sentence(spec, args, says):
    with pytest.raises(ConfigError) as caught:
        task_of(spec, **args)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_loading_tasks_and_the_pool_imports_no_torch_ray_or_transformers():
    code = (
        "import sys, longtail.rl.reward_pool, longtail.rl.rewards, longtail.rl.tasks.gym, longtail.rl.tasks.jsonl;"
        "print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


# reasoning-gym ---------------------------------------------------------------------------------------------------


def test_a_reasoning_gym_task_is_endless_and_judges_by_the_generators_rule():
    task = task_of("reasoning_gym/chain_sum", max_terms=3)
    assert task.size is None
    for index in (0, 499, 500, 10**9):
        example = task.example(index)
        assert example == task_of("reasoning_gym/chain_sum", max_terms=3).example(index)
        assert pickle.loads(pickle.dumps(example)) == example
        answer = example.columns["answer"]
        assert score(task, index, f"Let me see. <answer>{answer}</answer> Done in 3 steps.") == 1
        assert score(task, index, f"It is {answer}.") == 1
        assert score(task, index, "no idea") < 0.1
    assert task.example(0) != task.example(500)
    assert task.example(0) != task_of("reasoning_gym/chain_sum", seed=1).example(0)


def test_a_reasoning_gym_task_with_a_size_is_a_data_set():
    task = task_of("reasoning_gym/leg_counting", size=7)
    assert task.size == 7
    assert len({task.example(i).prompt for i in range(7)}) == 7


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        ("<answer> 3 </answer> or <answer>\n4\n</answer> 9", "4", "4"),
        ("first 3, then 1,204.50.", "7", "1204.5"),
        ("none here", "7", ""),
        ("thoughts 12\n\n  the cat  \n\n", "a cat", "the cat"),
        ("", "a cat", ""),
        ("(1, 2)\nNone", None, "None"),
    ],
)
def test_the_final_answer_is_tagged_or_the_last_number_or_the_last_line(text, expected, answer):
    assert final_answer(text, expected) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 1,234", "1234"),
        ("-007.50", "-7.5"),
        ("a 3. b", "3"),
        ("0.0", "0"),
        ("-0", "0"),
        (".5", "0.5"),
        ("x", None),
        ("7 of 9", "9"),
    ],
)
def test_the_last_number_has_one_form(text, number):
    assert last_number(text) == number


@settings(deadline=None)
@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_matched_is_one_only_for_equal_sequences(written, truth):
    share = matched(written, truth)
    assert 0 <= share <= 1
    assert (share == 1) == (written == truth and truth != "")


# JSON lines ------------------------------------------------------------------------------------------------------


def jsonl(folder: Path, *rows, name="data.jsonl") -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row, ensure_ascii=False).encode() for row in rows]
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return folder


def test_rows_become_examples_with_their_other_columns(tmp_path):
    chat = [{"role": "user", "content": "東京?"}]
    base = jsonl(tmp_path, {"prompt": "2+2", "answer": "4", "level": 1}, b"", {"prompt": chat, "answer": "yes"})
    task = task_of("data.jsonl", base)
    assert task.size == 2
    assert task.score is None
    assert (task.example(0).prompt, task.example(0).columns) == ("2+2", {"answer": "4", "level": 1})
    assert (task.example(1).prompt, task.example(1).columns) == (chat, {"answer": "yes", "level": None})


def test_columns_can_be_named_and_the_answer_is_always_called_answer(tmp_path):
    base = jsonl(tmp_path, {"question": "2+2", "solution": "#### 4"})
    example = task_of("data.jsonl", base, prompt="question", answer="solution").example(0)
    assert example.prompt == "2+2"
    assert example.columns["answer"] == "#### 4"


def test_a_bom_and_windows_line_ends_do_no_harm(tmp_path):
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b\xc2\x85"}\r\n\r\n')
    task = task_of("data.jsonl", tmp_path)
    assert [task.example(i).prompt for i in range(2)] == ["a", "b\x85"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"prompt": "a"', "data.jsonl:2: not JSON"),
        (b"\xff\xfe", "data.jsonl:2: byte 1 is not UTF-8"),
        (b"[1]", "data.jsonl:2: each line must be a JSON object with columns, not list"),
        ({"promt": "a", "x": 1}, "data.jsonl:2: no column 'prompt'; the row has promt, x (task_args.prompt names"),
        ({"prompt": " \n"}, "data.jsonl:2: the prompt in 'prompt' is empty"),
        ({"prompt": []}, "data.jsonl:2: the prompt in 'prompt' is empty"),
        ({"prompt": [{"role": "user", "content": ""}]}, "data.jsonl:2: the prompt in 'prompt' is empty"),
        ({"prompt": 7}, "data.jsonl:2: 'prompt' must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, "data.jsonl:2: 'prompt' must be a text or a list of messages"),
        ({"prompt": "a", "completions": "b"}, "data.jsonl:2: rename the column 'completions'"),
        (b'{"prompt": "\\ud800"}', "data.jsonl:2: 'prompt' holds half of a surrogate pair"),
        (b"[" * 100_000, "data.jsonl:2: not JSON"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path, bad, says):
    with pytest.raises(DataError) as caught:
        task_of("data.jsonl", jsonl(tmp_path, {"prompt": "fine"}, bad))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_answer_column_that_was_asked_for_must_be_in_every_row(tmp_path):
    base = jsonl(tmp_path, {"prompt": "a", "gold": "1"}, {"prompt": "b"})
    with pytest.raises(DataError, match=r"data.jsonl:2: no column 'gold'.*task_args.answer"):
        task_of("data.jsonl", base, answer="gold")


def test_files_that_are_missing_or_empty_are_refused(tmp_path):
    jsonl(tmp_path, {"prompt": "a"})
    with pytest.raises(ConfigError, match=r"No such file.*did you mean 'data.jsonl'"):
        task_of("date.jsonl", tmp_path)
    with pytest.raises(ConfigError, match="No such file"):
        task_of("sub/date.jsonl", tmp_path)
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        task_of("folder.jsonl", tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match=r"empty.jsonl has no rows"):
        task_of("empty.jsonl", tmp_path)
    with pytest.raises(ConfigError, match="no argument 'promt'; did you mean 'prompt'"):
        task_of("data.jsonl", tmp_path, promt="x")
    with pytest.raises(ConfigError, match="prompt must be the name of a column, not 3"):
        task_of("data.jsonl", tmp_path, prompt=3)


# Order -----------------------------------------------------------------------------------------------------------


def test_endless_tasks_count_up():
    assert prompt_indices(task_of("collatz"), step=3, prompts=4, seed=9) == [12, 13, 14, 15]


@settings(deadline=None)
@given(size=st.integers(1, 12), prompts=st.integers(1, 30), seed=st.integers(0, 5))
def test_every_step_is_full_and_every_epoch_holds_every_row_once(size, prompts, seed):
    class Sized:
        name, score = "sized", None

    task = Sized()
    task.size = size
    steps = math.ceil(3 * size / prompts)
    order = [i for s in range(steps) for i in prompt_indices(task, step=s, prompts=prompts, seed=seed)]
    assert len(order) == steps * prompts
    for epoch in range(3):
        assert Counter(order[epoch * size : (epoch + 1) * size]) == Counter(range(size))


def test_the_order_differs_by_seed_and_by_epoch(tmp_path):
    task = task_of("data.jsonl", jsonl(tmp_path, *({"prompt": str(i)} for i in range(20))))
    epochs = {tuple(prompt_indices(task, step=e, prompts=20, seed=s)) for e in range(3) for s in range(3)}
    assert len(epochs) == 9
