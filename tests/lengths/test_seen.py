"""Prompts of the training data are recognised by a sample of digests."""

from __future__ import annotations

import json

import pytest

from longtail.lengths.seen import fingerprint, seen_share


@pytest.mark.parametrize("size", [1, 300, 20_000])
def test_the_share_of_known_prompts_is_about_right(size):
    trained = [f"prompt {i}" for i in range(size)]
    kept = json.loads(json.dumps(fingerprint(trained)))
    assert len(kept["digests"]) < 1200
    new = [f"new {i}" for i in range(size)]
    assert seen_share(kept, trained) == 1.0
    assert seen_share(kept, new) == 0.0
    if size > 1:
        assert seen_share(kept, trained[: size // 2] + new[: size // 2]) == pytest.approx(0.5, abs=0.08)


def test_what_cannot_be_told_is_none():
    few = ["prompt 1", "prompt 2"]
    assert seen_share(None, few) is None
    assert seen_share({"one_in": "x"}, few) is None
    assert seen_share({"one_in": 0, "digests": []}, few) is None
    assert seen_share(fingerprint([f"prompt {i}" for i in range(50_000)]), few) is None
    assert seen_share(fingerprint(few), []) is None
