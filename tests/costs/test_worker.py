"""Costs that simulated workers go by."""

from __future__ import annotations

import pytest

from longtail.costs.decode import DecodeCosts
from longtail.costs.table import TableKey
from longtail.costs.worker import WorkerCosts, slowest

KEY = TableKey("machine", "model", "float32", "shm", 1)
FAST, SLOW = (DecodeCosts(base_s=s, per_sequence_s=s / 10) for s in (0.01, 0.02))


def costs(**changes) -> WorkerCosts:
    return WorkerCosts(**{"decode": SLOW, "per_train_token_s": 1e-4, "update_s": 0.1, **changes})


def test_a_worker_alone_is_all_that_is_known_by_default():
    assert costs().degrees == (1,)
    assert costs().sampling(1) == SLOW
    with pytest.raises(KeyError):
        costs().sampling(2)


@pytest.mark.parametrize("degree", [0, 1, 3])
def test_a_degree_that_heads_do_not_allow_is_an_error(degree):
    with pytest.raises(ValueError, match=f"decode_by_degree has {degree}"):
        costs(decode_by_degree={degree: FAST}, kv_heads=2)


def test_a_table_has_the_degrees_that_are_asked_for_and_known_and_no_cost_of_nothing():
    table = costs(decode_by_degree={2: FAST, 4: FAST}, kv_heads=4).table(KEY, measured="now", degrees=(2, 3), fine=True)
    assert table.degrees == (1, 2)
    assert table.decode_s(2, 5, 10_000) == pytest.approx(FAST.step_s(5))
    assert table.prefill[1].token_s > 0, "a table holds positive seconds only"


def test_together_workers_are_as_slow_as_the_slowest_in_everything():
    other = DecodeCosts(base_s=0.001, per_sequence_s=0.5, per_context_token_s=1e-6)
    assert slowest([SLOW, other]) == DecodeCosts(base_s=0.02, per_sequence_s=0.5, per_context_token_s=1e-6)
