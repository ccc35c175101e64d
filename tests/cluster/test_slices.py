"""Work in slices: the same result, one thread at a time, an end at any pause."""

import threading

import pytest
import torch

from longtail.cluster.slices import Cancelled, Slices


def counting(pauses, seen=None):
    def work(pause):
        for i in range(pauses):
            if seen is not None:
                seen.append(threading.current_thread().name)
            pause(i / pauses)
        return pauses

    return work


def test_slices_of_no_time_end_at_every_pause():
    slices, rounds = Slices(counting(5)), 0
    while not slices.run(0.0):
        assert slices.share == rounds / 5
        rounds += 1
    assert (rounds, slices.result) == (5, 5)


def test_a_long_slice_does_it_all_at_once():
    slices = Slices(counting(5))
    assert slices.run(60.0)
    assert slices.result == 5


def test_only_one_of_the_two_threads_works_at_a_time():
    seen = []
    slices = Slices(counting(3, seen))
    while not slices.run(0.0):
        seen.append("asked")
    assert seen == ["slices", "asked"] * 3


def test_an_error_of_the_work_comes_out_of_the_slice_in_which_it_happens():
    def work(pause):
        pause(0.5)
        raise ValueError("so it goes")

    slices = Slices(work)
    assert not slices.run(0.0)
    with pytest.raises(ValueError, match="so it goes"):
        slices.run(0.0)


@pytest.mark.parametrize("begun", [False, True])
def test_cancelled_work_unwinds_and_leaves_no_thread(begun):
    unwound = []

    def work(pause):
        try:
            pause(0.0)
        except Cancelled:
            unwound.append(True)
            raise

    slices = Slices(work)
    if begun:
        slices.run(0.0)
    slices.cancel()
    slices.cancel()
    assert unwound == [True] * begun
    assert slices._thread is None or not slices._thread.is_alive()


def test_the_backward_pass_of_a_network_may_pause_while_that_of_another_runs():
    def network(seed):
        torch.manual_seed(seed)
        layers, x = [torch.nn.Linear(8, 8) for _ in range(4)], torch.randn(3, 8)

        def work(pause):
            h = x
            with torch.enable_grad():
                for layer in layers:
                    h = layer(h).tanh()
                    h.register_hook(lambda grad: pause(0.5))
            h.sum().backward()
            return [layer.weight.grad.clone() for layer in layers]

        return work

    alone = [network(seed)(lambda share: None) for seed in (1, 2)]
    both = [Slices(network(seed)) for seed in (1, 2)]
    with torch.no_grad():
        while left := [slices for slices in both if not slices.over]:
            for slices in left:
                slices.run(0.0)
                assert not torch.is_grad_enabled()
    for slices, grads in zip(both, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(slices.result, grads, strict=True))
