"""Forced lengths and rankers are looked at before anything starts; test_check.py has the lines of a job file."""

from __future__ import annotations

import pytest

from longtail.core.config import Rollout
from longtail.core.errors import DataError, RankerError
from longtail.runtime.check_order import check_forced_lengths, load_ranker, why_not_oracle
from simulated_run import Rows


def test_lists_of_possible_lengths_are_accepted():
    check_forced_lengths(Rows([[1, 8], [3]]), "lengths", 8)


@pytest.mark.parametrize("bad", [[], [0], [9], [2.5], [True], ["3"]])
def test_a_row_without_possible_lengths_is_named(bad):
    with pytest.raises(DataError) as caught:
        check_forced_lengths(Rows([[1, 8], bad]), "lengths", 8)
    assert str(caught.value) == (
        f"row 2: 'lengths' must be a list of whole numbers from 1 to max_tokens = 8, not {bad}"
    )


def test_a_column_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(DataError, match="no column 'tokens'; its columns are 'lengths'"):
        check_forced_lengths(Rows([[1]]), "tokens", 8)


def test_the_oracle_must_be_given_the_lengths():
    assert "name the column" in (why_not_oracle(Rollout(order="oracle")) or "")
    assert why_not_oracle(Rollout(order="oracle", forced_lengths="lengths")) is None
    assert why_not_oracle(Rollout(order="ranked")) is None


def test_only_ranked_pipelines_load_a_ranker(tmp_path):
    assert load_ranker(Rollout(order="fifo"), base=tmp_path) is None
    assert load_ranker(Rollout(order="oracle", forced_lengths="lengths"), base=tmp_path) is None
    assert load_ranker(Rollout(), base=tmp_path) is not None


def test_a_ranker_is_looked_for_beside_the_job_file(tmp_path):
    with pytest.raises(RankerError, match=str(tmp_path / "mine")):
        load_ranker(Rollout(ranker="mine"), base=tmp_path)
