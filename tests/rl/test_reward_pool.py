"""The reward pool against user code that misbehaves: every call ends, other pipelines go on, nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from longtail.core.errors import ConfigError, DataError, RewardError
from longtail.rl.reward_pool import RewardPool, RewardSpec

USER_CODE = """
import os, subprocess, sys, threading, time
from pathlib import Path

def ones(completions, **columns):
    return [1.0] * len(completions)

def seven(completions, **columns):
    return [1.0] * 7

def raises_on_one_row(completions, **columns):
    return [1 / (completion != "c3") for completion in completions]

def hangs(completions, **columns):
    time.sleep(600)

def hangs_and_will_not_go(completions, **columns):
    while True:
        try:
            time.sleep(600)
        except BaseException:
            pass

def leaves(completions, **columns):
    os._exit(7)

def leaves_quietly(completions, **columns):
    os._exit(0)

def crashes(completions, **columns):
    os.kill(os.getpid(), 11)

def dies_idle(completions, **columns):
    here = Path(__file__).parent
    (here / "idle").write_text(str(os.getpid()))
    threading.Thread(target=die_at, args=(here / "die",), daemon=True).start()
    return ones(completions)

def die_at(file):
    while not file.exists():
        time.sleep(0.01)
    os._exit(1)

def loud(completions, **columns):
    print("x" * 10_000_000)
    print("to stderr", file=sys.stderr)
    os.write(1, b"past python")
    subprocess.run(["echo", "from a child"])
    return ones(completions)

def asks(completions, **columns):
    return [float(len(sys.stdin.read()) == 0)] * len(completions)

def with_children(completions, here, **columns):
    plain = subprocess.Popen(["sleep", "600"])
    own_session = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(here[0]).write_text(f"{plain.pid} {own_session.pid}")
    time.sleep(600)

async def judges(completions, **columns):
    return ones(completions)

def numbers(completions, **columns):
    import numpy
    return numpy.ones(len(completions), numpy.float32)

def none(completions, **columns):
    return [None] * len(completions)
"""

SIXTEEN = {"prompts": ["p"] * 16, "completions": [f"c{i}" for i in range(16)], "columns": {}}
PIPELINES = [
    "ones",
    "seven",
    "raises_on_one_row",
    "hangs",
    "leaves",
    "leaves_quietly",
    "crashes",
    "dies_idle",
    "loud",
    "asks",
    "judges",
    "numbers",
    "none",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "my_rewards.py").write_text(USER_CODE)
    return folder


def spec(base, function, *, timeout_s=20.0, task="collatz", **args):
    rewards = (f"my_rewards:{function}",) if function else ()
    return RewardSpec(task=task, task_args=args, seed=0, rewards=rewards, base=base, timeout_s=timeout_s)


@pytest.fixture(scope="module")
def pool(base):
    """A pool that all tests below share, so that each also shows that it recovered from the ones before."""
    with RewardPool(processes=2, log_path=base / "rewards.log") as pool:
        for name in PIPELINES:
            pool.open(name, spec(base, name, timeout_s=0.5 if name == "hangs" else 20.0))
        yield pool


def result(pool, pipeline, step=3, **samples):
    return pool.submit(pipeline, step=step, **(samples or SIXTEEN)).result(timeout=60)


def error(pool, pipeline):
    with pytest.raises(RewardError) as caught:
        result(pool, pipeline)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pipeline", ["ones", "judges", "numbers"])
def test_rewards_come_back(pool, pipeline):
    assert result(pool, pipeline) == [1.0] * 16


def test_none_for_every_function_is_none(pool):
    assert result(pool, "none") == [None] * 16


def test_a_task_rewards_itself_and_functions_add_up(pool, base):
    samples = {"prompts": ["collatz 2:"], "completions": [" 1"], "columns": {"n": [2], "answer": ["1"]}}
    pool.open("own", spec(base, None))
    assert result(pool, "own", **samples) == [1.0]
    both = RewardSpec(
        task="collatz",
        task_args={},
        seed=0,
        rewards=("my_rewards:ones", "longtail.rl.rewards:exact_answer"),
        base=base,
        timeout_s=20,
    )
    pool.open("both", both)
    assert result(pool, "both", **samples) == [2.0]


def test_a_wrong_count_names_function_counts_and_step(pool):
    assert error(pool, "seven") == "seven: reward my_rewards:seven returned 7 values for 16 completions (step 3)"


def test_an_exception_on_one_row_names_its_place(pool):
    says = "raises_on_one_row: reward my_rewards:raises_on_one_row raised ZeroDivisionError: division by zero (my_rew"
    assert error(pool, "raises_on_one_row").startswith(says)


def test_a_call_that_hangs_ends_at_its_limit_while_others_go_on(pool):
    hanging = pool.submit("hangs", step=3, **SIXTEEN)
    assert [result(pool, "ones") for _ in range(5)] == [[1.0] * 16] * 5
    with pytest.raises(RewardError, match=r"hangs: reward my_rewards:hangs did not return within 0.5 s \(step 3\)"):
        hanging.result(timeout=60)
    assert result(pool, "ones") == [1.0] * 16


@pytest.mark.parametrize(
    ("pipeline", "says"),
    [
        ("leaves", "with exit code 7"),
        ("leaves_quietly", "with exit code 0"),
        ("crashes", "killed by signal 11"),
    ],
)
def test_a_call_that_ends_its_process_fails_alone(pool, pipeline, says):
    others = [pool.submit("ones", step=3, **SIXTEEN) for _ in range(4)]
    text = error(pool, pipeline)
    assert f"{pipeline}: reward my_rewards:{pipeline} ended its process" in text
    assert f"{says} (step 3); see " in text
    assert [other.result(timeout=60) for other in others] == [[1.0] * 16] * 4


def test_a_call_that_ends_its_process_fails_alone_although_it_is_heard_of_late(base, tmp_path, monkeypatch):
    with RewardPool(processes=2, log_path=tmp_path / "late.log") as pool:
        for name in ("hangs", "leaves"):
            pool.open(name, spec(base, name, timeout_s=600.0))
        tasks = pool._processes.pool._pool_manager.task_manager
        started = tasks.task_start

        def late(task, worker):
            time.sleep(1.0)
            started(task, worker)

        hanging = pool.submit("hangs", step=3, **SIXTEEN)
        wait_until(lambda: any(task.worker_id for task in tasks.tasks.values()))
        monkeypatch.setattr(tasks, "task_start", late)
        assert "ended its process, with exit code 7" in error(pool, "leaves")
        assert not hanging.done()


def test_a_process_that_dies_between_calls_costs_no_call(pool, base):
    assert result(pool, "dies_idle") == [1.0] * 16
    idle = psutil.Process(int((base / "idle").read_text()))
    (base / "die").touch()
    wait_until(lambda: dead(idle))
    assert [result(pool, "ones") for _ in range(4)] == [[1.0] * 16] * 4


def test_prints_go_to_the_log_only(pool, base, capfd):
    assert result(pool, "loud") == [1.0] * 16
    log = (base / "rewards.log").read_text()
    assert len(log) > 10_000_000
    assert all(text in log for text in ("to stderr", "past python", "from a child"))
    printed = "".join(capfd.readouterr())
    assert not any(text in printed for text in ("xxx", "to stderr", "past python", "from a child"))


def test_user_code_cannot_take_the_terminals_input(pool):
    assert result(pool, "asks") == [1.0] * 16


def test_a_cancelled_call_frees_its_process(base):
    with RewardPool(processes=1, log_path=base / "cancel.log") as pool:
        pool.open("hangs", spec(base, "hangs"))
        pool.open("ones", spec(base, "ones"))
        future = pool.submit("hangs", step=1, **SIXTEEN)
        assert future.cancel()
        assert result(pool, "ones") == [1.0] * 16


@pytest.mark.parametrize(
    ("function", "task", "args", "kind", "says"),
    [
        ("onse", "collatz", {}, ConfigError, "my_rewards.py has no function 'onse'; did you mean 'ones'"),
        ("with_children", "collatz", {}, ConfigError, "needs a column 'here', but the task has n, answer"),
        (None, "rows.jsonl", {}, ConfigError, "task rows.jsonl has no reward of its own: set reward"),
        (None, "collatz", {"max": 3}, ConfigError, "task collatz has no argument 'max'"),
        ("ones", "bad.jsonl", {}, DataError, "bad.jsonl:1: not JSON"),
    ],
)
def test_open_finds_what_cannot_work(pool, base, function, task, args, kind, says):
    (base / "rows.jsonl").write_text('{"prompt": "a"}\n')
    (base / "bad.jsonl").write_text("{\n")
    with pytest.raises(kind, match=says):
        pool.open("x", spec(base, function, task=task, **args))


def test_a_module_that_ends_the_process_at_import_is_an_error_of_open(pool, base):
    (base / "leaves_at_import.py").write_text("import os\nos._exit(0)\n")
    with pytest.raises(ConfigError, match="the reward leaves_at_import:f ended its process while it was loaded"):
        pool.open("x", RewardSpec("collatz", {}, 0, ("leaves_at_import:f",), base, 1.0))


# Nothing is left behind ------------------------------------------------------------------------------------------


def wait_until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in 120 s"
        time.sleep(0.02)


def children_of_user_code(folder):
    file = folder / "pids"
    wait_until(lambda: file.exists() and len(file.read_text().split()) == 2)
    return [psutil.Process(int(pid)) for pid in file.read_text().split()]


def pool_processes():
    return [p for p in psutil.Process().children(recursive=True) if not is_tracker(p)]


def is_tracker(process):
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return True


def dead(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def with_children(base, tmp_path):
    """A fresh pool with a call under way that has started two processes, one in a session of its own."""
    (base / "here.jsonl").write_text('{"prompt": "a", "here": "x"}\n')

    def start(timeout_s):
        before = set(pool_processes())
        pool = RewardPool(processes=2, log_path=tmp_path / "rewards.log")
        pool.open("x", spec(base, "with_children", task="here.jsonl", timeout_s=timeout_s))
        samples = {"prompts": ["p"], "completions": ["c"], "columns": {"here": [str(tmp_path / "pids")]}}
        future = pool.submit("x", step=1, **samples)
        return pool, future, children_of_user_code(tmp_path), set(pool_processes()) - before

    return start


def test_close_ends_every_process_also_those_of_user_code(with_children):
    pool, future, children, processes = with_children(timeout_s=600)
    pool.close()
    pool.close()
    psutil.wait_procs([*children, *processes], timeout=120)
    assert all(map(dead, [*children, *processes]))
    with pytest.raises(RewardError, match="have been stopped"):
        future.result(timeout=0)
    with pytest.raises(RewardError, match="have been stopped"):
        pool.submit("x", step=2, **SIXTEEN).result(timeout=0)


def test_a_timeout_ends_what_the_call_had_started(with_children, monkeypatch):
    later = 0.0
    clock = SimpleNamespace(time=lambda: time.time() + later, sleep=time.sleep)
    monkeypatch.setattr("pebble.pool.process.time", clock)
    pool, future, children, _ = with_children(timeout_s=600)
    assert not future.done()
    later = 10_000.0
    with pytest.raises(RewardError, match="did not return within"):
        future.result(timeout=60)
    psutil.wait_procs(children, timeout=120)
    assert all(map(dead, children))
    pool.close()


def test_user_code_that_ignores_its_end_is_ended_by_close(base, tmp_path):
    before = set(pool_processes())
    pool = RewardPool(processes=1, log_path=tmp_path / "rewards.log")
    pool.open("x", spec(base, "hangs_and_will_not_go"))
    pool.submit("x", step=1, **SIXTEEN)
    processes = set(pool_processes()) - before
    pool.close()
    psutil.wait_procs(processes, timeout=120)
    assert all(map(dead, processes))


SCRIPT = """
import sys, time
from pathlib import Path
from longtail.rl.reward_pool import RewardPool, RewardSpec

base, pids = Path(sys.argv[1]), sys.argv[2]
pool = RewardPool(processes=2, log_path=Path(pids).with_name("rewards.log"))
pool.open("x", RewardSpec("here.jsonl", {}, 0, ("my_rewards:with_children",), base, 600.0))
pool.submit("x", step=1, prompts=["p"], completions=["c"], columns={"here": [pids]})
print("started", flush=True)
time.sleep(600)
"""


def test_processes_end_with_a_controller_that_is_killed_and_a_script_needs_no_main_guard(base, tmp_path):
    (base / "here.jsonl").write_text('{"prompt": "a", "here": "x"}\n')
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script), str(base), str(tmp_path / "pids")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout.readline() == "started\n"
        children = children_of_user_code(tmp_path)
        processes = psutil.Process(controller.pid).children()
        os.kill(controller.pid, signal.SIGKILL)
        assert controller.communicate()[0] == ""
    psutil.wait_procs([*children, *processes], timeout=120)
    assert all(map(dead, [*children, *processes]))


def test_the_pools_files_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    RewardPool(processes=1, log_path=tmp_path / "rewards.log").close()
    assert list(Path(tmp_path / "tmp").iterdir()) == []


def test_functions_of_a_pipeline_that_is_over_are_let_go_and_may_come_back_changed(base, tmp_path):
    (base / "kept.py").write_text(
        "import gc\n\ndef loaded(completions, **columns):\n"
        "    from longtail.rl import reward_pool\n"
        "    return [float(len(reward_pool._loaded))] * len(completions)\n"
    )
    of_kept = RewardSpec("collatz", {}, 0, ("kept:loaded",), base, 20.0)
    with RewardPool(processes=1, log_path=tmp_path / "rewards.log") as pool:
        for name in ("a", "b", "c"):
            pool.open(name, of_kept)
        assert pool.submit("a", step=0, **SIXTEEN).result()[0] == 3.0
        pool.forget("b")
        pool.forget("b")
        assert pool.submit("a", step=1, **SIXTEEN).result()[0] == 2.0
        pool.open("b", spec(base, "ones"))
        assert pool.submit("b", step=0, **SIXTEEN).result() == [1.0] * 16
        assert pool.submit("a", step=2, **SIXTEEN).result()[0] == 3.0


@pytest.fixture(scope="module")
def rehearsals(tmp_path_factory):
    with RewardPool(processes=1, log_path=tmp_path_factory.mktemp("rehearsals") / "rewards.log") as pool:
        yield pool


def test_prompts_that_take_too_long_are_found_and_the_pool_goes_on(rehearsals, base, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "never.jsonl")
    monkeypatch.setattr("longtail.rl.reward_pool.PROMPTS_TIMEOUT_S", 1.5)
    for endless in (
        spec(tmp_path, "", task="never.jsonl"),
        spec(base, "", task="reasoning_gym/chain_sum", size=10**12),
    ):
        with pytest.raises(ConfigError, match=r"^task \S+: its prompts are not made after 1\.5 s$"):
            rehearsals.rehearse(endless, examples=4)
    monkeypatch.setattr("longtail.rl.reward_pool.PROMPTS_TIMEOUT_S", 300.0)
    rehearsals.rehearse(spec(base, "", task="reasoning_gym/chain_sum"), examples=4)


def test_what_a_task_itself_refuses_is_left_to_the_check(rehearsals, base):
    rehearsals.rehearse(spec(base, "", task="nowhere.jsonl"), examples=4)
    rehearsals.rehearse(spec(base, "", task="reasoning_gym/nothing"), examples=4)


def test_any_other_end_of_a_rehearsal_is_a_refusal(rehearsals, base, monkeypatch):
    from longtail.rl import reward_pool

    for make, says in ((_runs_out_of_memory, "cannot be made: MemoryError"), (_is_killed, "ended the process")):
        monkeypatch.setattr(reward_pool, "_rehearse", make)
        with pytest.raises(ConfigError, match=says):
            rehearsals.rehearse(spec(base, ""), examples=4)


def _runs_out_of_memory(*_):
    raise MemoryError


def _is_killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)
