import os
import signal
import subprocess
import sys

import pytest

from longtail.core.errors import ConfigError
from longtail.observe.lock import lock_run

HOLD = """
import sys, time
from longtail.observe.lock import lock_run
lock = lock_run(sys.argv[1])
print("held", flush=True)
sys.stdin.read()
"""
HOLD_WITH_ORPHAN = """
import os, sys, time
from longtail.observe.lock import lock_run
lock = lock_run(sys.argv[1])
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(600)
sys.stdin.read()
"""


def start(script, folder):
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, process.stdout.readline().strip()


def test_a_second_run_is_refused_with_the_pid_and_start_of_the_first(tmp_path):
    process, said = start(HOLD, tmp_path / "run")
    try:
        assert said == "held"
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on .* \(started \d{{4}}-\d\d-\d\d"):
            lock_run(tmp_path / "run")
    finally:
        process.communicate()
    with lock_run(tmp_path / "run"):
        pass


def test_of_many_processes_that_start_at_once_exactly_one_gets_the_folder(tmp_path):
    script = """
import sys
from longtail.core.errors import ConfigError
from longtail.observe.lock import lock_run
sys.stdin.readline()
try:
    lock_run(sys.argv[1])
    print("held", flush=True)
except ConfigError:
    print("refused", flush=True)
sys.stdin.read()
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    said = sorted(process.stdout.readline().strip() for process in processes)
    for process in processes:
        process.communicate()
    assert said == ["held", "refused", "refused", "refused"]


def test_the_same_process_cannot_take_a_folder_twice(tmp_path):
    lock = lock_run(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
        lock_run(tmp_path)
    lock.release()
    lock.release()
    lock_run(tmp_path).release()


def test_kill_9_of_the_holder_frees_the_folder_though_a_forked_child_lives_on(tmp_path):
    process, child = start(HOLD_WITH_ORPHAN, tmp_path)
    try:
        with pytest.raises(ConfigError):
            lock_run(tmp_path)
        process.kill()
        process.wait()
        os.kill(int(child), 0)  # it lives
        lock_run(tmp_path).release()
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_path_that_cannot_be_a_folder_is_a_config_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="choose another runs_dir"):
        lock_run(tmp_path / "file" / "run")
