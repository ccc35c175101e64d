"""Jobs come and go: admission, names, resuming, stopping, and what a run folder remembers."""

from __future__ import annotations

import json
import threading

import pytest

from jobs.fake_controller import bench, job
from longtail.core.errors import CapacityError, ConfigError
from longtail.jobs.service import NoSuchJob, NotNow
from longtail.jobs.wire import Submission
from longtail.runtime.jobfile import load_jobs


def submit(b, text: str, **options):
    return b.service.submit(Submission(text=text, file="job.yaml", **options))


def save(b, name: str, step: int) -> None:
    """A whole checkpoint, as far as anybody looks at it before a start."""
    folder = b.folder / name / f"step-{step:06d}"
    folder.mkdir(parents=True)
    (folder / "marker").touch()


@pytest.fixture
def saved(monkeypatch):
    """The checkpoints are the folders there are."""
    from longtail.jobs import service
    from longtail.rl.checkpoint import Found

    def latest(folder):
        found = sorted(folder.glob("step-*")) if folder.is_dir() else []
        return (
            Found(path=found[-1], step=int(found[-1].name[5:]), state={}, skipped=())
            if found
            else Found(None, 0, {}, ())
        )

    monkeypatch.setattr(service, "latest", latest)


def test_a_job_is_admitted_runs_and_ends(tmp_path):
    b = bench(tmp_path)
    admitted = submit(b, job("a"))
    assert [j.state for j in admitted.jobs] == ["waiting"]
    assert [p.name for p in b.controller.plans] == ["a"]
    assert list(b.ledger.granted) == ["a"]
    b.controller.begin("a")
    b.controller.step("a", 0, reward=0.25)
    now = b.service.job("a")
    assert (now.state, now.stage, now.step, now.steps, now.reward) == ("running", "rollout", 1, 3, 0.25)
    b.controller.end("a")
    over = b.service.job("a")
    assert (over.state, over.step, over.over) == ("finished", 3, True)
    assert b.ledger.granted == {}
    assert over.since >= now.since


def test_several_jobs_of_one_file_are_admitted_together_or_not_at_all(tmp_path):
    b = bench(tmp_path)
    both = job("a") + job("b").removeprefix("pipelines:\n")
    submit(b, both)
    assert [p.name for p in b.controller.plans] == ["a", "b"]
    with pytest.raises(NotNow, match="the name b is in use"):
        submit(b, both.replace("  a:", "  c:"))
    assert [p.name for p in b.controller.plans] == ["a", "b"]
    assert list(b.ledger.granted) == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "job.yaml: the file is empty"),
        ("- a", "job.yaml: the file is not a mapping of keys"),
        ("workers: 2\n" + job("a"), "job.yaml:1: workers: this key belongs to `longtail up`"),
        ("ray: auto\n" + job("a"), "job.yaml:1: ray: this key belongs to `longtail up`"),
        ("reward_processes: 4\n" + job("a"), "job.yaml:1: reward_processes: this key belongs"),
        ("policy: {corun: serial}\n" + job("a"), "job.yaml:1: policy: this key belongs"),
        ("name: x\n" + job("a"), "job.yaml:1: name: this key belongs"),
        ("pipelines: {}\n", "job.yaml:1: pipelines: at least one pipeline is needed"),
        (job("a", "stpes: 3"), "job.yaml:8: pipelines.a: unknown key 'stpes'; did you mean 'steps'?"),
        (job("a", "train: {lr: .nan}"), "job.yaml:8: pipelines.a.train.lr = .nan: must be a finite number."),
        (job("a", "train: {lr: -1}"), "job.yaml:8: pipelines.a.train.lr = -1: must be above 0"),
        (job("a", "steps: 4"), "job.yaml:8: pipelines.a: the key 'steps' appears twice"),
        (job("a").replace("tiny", "tinny"), "job.yaml:3: pipelines.a.model: there is no model 'tinny'"),
        (job("a").replace("reverse-text", "colatz"), "job.yaml:4: pipelines.a.task: unknown task 'colatz'"),
        (job("a").replace("reverse-text", "x.jsonl"), "job.yaml:4: pipelines.a.task: task x.jsonl: cannot read"),
        (job("a/b"), "a/b"),
        (job(".."), "'..'"),
        (job("Ä"), "'Ä'"),
        (job("x" * 300), "folder name"),
        (job("config.yaml"), "this name is taken by a file of the run folder"),
        (job("a", "reward: !!python/object/apply:os.system ['touch /tmp/x']"), "tags such as !!python"),
        (job("a").replace("tiny", "$HOME"), "job.yaml:3: pipelines.a.model = '$HOME': variables are not replaced"),
        (job("a").replace("max_tokens: 8", "max_tokens: 100000"), "job.yaml:6: pipelines.a.rollout.max_tokens"),
    ],
)
def test_what_cannot_work_is_refused_with_file_line_and_key_and_nothing_is_left_of_it(tmp_path, text, says):
    b = bench(tmp_path)
    with pytest.raises(ConfigError) as refused:
        submit(b, text)
    assert says in str(refused.value)
    assert (b.controller.plans, b.ledger.granted, b.service.jobs(), b.loaded) == ([], {}, [], [])
    assert list(b.folder.iterdir()) == []


def test_1e_minus_6_is_a_number_in_all_spellings(tmp_path):
    b = bench(tmp_path)
    for i, spelling in enumerate(("1e-6", "1E-6", '"1.0e-6"', "0.000001")):
        submit(b, job(f"a{i}", f"train: {{lr: {spelling}}}"))
    assert [p.config.train.lr for p in b.controller.plans] == [1e-6] * 4


def test_a_reward_that_cannot_be_loaded_is_told_with_its_line_and_leaves_nothing(tmp_path):
    def load(name):
        raise ConfigError("reward mine:f: there is no module 'mine'")

    b = bench(tmp_path, allow=("mine",), load=load)
    with pytest.raises(
        ConfigError, match=r"^job.yaml:8: pipelines.a.reward: reward mine:f: there is no module 'mine'\.$"
    ):
        submit(b, job("a", "reward: mine:f"))
    assert (b.controller.plans, b.ledger.granted, b.service.jobs()) == ([], {}, [])
    b2 = bench(tmp_path)
    submit(b2, job("a"))  # the name is free


def test_a_name_in_use_is_refused_with_what_it_is_doing(tmp_path):
    b = bench(tmp_path)
    submit(b, job("a"))
    b.controller.begin("a")
    b.controller.step("a", 0)
    with pytest.raises(NotNow, match=r"^the name a is in use \(rollout, step 1 of 3 done\): .*`longtail stop a`\.$"):
        submit(b, job("a"))
    b.controller.end("a")
    submit(b, job("a"))
    assert b.service.job("a").state == "waiting"


def test_the_name_of_a_job_that_is_over_resumes_if_it_is_the_same_experiment(tmp_path, saved):
    b = bench(tmp_path)
    submit(b, job("a"))
    b.controller.end("a")
    save(b, "a", 3)
    again = submit(b, job("a").replace("steps: 3", "steps: 6"))
    assert again.warnings == [
        "pipelines.a.steps was 3 when this run began and is 6 now: the new value holds from the resumed step on."
    ]
    b.controller.end("a")
    with pytest.raises(ConfigError, match=r"pipelines.a.task was 'reverse-text' .* would mix two experiments.*--fresh"):
        submit(b, job("a").replace("reverse-text", "collatz"))
    assert b.ledger.granted == {}


def test_fresh_sets_aside_what_was_there_and_starts_another_experiment(tmp_path, saved):
    b = bench(tmp_path)
    for task in ("reverse-text", "collatz", "scratchpad"):
        submit(b, job("a").replace("reverse-text", task), fresh=True)
        b.controller.end("a")
        save(b, "a", 3)
    assert sorted(p.name for p in b.folder.glob("a*")) == ["a", "a~1", "a~2"]
    assert (b.folder / "a~1" / "step-000003").is_dir()


def test_a_job_that_left_no_checkpoint_may_be_another_experiment_under_its_name(tmp_path):
    b = bench(tmp_path)
    submit(b, job("a"))
    b.controller.end("a", "failed", step=0, error="a: no.")
    submit(b, job("a").replace("reverse-text", "collatz"))


def test_an_error_of_an_earlier_time_is_not_shown_of_a_new_one(tmp_path):
    b = bench(tmp_path)
    submit(b, job("a"))
    b.controller.begin("a")
    b.controller.end("a", "failed", step=1, error="a: the reward is wrong.")
    assert (b.service.job("a").state, b.service.job("a").error) == ("failed", "a: the reward is wrong.")
    submit(b, job("a"))
    assert (b.service.job("a").state, b.service.job("a").error) == ("waiting", None)
    b.controller.begin("a", step=1)
    assert (b.service.job("a").state, b.service.job("a").step) == ("running", 1)


def test_stop_asks_the_controller_once_and_the_others_are_left_alone(tmp_path):
    b = bench(tmp_path)
    submit(b, job("a"))
    submit(b, job("b"))
    b.controller.begin("a")
    b.controller.begin("b")
    assert b.service.stop("a").state == "ending"
    assert b.controller.stopped == ["a"]
    b.controller.end("a", "interrupted", step=1)
    assert b.service.job("a").state == "stopped"
    assert b.service.stop("a").state == "stopped"
    assert b.controller.stopped == ["a"]
    assert b.service.job("b").state == "running"


def test_an_unknown_name_is_told_with_the_nearest(tmp_path):
    b = bench(tmp_path)
    with pytest.raises(NoSuchJob, match=r"^there is no job 'a'\.$"):
        b.service.stop("a")
    submit(b, job("collatz"))
    with pytest.raises(NoSuchJob, match=r"^there is no job 'colatz'; did you mean collatz\?$"):
        b.service.stop("colatz")
    with pytest.raises(NoSuchJob, match=r"there are collatz\."):
        b.service.job("zzz")


def test_two_jobs_submitted_in_the_same_moment_have_the_kv_that_each_has_alone(tmp_path):
    alone = bench(tmp_path / "alone")
    submit(alone, job("a"))
    together = bench(tmp_path / "together")
    start = threading.Barrier(2)

    def one(name):
        start.wait()
        submit(together, job(name))

    threads = [threading.Thread(target=one, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (expected,) = [p.kv_blocks for p in alone.controller.plans]
    assert [p.kv_blocks for p in together.controller.plans] == [expected] * 2


def test_what_does_not_fit_beside_others_is_refused_and_fits_when_they_are_gone(tmp_path):
    b = bench(tmp_path, free_gib=2.0)
    most = "rollout: {prompts: 2, max_tokens: 8, kv_gib: 0.7}"
    big = job("a").replace("rollout: {prompts: 2, max_tokens: 8}", most)
    submit(b, big)
    with pytest.raises(CapacityError, match=r"^b does not fit: weights .* beside a \(.*until another job has ended\.$"):
        submit(b, big.replace("  a:", "  b:"))
    assert [p.name for p in b.controller.plans] == ["a"]
    b.controller.end("a")
    submit(b, big.replace("  a:", "  b:"))


def test_what_does_not_fit_at_all_is_refused_by_the_check(tmp_path):
    b = bench(tmp_path, free_gib=0.51)
    with pytest.raises(ConfigError, match=r"^job.yaml:2: pipelines.a: does not fit: weights"):
        submit(b, job("a"))


def test_jobs_that_were_not_over_go_on_at_the_next_start_and_no_others(tmp_path):
    b = bench(tmp_path)
    for name in ("done", "failed", "stopped", "interrupted", "killed"):
        submit(b, job(name, "seed: 7"))
        b.controller.begin(name)
    b.controller.end("done")
    b.controller.end("failed", "failed", step=1, error="failed: no.")
    b.service.stop("stopped")
    b.controller.end("stopped", "interrupted", step=1)
    b.controller.end("interrupted", "interrupted", step=1)
    kv = {p.name: p.kv_blocks for p in b.controller.plans}

    again = bench(tmp_path)
    assert again.service.resume() == []
    assert {p.name: p.kv_blocks for p in again.controller.plans} == {n: kv[n] for n in ("interrupted", "killed")}
    assert again.controller.plans[0].config == b.controller.plans[0].config
    assert list(load_jobs(b.folder / "config.yaml").jobs.pipelines) == list(kv)


def test_a_job_that_cannot_go_on_is_told_and_tried_again_at_the_next_start(tmp_path):
    b = bench(tmp_path, allow=("mine",))
    submit(b, job("a", "reward: mine:f"))
    submit(b, job("b"))
    without = bench(tmp_path)
    (problem,) = without.service.resume()
    assert problem.startswith("a does not go on: ")
    assert "this code is not allowed here" in problem
    assert [p.name for p in without.controller.plans] == ["b"]
    assert bench(tmp_path, allow=("mine",)).service.resume() == []


def test_a_damaged_list_of_unfinished_jobs_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".jobs.json").write_text("{")
    with pytest.raises(ConfigError, match=r"\.jobs\.json is damaged"):
        bench(tmp_path)


def test_nothing_is_admitted_once_the_run_is_ending(tmp_path):
    b = bench(tmp_path)
    b.service.refuse()
    with pytest.raises(NotNow, match="this run is ending"):
        submit(b, job("a"))
    late = bench(tmp_path)
    late.controller.refusal = "pipeline a comes too late: the run is ending"
    with pytest.raises(NotNow, match="the run is ending"):
        submit(late, job("a"))
    assert late.ledger.granted == {}
    assert json.loads((late.folder / ".jobs.json").read_text()) == {"kv_bytes": {}}


# -- together or not at all


def test_of_several_jobs_that_cannot_be_handed_over_none_runs_and_nothing_is_left(tmp_path, saved):
    b = bench(tmp_path)
    submit(b, job("a"))
    b.controller.begin("a")
    b.controller.end("a", step=2)
    save(b, "a", 2)
    record, status = (b.folder / "config.yaml").read_text(), b.service.job("a")
    b.controller.refusal = "pipeline c comes too late: the run is ending"
    three = "".join(job(name, "seed: 0").removeprefix("pipelines:\n" if i else "") for i, name in enumerate("acd"))
    for fresh in (False, True):
        with pytest.raises(NotNow, match="the run is ending"):
            submit(b, three.replace("seed: 0", "seed: 6") if fresh else three, fresh=fresh)
        assert [p.name for p in b.controller.plans] == ["a"]
        assert b.service.jobs() == [status]
        assert b.ledger.granted == {}
        assert (b.folder / "config.yaml").read_text() == record
        assert json.loads((b.folder / ".jobs.json").read_text()) == {"kv_bytes": {}}
        assert [p.name for p in b.folder.glob("a*")] == ["a"]
    b.controller.refusal = None
    submit(b, three, fresh=True)
    assert sorted(p.name for p in b.folder.glob("a*")) == ["a~1"]


def test_a_run_folder_that_cannot_be_written_is_told_and_changes_nothing(tmp_path, saved, monkeypatch):
    from longtail.jobs import record

    def full(jobs, path):
        raise OSError(28, "No space left on device")

    b = bench(tmp_path)
    save(b, "a", 2)
    monkeypatch.setattr(record, "dump_resolved", full)
    with pytest.raises(CapacityError, match="cannot be written: No space left on device"):
        submit(b, job("a"), fresh=True)
    assert (b.controller.plans, b.ledger.granted, b.service.jobs()) == ([], {}, [])
    assert [p.name for p in b.folder.glob("a*")] == ["a"]


def test_a_job_that_cannot_be_handed_over_still_goes_on_at_the_next_start(tmp_path):
    submit(bench(tmp_path), job("a"))
    ending = bench(tmp_path)
    ending.controller.refusal = "pipeline a comes too late: the run is ending"
    assert ending.service.resume() == ["a does not go on: pipeline a comes too late: the run is ending."]
    late = bench(tmp_path)
    assert late.service.resume() == []
    assert [p.name for p in late.controller.plans] == ["a"]


def test_a_stop_while_a_job_is_handed_over_is_not_lost(tmp_path):
    """The controller would not know the name yet, or stop what had it before."""
    b = bench(tmp_path)
    asked, stopped = threading.Event(), []
    give = b.controller.submit

    def slow(*plans):
        thread = threading.Thread(target=lambda: (asked.set(), stopped.append(b.service.stop("a").state)))
        thread.start()
        asked.wait(120)
        thread.join(0.2)
        assert b.controller.stopped == []
        give(*plans)
        threads.append(thread)

    threads: list[threading.Thread] = []
    b.controller.submit = slow
    submit(b, job("a"))
    threads[0].join(120)
    assert (b.controller.stopped, stopped) == (["a"], ["ending"])


# -- what cannot be known to be harmless


def test_prompts_that_cannot_be_made_within_bounds_are_refused_before_they_are_made_here(tmp_path, monkeypatch):
    from longtail.jobs import service

    def rehearse(job_file, name):
        raise ConfigError("task reverse-text: its prompts are not made after 60 s")

    monkeypatch.setattr(service, "check_jobs", lambda *_, **__: pytest.fail("made here"))
    b = bench(tmp_path, rehearse=rehearse)
    with pytest.raises(
        ConfigError, match=r"^job.yaml:4: pipelines.a.task: task reverse-text: its prompts are not made after 60 s\.$"
    ):
        submit(b, job("a"))
    assert (b.controller.plans, b.ledger.granted, b.service.jobs()) == ([], {}, [])


def test_what_was_loaded_for_a_job_is_let_go_when_it_is_over_or_refused(tmp_path):
    b = bench(tmp_path)
    submit(b, job("a"))
    assert b.forgotten == []
    b.controller.end("a")
    assert b.forgotten == ["a"]
    b.controller.refusal = "no"
    with pytest.raises(NotNow):
        submit(b, job("b"))
    assert b.forgotten == ["a", "b"]


# -- a record of any size


def test_a_run_folder_that_has_had_very_many_jobs_can_be_used_again(tmp_path, monkeypatch):
    from longtail.runtime import jobfile, yamlfile

    monkeypatch.setattr(jobfile, "MAX_BYTES", 4096)
    monkeypatch.setattr(yamlfile, "MAX_NODES", 200)
    monkeypatch.setattr(jobfile.read_text, "__kwdefaults__", {"most_bytes": 4096})
    monkeypatch.setattr(yamlfile.read, "__kwdefaults__", {"most_nodes": 200})
    b = bench(tmp_path)
    for i in range(8):
        submit(b, job(f"a{i}"))
    config = b.folder / "config.yaml"
    assert config.stat().st_size > 4096
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_jobs(config)
    again = bench(tmp_path)
    assert again.service.resume() == []
    assert [p.name for p in again.controller.plans] == [f"a{i}" for i in range(8)]


def test_a_job_as_large_as_a_submission_may_be_can_go_on(tmp_path):
    (tmp_path / "jobs").mkdir(parents=True)
    (tmp_path / "jobs" / "rows.jsonl").write_text('{"prompt": "x"}\n' * 4)
    for name in "ab":
        text = job(name, f'rollout: {{prompts: 2, max_tokens: 8, stop: ["{"x" * 600_000}"]}}').replace(
            "    rollout: {prompts: 2, max_tokens: 8}\n", ""
        )
        submit(bench(tmp_path), text)
    again = bench(tmp_path)
    assert again.service.resume() == []
    assert [len(p.config.rollout.stop[0]) for p in again.controller.plans] == [600_000] * 2
