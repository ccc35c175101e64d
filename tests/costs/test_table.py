"""Cost tables: what was measured comes back, between and beyond it nothing absurd, and files are read strictly."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longtail.core.errors import ConfigError
from longtail.core.events import Span
from longtail.core.types import SubStage
from longtail.costs.corrections import Corrections
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, SwitchCosts, TableKey
from longtail.costs.table_file import from_plain, load, save, to_plain

KEY = TableKey(machine="AMD EPYC, 2 cores", model="smollm2-135m", dtype="float32", communicator="shm", threads=1)
BATCHES, CONTEXTS = (1, 2, 4, 8), (64, 512, 2048)


def grid(base_s: float = 0.03, each_s: float = 0.002, token_s: float = 1e-6) -> DecodeGrid:
    seconds = tuple(tuple(base_s + each_s * n + token_s * n * c for c in CONTEXTS) for n in BATCHES)
    return DecodeGrid(batches=BATCHES, contexts=CONTEXTS, seconds=seconds)


TABLE = CostTable(
    key=KEY,
    measured="2026-01-01T12:00:00",
    detail="coarse",
    kv_heads=3,
    kv_bytes=15360,
    decode={1: grid(), 2: grid(0.02, 0.001)},
    prefill={
        1: PrefillCosts(chunk_tokens=(64, 256), seconds_per_token=(2e-3, 1e-3)),
        2: PrefillCosts(chunk_tokens=(64, 256), seconds_per_token=(1e-3, 6e-4)),
    },
    switch=SwitchCosts(handshake_s=1e-3, move_s=2e-4, move_byte_s=1e-10),
    train_token_s=3e-3,
    same_worker={"decode": {"train": 1.9}},
    neighbour_worker={"decode": {"decode": 1.1}},
)


def test_measured_points_come_back():
    for n, row in zip(BATCHES, TABLE.decode[1].seconds, strict=True):
        for context, seconds in zip(CONTEXTS, row, strict=True):
            assert TABLE.decode_s(1, n, n * context) == pytest.approx(seconds)


@given(n=st.floats(1, 8), context=st.floats(0, 5000))
def test_between_and_beyond_contexts_costs_are_linear(n, context):
    assert TABLE.decode_s(1, n, n * context) == pytest.approx(0.03 + 0.002 * n + 1e-6 * n * context)


def test_steps_of_a_kernel_are_kept_between_measured_batches():
    jump = DecodeGrid(batches=(1, 4, 5, 8), contexts=(1, 2), seconds=((1.0, 1.0), (1.1, 1.1), (2.0, 2.0), (2.1, 2.1)))
    table = replace(TABLE, decode={1: jump})
    assert [table.decode_s(1, n, 0) for n in (1, 4, 5, 8)] == pytest.approx([1.0, 1.1, 2.0, 2.1])
    assert table.decode_s(1, 6, 0) == pytest.approx(2.0 + 0.1 / 3)


positive = st.floats(1e-6, 10.0)


@given(rows=st.lists(st.lists(positive, min_size=2, max_size=2), min_size=3, max_size=3), n=st.floats(0.5, 1000))
def test_whatever_was_measured_no_step_is_free_or_faster_with_more_context(rows, n):
    noisy = DecodeGrid(batches=(2, 3, 7), contexts=(10, 100), seconds=tuple(map(tuple, rows)))
    table = replace(TABLE, decode={1: noisy})
    steps = [table.decode_s(1, n, context) for context in (0, 1, 1000, 1e6)]
    assert steps[0] >= 0
    assert steps == sorted(steps)
    beyond = table.decode_s(1, 7, 0)
    assert table.decode_s(1, 7 + n, 0) >= beyond


def test_the_planners_arrays_are_the_same_costs():
    base_s, context_s = TABLE.arrays(2, 20)
    assert len(base_s) == len(context_s) == 21
    assert base_s[0] == context_s[0] == 0
    for n in range(1, 21):
        assert base_s[n] + context_s[n] * 700 == pytest.approx(TABLE.decode_s(2, n, 700))


def test_the_affine_costs_of_a_range_of_batches_are_near_the_table():
    affine = TABLE.affine(2, range(1, 9))
    for n in range(1, 9):
        assert affine.step_s(n, 300) == pytest.approx(TABLE.decode_s(2, n, 300))
    assert affine.per_prompt_token_s == 6e-4


@given(tokens=st.lists(st.integers(0, 2000), min_size=1, max_size=20))
def test_longer_prompts_never_take_less_to_compute(tokens):
    ordered = np.sort(np.array(tokens))
    seconds = TABLE.prefill_s(1, ordered)
    assert (seconds >= 0).all()
    assert (np.diff(seconds) >= -1e-12).all()
    assert TABLE.prefill_s(1, np.array([64, 256, 512])) == pytest.approx([0.128, 0.256, 0.512])


def test_degrees_beyond_the_kv_heads_or_without_prefill_are_unknown():
    more = replace(TABLE, decode={**TABLE.decode, 3: grid(), 4: grid()}, prefill={**TABLE.prefill, 4: TABLE.prefill[1]})
    assert more.degrees == (1, 2)


def test_a_table_fits_its_own_key_only():
    assert TABLE.fits(KEY)
    for name, value in {
        "machine": "m",
        "model": "m",
        "dtype": "bfloat16",
        "communicator": "gloo",
        "threads": 2,
    }.items():
        assert not TABLE.fits(KEY._replace(**{name: value}))


def test_slowdowns_that_were_not_measured_are_unknown():
    assert TABLE.slowdown("decode", "train", on="same") == 1.9
    assert TABLE.slowdown("decode", "train", on="neighbour") is None


# -- files


def test_a_table_survives_its_file(tmp_path):
    save(TABLE, tmp_path / "costs.json")
    assert load(tmp_path / "costs.json") == TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_a_row_of_measurements_is_one_line_of_the_file(tmp_path):
    save(TABLE, tmp_path / "costs.json")
    lines = (tmp_path / "costs.json").read_text().splitlines()
    assert sum('"batches": [1, 2, 4, 8]' in line for line in lines) == 2
    assert len(lines) < 90


def changed(*path: str, to: object) -> dict:
    plain = json.loads(json.dumps(to_plain(TABLE)))
    node = plain
    for key in path[:-1]:
        node = node[key]
    if to is None:
        del node[path[-1]]
    else:
        node[path[-1]] = to
    return plain


@pytest.mark.parametrize(
    ("path", "to", "names"),
    [
        (["cost_table"], 2, "version 2"),
        (["cost_table"], None, "cost_table is missing"),
        (["machine"], "", "machine must be text"),
        (["threads"], 0, "threads must be a whole number"),
        (["threads"], True, "threads must be a whole number"),
        (["detail"], "fine", "detail must be coarse or full"),
        (["surprise"], 1, "surprise is unknown"),
        (["decode"], [], "decode must be an object"),
        (["decode", "1"], None, "decode must have degree 1"),
        (["decode", "two"], {}, "decode.two is no tensor-parallel degree"),
        (["decode", "1", "batches"], [1, 2, 2, 8], "decode.1.batches must have at least two numbers, ascending"),
        (["decode", "1", "contexts"], [64], "decode.1.contexts must have at least two numbers"),
        (["decode", "1", "seconds"], [[1.0] * 3], "decode.1.seconds must have 4 rows"),
        (["decode", "1", "seconds"], [[1.0, 0.0, 1.0]] * 4, "decode.1.seconds.0.1 must be a number above 0"),
        (["decode", "2", "seconds"], [[1.0] * 2] * 4, "decode.2.seconds.0 must have 3 numbers"),
        (["prefill", "2", "seconds_per_token"], [1.0], "prefill.2.seconds_per_token must have 2 numbers"),
        (["switch", "move_byte_s"], -1.0, "switch.move_byte_s must be a number of at least 0"),
        (["switch", "handshake_s"], float("nan"), "switch.handshake_s must be a number"),
        (["same_worker", "decode", "train"], "2", "same_worker.decode.train must be a number above 0"),
    ],
)
def test_what_cannot_be_a_table_is_refused_by_file_and_key(path, to, names):
    with pytest.raises(ConfigError, match=r"^some\.json: ") as error:
        from_plain(changed(*path, to=to), source="some.json")
    assert names in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00\xff"])
def test_a_file_that_holds_no_table_is_refused(tmp_path, text):
    path = tmp_path / "costs.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"costs\.json"):
        load(path)
    with pytest.raises(ConfigError, match=r"none\.json"):
        load(tmp_path / "none.json")


# -- corrections


def span(
    measured_over_predicted: float, *, quanta: int = 100, tp: int = 1, substage: SubStage = SubStage.DECODE
) -> Span:
    batch, context = 4.0, 1000.0
    tokens = 400 if substage == SubStage.DECODE else 64 * quanta
    one_s = TABLE.decode_s(tp, batch, context)
    if substage == SubStage.PREFILL:
        one_s = float(TABLE.prefill_s(tp, np.array(64)))
    if substage == SubStage.TRAIN:
        one_s = 64 * TABLE.train_token_s
    return Span(
        worker=0, pipeline="p", substage=substage, step=0, start=0.0, end=1.0,
        busy_s=quanta * one_s * measured_over_predicted, quanta=quanta, tokens=tokens, batch=batch, context=context,
        tp=tp,
    )  # fmt: skip


def learnt(*spans: Span) -> Corrections:
    corrections = Corrections()
    for one in spans:
        corrections.observe(one, TABLE)
    return corrections


def test_nothing_is_corrected_before_anything_is_measured():
    assert Corrections().apply(TABLE) == TABLE


def test_a_machine_that_is_slower_than_its_table_is_learnt():
    slower = learnt(*[span(1.3)] * 50).apply(TABLE)
    assert slower.decode_s(1, 4, 100) == pytest.approx(1.3 * TABLE.decode_s(1, 4, 100), rel=0.01)


def test_a_table_that_is_wrong_by_far_is_learnt_too():
    assert learnt(*[span(6.0)] * 50).factor(1, SubStage.DECODE) == pytest.approx(6.0, rel=0.15)


def test_a_few_quanta_are_not_believed_fully():
    factor = learnt(span(1.5, quanta=5)).factor(1, SubStage.DECODE)
    assert 1.0 < factor < 1.1


def test_one_long_pause_changes_little():
    factor = learnt(*[span(1.0)] * 20, span(100.0, quanta=1), *[span(1.0)] * 2).factor(1, SubStage.DECODE)
    assert factor == pytest.approx(1.0, abs=0.01)


def test_a_degree_that_was_not_tried_is_as_slow_as_those_that_were():
    corrections = learnt(*[span(1.4)] * 50)
    assert corrections.factor(2, SubStage.DECODE) == pytest.approx(corrections.factor(1, SubStage.DECODE), rel=0.01)


def test_a_group_that_is_slow_says_little_of_a_worker_on_its_own():
    slow_groups = [span(2.0, tp=2)] * 20
    known = learnt(*slow_groups, *[span(1.1, substage=SubStage.TRAIN)] * 20)
    assert known.factor(1, SubStage.DECODE) == pytest.approx(1.1, rel=0.02)
    assert known.factor(2, SubStage.DECODE) == pytest.approx(2.0, rel=0.02)
    assert learnt(*slow_groups).factor(1, SubStage.DECODE) == pytest.approx(2.0, rel=0.1), "nothing else is known"


def test_degrees_and_substages_are_corrected_apart():
    corrections = learnt(*[span(1.2), span(0.8, tp=2), span(2.0, substage=SubStage.PREFILL)] * 40)
    assert corrections.factor(1, SubStage.DECODE) == pytest.approx(1.2, rel=0.02)
    assert corrections.factor(2, SubStage.DECODE) == pytest.approx(0.8, rel=0.02)
    assert corrections.factor(1, SubStage.PREFILL) == pytest.approx(2.0, rel=0.02)


def test_what_changes_again_is_learnt_again():
    assert learnt(*[span(3.0)] * 100, *[span(1.0)] * 200).factor(1, SubStage.DECODE) == pytest.approx(1.0, rel=0.01)


def test_spans_of_which_the_table_says_nothing_are_ignored():
    update = replace(span(9.0), substage=SubStage.REDUCE)
    assert learnt(update, replace(span(9.0), tp=3), replace(span(9.0), busy_s=0.0)).state_dict() == {}


def test_corrections_survive_a_checkpoint():
    corrections, again = learnt(*[span(1.3), span(0.9, tp=2)] * 20), Corrections()
    again.load_state_dict(json.loads(json.dumps(corrections.state_dict())))
    assert again.apply(TABLE) == corrections.apply(TABLE)


def test_costs_and_the_planner_import_neither_torch_nor_ray():
    code = (
        "import sys, longtail.costs.table_file, longtail.costs.corrections;"
        "import longtail.planner.widen, longtail.planner.start, longtail.planner.release;"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
