"""Cost tables are found by their key, and a file that is of no use is said to be so and left out."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from longtail.core.errors import ConfigError
from longtail.costs.store import file_name, find, save
from longtail.costs.table import CostTable, DecodeGrid, PrefillCosts, SwitchCosts, TableKey

KEY = TableKey(machine="a box, 2 workers", model="llama 1.8M ab", dtype="float32", communicator="shm", threads=1)


def table(**changes) -> CostTable:
    grid = DecodeGrid(batches=(1, 2), contexts=(16, 64), seconds=((0.1, 0.2), (0.15, 0.3)))
    costs = CostTable(
        key=KEY,
        measured="2026-01-01T00:00:00+00:00",
        detail="full",
        kv_heads=2,
        kv_bytes=64,
        decode={1: grid},
        prefill={1: PrefillCosts(chunk_tokens=(16, 64), seconds_per_token=(0.02, 0.01))},
        switch=SwitchCosts(handshake_s=0.001, move_s=0.0, move_byte_s=1e-9),
        train_token_s=0.1,
    )
    return replace(costs, **changes)


def test_what_was_saved_is_found_as_it_was(tmp_path):
    path = save(tmp_path / "new", table())
    assert find(tmp_path / "new", KEY) == (table(), path, ())
    assert [p.name for p in (tmp_path / "new").iterdir()] == [path.name]


def test_a_full_table_is_preferred_to_a_coarse_one_whatever_came_last(tmp_path):
    coarse = table(detail="coarse", train_token_s=None)
    save(tmp_path, coarse)
    assert find(tmp_path, KEY).table == coarse
    save(tmp_path, table())
    save(tmp_path, coarse)
    assert find(tmp_path, KEY).table == table()


@pytest.mark.parametrize("field", KEY._fields)
def test_a_table_of_another_key_is_not_found(tmp_path, field):
    save(tmp_path, table())
    other = KEY._replace(**{field: 2 if field == "threads" else "another"})
    assert find(tmp_path, other) == (None, None, ())


def test_a_folder_that_is_not_there_has_no_tables(tmp_path):
    assert find(tmp_path / "nowhere", KEY) == (None, None, ())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is no JSON"),
        ("[]", "must be an object"),
        ('{"cost_table": 99}', "version 99"),
        (b"\xff\xfe", "is no JSON"),
    ],
)
def test_a_broken_file_is_a_warning_and_the_coarse_table_serves(tmp_path, content, says):
    coarse = table(detail="coarse")
    save(tmp_path, coarse)
    broken = tmp_path / file_name(KEY, "full")
    broken.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = find(tmp_path, KEY)
    assert found.table == coarse
    (warning,) = found.warnings
    assert str(broken) in warning
    assert says in warning


def test_a_file_that_was_renamed_is_a_warning(tmp_path):
    other = KEY._replace(machine="another box")
    path = save(tmp_path, table(key=other))
    path.rename(tmp_path / file_name(KEY, "full"))
    found = find(tmp_path, KEY)
    assert found.table is None
    assert "another box" in found.warnings[0]


def test_a_table_that_cannot_be_written_is_one_sentence_and_leaves_nothing(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path / "file", table())
    (tmp_path / file_name(KEY, "full")).mkdir()
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path, table())
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["file", file_name(KEY, "full")])
    assert find(tmp_path, KEY).table is None


def test_names_are_safe_and_tell_keys_apart():
    strange = KEY._replace(model="../../etc/passwd $(x)")
    names = {file_name(key, detail) for key in (KEY, strange, KEY._replace(threads=2)) for detail in ("full", "coarse")}
    assert len(names) == 6
    assert all("/" not in name and not name.startswith(".") for name in names)


def test_the_file_is_plain_json(tmp_path):
    assert json.loads(save(tmp_path, table()).read_text())["decode"]["1"]["batches"] == [1, 2]
