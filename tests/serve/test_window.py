"""The window of hold mode finds a server's capacity."""

import pytest

from longtail.serve.window import MOST, Load, Window, read_load


def settle(capacity: int, *, others: int = 0, looks: int = 200, held: int = 10_000) -> list[Load]:
    """A server that runs ``capacity`` requests at most, some of them of ``others``, and a queue that never empties."""
    window, loads = Window(), []
    for _ in range(looks):
        wanted = window.size + others
        load = Load(min(capacity, wanted), max(0, wanted - capacity))
        loads.append(load)
        window.look(load, in_flight=window.size, held=held)
    return loads


@pytest.mark.parametrize("capacity", [1, 4, 16, 100, 256, 1000])
@pytest.mark.parametrize("others", [0, 3])
def test_the_server_is_kept_full_with_hardly_a_queue_of_its_own(capacity, others):
    loads = settle(capacity, others=min(others, capacity - 1))[20:]
    assert all(load.running == capacity for load in loads)
    queues = sorted(load.waiting for load in loads)
    assert queues[len(queues) // 2] <= 2 + 0.05 * capacity
    assert sum(queues) / len(queues) <= 3 + 0.1 * capacity


def test_prompts_that_are_being_read_are_no_full_batch():
    """An idle server of 256 places that takes one long prompt after the other."""
    window = Window()
    for running in range(1, 17):
        window.look(Load(running, 16 - running), in_flight=16, held=100)
    assert window.size >= 16


def test_a_server_without_a_cap_gets_everything():
    assert settle(10 * MOST)[-1].running == MOST


def test_nothing_grows_while_nothing_waits_here():
    window = Window()
    for _ in range(50):
        window.look(Load(3, 0), in_flight=3, held=0)
    assert window.size == Window().size


def test_loads_are_read_from_servers_that_publish_them():
    vllm = 'vllm:num_requests_running{engine="0",model_name="m"} 3.0\nvllm:num_requests_running{engine="1"} 4.0\n'
    vllm += '# HELP x y\nvllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_waiting_by_reason{a="b"} 9.0\n'
    assert read_load(vllm) == Load(7, 2)
    assert read_load("sglang:num_running_reqs 5\nsglang:num_queue_reqs 1e1\n") == Load(5, 10)
    assert read_load("longtail_in_flight 5.0\nlongtail_waiting 0.0\n") == Load(5, 0)
    assert read_load("python_info 1\n") is None
    assert read_load("") is None
