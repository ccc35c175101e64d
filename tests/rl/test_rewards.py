"""Reward functions: found by name, called as TRL calls them, results checked."""

from __future__ import annotations

import asyncio
import random
import sys
import types
from fractions import Fraction

import numpy as np
import pytest
import torch

from longtail.core.errors import ConfigError, RewardError
from longtail.rl.rewards import Reward, call_rewards, check_columns, exact_answer, final_number, load_reward

COUNT = 16
CHAT = [{"role": "user", "content": "hi"}]


def call(*functions, prompts=None, columns=None):
    rewards = [Reward(f"my_rewards:{f.__name__}", f) for f in functions]
    prompts = prompts or [f"p{i}" for i in range(COUNT)]
    completions = [f"c{i}" for i in range(len(prompts))]
    return call_rewards(
        rewards, prompts=prompts, completions=completions, columns=columns or {}, where="collatz", step=3
    )


def returning(value):
    def chain(completions, **kwargs):
        return value

    return chain


# Results that are fine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [0.5] * COUNT,
        (0.5,) * COUNT,
        np.full(COUNT, 0.5, np.float32),
        [np.float32(0.5)] * COUNT,
        [np.array(0.5)] * COUNT,
        torch.full((COUNT,), 0.5, requires_grad=True),
        [torch.tensor(0.5, requires_grad=True)] * COUNT,
        [torch.tensor(0.5, dtype=torch.bfloat16)] * COUNT,
        [Fraction(1, 2)] * COUNT,
        (0.5 for _ in range(COUNT)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_lists_tuples_arrays_tensors_and_generators_of_numbers_are_rewards(value):
    rewards = call(returning(value))
    assert rewards == [0.5] * COUNT
    assert all(type(reward) is float for reward in rewards)


def test_bools_and_integers_count_as_numbers():
    values = [True, False, 2, np.bool_(True)] * 4
    assert call(returning(values)) == [1.0, 0.0, 2.0, 1.0] * 4


def test_several_rewards_add_up_and_none_means_does_not_apply():
    first = [None, 1, None, 0.25] * 4
    second = [None, 2, 0.5, None] * 4
    assert call(returning(first), returning(second)) == [None, 3.0, 0.5, 0.25] * 4
    assert call(returning([None] * COUNT)) == [None] * COUNT


def test_coroutines_are_awaited_at_the_same_time():
    turn = asyncio.Event()

    async def waits(completions, **kwargs):
        await asyncio.wait_for(turn.wait(), 10)
        return [1.0] * len(completions)

    async def wakes(completions, **kwargs):
        turn.set()
        return [2.0] * len(completions)

    assert call(waits, wakes, returning([4.0] * COUNT)) == [7.0] * COUNT


def test_a_plain_function_may_run_an_event_loop_of_its_own():
    def judge(completions, **kwargs):
        return asyncio.run(asyncio.sleep(0, [1.0] * len(completions)))

    async def other(completions, **kwargs):
        return [1.0] * len(completions)

    assert call(judge, other) == [2.0] * COUNT


# Results that are not --------------------------------------------------------------------------------------------


def endless():
    while True:
        yield 1.0


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ([1.0] * 7, "returned 7 values for 16 completions"),
        ([1.0], "returned 1 value for 16 completions"),
        ([1.0] * 17, "returned 17 values for 16 completions"),
        ([], "returned 0 values for 16 completions"),
        (endless(), "returned 1016 values for 16 completions"),
        (None, "returned None instead of a list"),
        (1.0, "returned a float instead of a list"),
        (np.float64(1), "returned a float instead of a list"),
        (torch.tensor(1.0), "returned a float instead of a list"),
        (dict.fromkeys(range(COUNT), 1.0), "returned a dict instead of a list"),
        ("1" * COUNT, "returned '1111111111111111' instead of a list"),
        ({1.0}, "returned a set instead of a list"),
        ([1.0] * 15 + [float("nan")], "returned nan for completion 15; rewards must be finite"),
        ([float("inf")] * COUNT, "returned inf for completion 0; rewards must be finite"),
        ([10**400] * COUNT, "returned inf for completion 0; rewards must be finite"),
        (["1"] * COUNT, "returned '1' for completion 0; a reward is a number or None"),
        ([[1.0]] * COUNT, "returned a list for completion 0"),
        (np.ones((COUNT, 1)), "returned a list for completion 0"),
        ([1j] * COUNT, "returned a complex for completion 0"),
    ],
)
def test_anything_else_is_refused_with_function_and_step(value, says):
    with pytest.raises(RewardError) as caught:
        call(returning(value))
    text = str(caught.value)
    assert text.startswith(f"collatz: reward my_rewards:chain {says}")
    assert text.endswith("(step 3)")
    assert "\n" not in text


def test_a_wrong_count_has_the_words_of_the_manual():
    with pytest.raises(RewardError) as caught:
        call(returning([1.0] * 7))
    assert str(caught.value) == "collatz: reward my_rewards:chain returned 7 values for 16 completions (step 3)"


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", [ValueError("row 5 is\nodd"), SystemExit(2)])
def test_an_exception_is_one_sentence_with_its_place(error, asynchronous, capsys):
    async def later(completions, **kwargs):
        raise error

    def chain(completions, **kwargs):
        raise error

    with pytest.raises(RewardError) as caught:
        call(later if asynchronous else chain)
    text = " ".join(str(error).split())
    assert f"raised {type(error).__name__}: {text} (test_rewards.py:" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Traceback" in capsys.readouterr().err


# Arguments -------------------------------------------------------------------------------------------------------


def test_functions_get_prompts_completions_and_every_column_by_name():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return [0.0] * 2

    def some(answer, completions):
        assert (answer, completions) == (["x", "y"], ["c0", "c1"])
        return [0.0] * 2

    call(everything, some, prompts=["a", "b"], columns={"answer": ["x", "y"], "level": [1, 2]})
    assert seen == {"prompts": ["a", "b"], "completions": ["c0", "c1"], "answer": ["x", "y"], "level": [1, 2]}


def test_chat_prompts_have_chat_completions():
    def chain(prompts, completions, **kwargs):
        assert completions == [[{"role": "assistant", "content": "c0"}], [{"role": "assistant", "content": "c1"}]]
        return [1.0, 1.0]

    assert call(chain, prompts=[CHAT, CHAT]) == [1.0, 1.0]


def test_a_function_that_changes_its_inputs_harms_nobody():
    def destroys(prompts, completions, answer, **kwargs):
        prompts[0][0]["content"] = "gone"
        completions.clear()
        answer[0].append("gone")
        return [0.0, 0.0]

    def looks(prompts, completions, answer, **kwargs):
        assert prompts == [CHAT, CHAT]
        assert len(completions) == 2
        assert answer == [["x"], ["y"]]
        return [1.0, 1.0]

    columns = {"answer": [["x"], ["y"]]}
    assert call(destroys, looks, prompts=[CHAT, CHAT], columns=columns) == [1.0, 1.0]
    assert CHAT[0]["content"] == "hi"
    assert columns == {"answer": [["x"], ["y"]]}


def test_a_column_that_a_function_needs_but_the_task_lacks_is_found_beforehand():
    def needs(completions, answr, limit=3, **kwargs): ...

    with pytest.raises(ConfigError, match="reward m:needs needs a column 'answr', but the task has answer, n"):
        check_columns(Reward("m:needs", needs), ["answer", "n"])
    check_columns(Reward("m:needs", needs), ["answr"])
    check_columns(Reward("longtail.rl.rewards:final_number", final_number), ["answer"])


# Built-in rewards ------------------------------------------------------------------------------------------------


def test_final_number_compares_last_numbers():
    answers = ["6*7 is 42\n#### 42", "#### 1,000", "3.50", "#### -4", "no number", 42]
    said = ["So 6 * 7 = 42.", "1000 or 1001", "$3.5", "x = -4", "7", [{"role": "assistant", "content": "42"}]]
    assert final_number([], said, answer=answers) == [1, 0, 1, 1, None, 1]


def test_exact_answer_ignores_white_space_around():
    assert exact_answer([], [" 42\n", "42.0", ""], answer=[42, "42", "x"]) == [1, 0, 0]


# Finding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A job file's folder; ``sys.path`` and ``sys.modules`` are as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", sys.modules)
    before = dict(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - set(before):
        del sys.modules[name]


def write(base, name, text):
    path = base / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_module_beside_the_job_file_is_found_first_and_finds_its_neighbours(base):
    write(base, "helpers_beside.py", "VALUE = 7")
    write(base, "my_rewards.py", "def chain(**kw):\n    import helpers_beside\n    return [helpers_beside.VALUE]")
    reward = load_reward("my_rewards:chain", base=base)
    assert reward.name == "my_rewards:chain"
    assert reward() == [7]


def test_the_job_files_folder_hides_no_installed_module(base):
    write(base, "colorsys.py", "raise RuntimeError('hidden')")
    write(base, "my_rewards.py", "import colorsys\ndef chain(**kw): return [colorsys.rgb_to_hsv(1, 1, 1)[2]]")
    sys.modules.pop("colorsys", None)
    assert load_reward("my_rewards:chain", base=base)() == [1]
    assert sys.path[0] != str(base)


def test_a_module_named_like_a_loaded_one_is_still_the_one_beside_the_job_file(base):
    write(base, "random.py", "def chain(**kw): return ['mine']")
    assert load_reward("random:chain", base=base)() == ["mine"]
    assert sys.modules["random"] is random


def test_two_folders_may_have_modules_of_one_name(base):
    for folder in ("a", "b"):
        write(base / folder, "my_rewards.py", f"def chain(**kw): return ['{folder}']")
    assert [load_reward("my_rewards:chain", base=base / f)() for f in ("a", "b", "a")] == [["a"], ["b"], ["a"]]


def test_packages_with_relative_imports_work(base):
    write(base, "judges/__init__.py", "")
    write(base, "judges/tools.py", "VALUE = 5")
    write(base, "judges/chain.py", "from .tools import VALUE\ndef judge(**kw): return [VALUE]")
    assert load_reward("judges.chain:judge", base=base)() == [5]


def test_installed_modules_and_a_plain_folder_of_their_name_work(base):
    (base / "longtail").mkdir()
    assert load_reward("longtail.rl.rewards:final_number", base=base).function is final_number


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("my_rewards", "reward 'my_rewards' must have the form module:function"),
        ("my_rewards.chain", "must have the form module:function"),
        ("my_rewards:", "must have the form module:function"),
        (":chain", "must have the form module:function"),
        ("a:b:c", "must have the form module:function"),
        ("../up:chain", "must have the form module:function"),
        (
            "my_reward:chain",
            "there is no module 'my_reward', neither in {base} nor installed; did you mean 'my_rewards'",
        ),
        ("longtail.rl.reward:f", "there is no module 'longtail.rl.reward', neither in"),
        ("my_rewards:chian", "my_rewards.py has no function 'chian'; did you mean 'chain'?"),
        ("my_rewards:LIMIT", "LIMIT in my_rewards.py is int, not a function"),
        ("broken:f", "importing broken failed: SyntaxError: invalid syntax (broken.py:2)"),
        ("raises:f", "importing raises failed: KeyError: 'x' (raises.py:1)"),
        ("leaves:f", "importing leaves failed: SystemExit: 3 (leaves.py:2)"),
        ("needs:f", "importing needs failed: ModuleNotFoundError: No module named 'nowhere_at_all' (needs.py:1)"),
    ],
)
def test_what_cannot_be_found_or_imported_is_one_clear_sentence(base, spec, says):
    write(base, "my_rewards.py", "LIMIT = 3\ndef chain(**kw): ...")
    write(base, "broken.py", "x = 1\ndef f(:")
    write(base, "raises.py", "{}['x']")
    write(base, "leaves.py", "import sys\nsys.exit(3)")
    write(base, "needs.py", "import nowhere_at_all")
    with pytest.raises(ConfigError) as caught:
        load_reward(spec, base=base)
    assert says.format(base=base) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_callable_object_is_a_reward(base):
    write(base, "my_rewards.py", "class Judge:\n    def __call__(self, completions): return [1.0]\njudge = Judge()")
    reward = load_reward("my_rewards:judge", base=base)
    assert isinstance(reward.function, types.ModuleType) is False
    assert call_rewards([reward], prompts=["a"], completions=["b"], columns={"n": [1]}, where="x", step=1) == [1.0]
