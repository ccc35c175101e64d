"""API keys and their file."""

import pytest

from longtail.core.errors import ConfigError
from longtail.serve.errors import ApiError
from longtail.serve.keys import Keys, entry, new_key


def keys_file(tmp_path, text):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    return path


def test_a_new_key_opens_and_its_file_does_not_hold_it(tmp_path):
    (alice, a), (bob, b) = new_key(), new_key()
    path = keys_file(tmp_path, "keys:\n" + entry("alice", a, 3) + entry("bob", b))
    keys = Keys.load(path)
    assert alice not in path.read_text()
    assert keys.authenticate(f"Bearer {alice}".encode()).name == "alice"
    assert keys.authenticate(f"bearer {alice}".encode()).weight == 3
    assert keys.authenticate(f"Bearer {bob}".encode()).name == "bob"


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer wrong", b"Basic abc", b"\xff\xfe"])
def test_anything_but_a_known_key_is_401(tmp_path, header):
    key, digest = new_key()
    keys = Keys.load(keys_file(tmp_path, "keys:\n" + entry("a", digest)))
    for sent in (header, b"Basic " + key.encode(), key.encode()):
        with pytest.raises(ApiError) as caught:
            keys.authenticate(sent)
        assert caught.value.status == 401
        assert key not in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "list 'keys'"),
        ("keys: []", "list 'keys'"),
        ("keys: {a: 1}", "list 'keys'"),
        ("keys: [", "not a YAML file"),
        ("other: 1", "list 'keys'"),
        (f"keys:\n  - {{name: a, sha256: '{'0' * 64}', wieght: 2}}", "wieght"),
        (f"keys:\n  - {{name: a, sha256: '{'0' * 64}', weight: 0}}", r"keys\[1\].weight"),
        (f"keys:\n  - {{name: 'a b', sha256: '{'0' * 64}'}}", r"keys\[1\].name"),
        ("keys:\n  - {name: a, sha256: abc}", r"keys\[1\].sha256"),
        ("keys:\n  - a", r"keys\[1\]"),
        (
            f"keys:\n  - {{name: a, sha256: '{'0' * 64}'}}\n  - {{name: a, sha256: '{'1' * 64}'}}",
            "two keys have the name",
        ),
        (
            f"keys:\n  - {{name: a, sha256: '{'0' * 64}'}}\n  - {{name: b, sha256: '{'0' * 64}'}}",
            "two keys have the sha",
        ),
    ],
)
def test_a_bad_keys_file_names_the_entry(tmp_path, text, says):
    with pytest.raises(ConfigError, match=says):
        Keys.load(keys_file(tmp_path, text))


def test_a_missing_keys_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: the keys file cannot be read"):
        Keys.load(tmp_path / "none.yaml")


def test_a_key_needs_a_plain_name():
    with pytest.raises(ConfigError, match="key name"):
        entry("a b", "0" * 64)
