"""Start-up checks on small real model folders, job files, data and rewards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longtail.core.errors import ConfigError, DataError, RankerError
from longtail.runtime.check import CheckedJobs, check_jobs
from longtail.runtime.jobfile import load_jobs
from longtail.runtime.machine import GIB, Gpu, Machine
from longtail.runtime.memory import BLOCK_TOKENS, PROCESS_BYTES, USABLE, block_bytes

CONTEXT = 64
ROOMY = Machine(cores=4, memory_bytes=64 * GIB, free_bytes=64 * GIB)
CHARACTERS = [chr(c) for c in range(32, 127)]


def save_model(folder: Path, *, end: bool = True, vocab_size: int = 100, **changes) -> Path:
    """A random Llama with one token per character, ``b`` at the start of plain text, and a context of 64."""
    vocab = {token: i for i, token in enumerate(["<b>", "<e>", *CHARACTERS])}
    raw = RawTokenizer(models.WordLevel(vocab, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.post_processor = processors.TemplateProcessing(single="<b> $A", special_tokens=[("<b>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<b>", eos_token="<e>" if end else None)
    config = LlamaConfig(
        **{
            "vocab_size": vocab_size,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": 1 if end else None,
            "bos_token_id": 0,
            **changes,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not end:
        (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def shared_model(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "m")


@pytest.fixture
def folder(tmp_path, monkeypatch, shared_model) -> Path:
    """The folder of the job file, which holds the model ``m``; the working directory is elsewhere."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "m").symlink_to(shared_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "jobs"


def check(folder: Path, text: str, machine: Machine = ROOMY) -> CheckedJobs:
    (folder / "jobs.yaml").write_text(text)
    return check_jobs(load_jobs("jobs/jobs.yaml"), machine=machine)


def one(line: str = "", *, task: str = "collatz", max_tokens: int = 8, top: str = "") -> str:
    """A job file with one pipeline whose line 5 is ``line``; ``top`` adds a line 6 at its top level."""
    text = f"pipelines:\n  p:\n    model: m\n    task: {task}\n    {line}\n{top}\n"
    return text if "rollout" in line else text.replace("task:", f"rollout: {{max_tokens: {max_tokens}}}\n    task:", 1)


def problems(folder: Path, text: str, machine: Machine = ROOMY) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(folder, text, machine)
    return str(caught.value).splitlines()


def rows(folder: Path, *lengths: int, name: str = "rows.jsonl") -> str:
    """A task file whose prompts have these lengths in tokens (the tokenizer adds one); returns its name."""
    text = "".join(json.dumps({"prompt": "a" * (n - 1), "answer": "1"}) + "\n" for n in lengths)
    (folder / name).write_text(text)
    return name


FINAL = "reward: longtail.rl.rewards:final_number"


def test_a_good_job_file_yields_what_a_run_needs(folder):
    checked = check(folder, one())
    assert (checked.workers, checked.threads_per_worker, checked.device, checked.warnings) == (2, 1, "cpu", ())
    pipeline = checked.pipelines["p"]
    assert pipeline.model_folder == folder / "m"
    assert (pipeline.model.layers, pipeline.model.kv_heads) == (2, 2)
    assert pipeline.task.name == "collatz"
    assert pipeline.tokenizer.end_token_ids == (1,)
    assert pipeline.memory.kv == pipeline.memory.kv_wanted == pipeline.kv_blocks * 2 * 2 * 4 * BLOCK_TOKENS * 4
    assert len(list(checked.describe())) == 1


def test_every_problem_of_every_pipeline_is_told_in_the_order_of_the_file(folder):
    text = """\
pipelines:
  a: {model: nowhere, task: colatz}
  b:
    model: m
    task: missing.jsonl
    reward: [nothing:here, nocolon]
  config.yaml: {model: m, task: collatz, rollout: {max_tokens: 8}}
"""
    found = problems(folder, text)
    assert [line.split(": ")[0] + " " + line.split(": ")[1] for line in found] == [
        "jobs/jobs.yaml:2 pipelines.a.model",
        "jobs/jobs.yaml:2 pipelines.a.task",
        "jobs/jobs.yaml:5 pipelines.b.task",
        "jobs/jobs.yaml:6 pipelines.b.reward[0]",
        "jobs/jobs.yaml:6 pipelines.b.reward[1]",
        "jobs/jobs.yaml:7 pipelines.config.yaml",
    ]
    assert "there is no model 'nowhere'" in found[0]
    assert "unknown task 'colatz'; did you mean 'collatz'?" in found[1]
    assert "nothing" in found[3]
    assert all(line[-1] in ".?" for line in found)


def test_an_unsupported_family_and_a_missing_weight_file_are_named(folder, tmp_path):
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    empty = save_model(folder / "empty")
    (empty / "model.safetensors").unlink()
    text = "pipelines:\n  a: {model: gpt2, task: collatz}\n  b: {model: empty, task: collatz}\n"
    found = problems(folder, text)
    assert found[0].startswith("jobs/jobs.yaml:2: pipelines.a.model: ")
    assert "gpt2" in found[0]
    assert found[1].startswith("jobs/jobs.yaml:3: pipelines.b.model: ")
    assert "model.safetensors" in found[1]


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(folder):
    save_model(folder / "small", vocab_size=90)
    assert problems(folder, "pipelines:\n  a: {model: small, task: collatz, rollout: {max_tokens: 8}}\n") == [
        "jobs/jobs.yaml:2: pipelines.a.model = 'small': the tokenizer has 97 tokens, but the model only 90."
    ]


def test_a_model_without_an_end_token_warns_unless_stop_is_set(folder):
    save_model(folder / "endless", end=False)
    text = "pipelines:\n  a: {model: endless, task: collatz, rollout: {max_tokens: 8}}\n"
    assert check(folder, text).warnings == (
        "jobs/jobs.yaml:2: pipelines.a.model = 'endless': the model declares no end token, so every sample runs to "
        "max_tokens; set rollout.stop.",
    )
    assert check(folder, text.replace("8}", "8, stop: [.]}")).warnings == ()


def test_a_chat_format_needs_a_template(folder):
    assert problems(folder, one("rollout: {prompt_format: chat, max_tokens: 8}")) == [
        "jobs/jobs.yaml:5: pipelines.p.rollout.prompt_format = 'chat': the model's tokenizer has no chat template; "
        "use plain or auto."
    ]


def test_a_task_without_a_reward_needs_one_whose_columns_it_has(folder):
    task = rows(folder, 10)
    assert problems(folder, one(task=task)) == [
        "jobs/jobs.yaml:5: pipelines.p.task = 'rows.jsonl': the task has no reward of its own; name a function "
        "with the "
        "key 'reward', as module:function."
    ]
    assert check(folder, one(FINAL, task=task)).pipelines["p"].task.size == 1
    (folder / "mine.py").write_text("def judge(prompts, completions, solution): return [0.0] * len(prompts)\n")
    (found,) = problems(folder, one("reward: mine:judge", task=task))
    assert found == (
        "jobs/jobs.yaml:6: pipelines.p.reward: reward mine:judge needs a column 'solution', but the task has answer."
    )


def test_greedy_and_cut_sampling_and_small_micro_batches_warn(folder):
    text = one("rollout: {temperature: 0, top_k: 5, top_p: 0.9, max_tokens: 8}").replace(
        "task:", "train: {micro_tokens: 4}\n    task:"
    )
    found = [warning.partition(": pipelines.p.")[2] for warning in check(folder, text).warnings]
    assert found[:3] == [
        "rollout.temperature = 0: greedy samples of a prompt are all alike, so their rewards do not differ and nothing "
        "is learned.",
        "rollout.top_k = 5: samples come from a cut distribution, but losses use the log-probabilities of the "
        "full one.",
        "rollout.top_p = 0.9: samples come from a cut distribution, but losses use the log-probabilities of the "
        "full one.",
    ]
    assert found[3].startswith("train.micro_tokens = 4: a sequence may have 20 tokens")


# Prompt lengths (a context of 64 tokens)


def test_an_answer_must_leave_room_for_a_prompt(folder):
    assert problems(folder, one("rollout: {max_tokens: 64}")) == [
        "jobs/jobs.yaml:5: pipelines.p.rollout.max_tokens = 64: must be below the model's context of 64 tokens, which "
        "also holds the prompt."
    ]


def test_prompt_and_answer_may_fill_the_context_exactly(folder):
    checked = check(folder, one(FINAL, task=rows(folder, 10, 56)))
    assert checked.pipelines["p"].longest_prompt == 56
    assert checked.pipelines["p"].task.size == 2


def test_rows_that_are_too_long_are_named_with_their_lengths(folder):
    assert problems(folder, one(FINAL, task=rows(folder, 10, 57, 20, 1500))) == [
        "jobs/jobs.yaml:4: pipelines.p.rollout.max_tokens: row 2 (57 tokens) and row 4 (1,500 tokens) of "
        "rows.jsonl and "
        "max_tokens = 8 are more than the context of 64 tokens; set long_prompts to skip."
    ]
    (found,) = problems(folder, one(FINAL, task=rows(folder, 10, 57)))
    assert found.endswith("lower max_tokens to 7, or set long_prompts to skip.")


def test_many_long_rows_are_counted(folder):
    (found,) = problems(folder, one(FINAL, task=rows(folder, 10, *[60] * 9)))
    assert "row 5 (60 tokens), row 6 (60 tokens) and 4 more of rows.jsonl" in found


def test_skipped_rows_are_counted_and_never_asked_for(folder):
    task = rows(folder, 57, 10, 1500, 20, 56)
    checked = check(folder, one(f"{FINAL}\n    rollout: {{max_tokens: 8, long_prompts: skip}}", task=task))
    pipeline = checked.pipelines["p"]
    assert [len(pipeline.task.example(i).prompt) + 1 for i in range(pipeline.task.size)] == [10, 20, 56]
    assert checked.warnings == (
        "jobs/jobs.yaml:6: pipelines.p.rollout.max_tokens: row 1 (57 tokens) and row 3 (1,500 tokens) of "
        "rows.jsonl and "
        "max_tokens = 8 are more than the context of 64 tokens: 2 of 5 prompts are skipped.",
    )


def test_if_all_rows_are_too_long_even_skip_is_an_error(folder):
    text = one(f"{FINAL}\n    rollout: {{max_tokens: 8, long_prompts: skip}}", task=rows(folder, 100, 57))
    assert problems(folder, text) == [
        "jobs/jobs.yaml:6: pipelines.p.rollout.max_tokens: the context of 64 tokens holds no prompt with "
        "max_tokens = 8 "
        "beside it: even the shortest prompt of rows.jsonl has 57 tokens."
    ]


def test_a_row_without_tokens_is_named(folder):
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "", "answer": "1"}\n')
    (found,) = problems(folder, one(FINAL, task="rows.jsonl"))
    assert "rows.jsonl:2" in found
    assert "empty" in found


def test_a_small_kv_cache_limits_prompts_like_the_context_does(folder):
    block = 2 * 2 * 4 * BLOCK_TOKENS * 4  # keys and values, layers, head size, positions, bytes
    kv_gib = (2 * 2 * block + block) / GIB  # two blocks for each of the two KV heads, and a bit
    text = one(f"{FINAL}\n    rollout: {{max_tokens: 8, kv_gib: {kv_gib}}}", task=rows(folder, 10, 24))
    assert check(folder, text).pipelines["p"].kv_blocks == 5
    (found,) = problems(folder, text.replace("rows.jsonl", rows(folder, 10, 25, name="more.jsonl")))
    assert found.startswith(
        "jobs/jobs.yaml:6: pipelines.p.rollout.kv_gib: row 2 (25 tokens) of more.jsonl and max_tokens"
    )
    assert "(32 tokens)" in found


def test_examples_of_an_endless_task_that_are_too_long_are_drawn_again(folder):
    task = "reverse-text\n    task_args: {max_words: 20}"
    assert "example" in problems(folder, one(task=task))[0]
    checked = check(folder, one("rollout: {max_tokens: 8, long_prompts: skip}", task=task))
    found = checked.pipelines["p"].task
    prompts = [found.example(i).prompt for i in range(200)]
    assert found.size is None
    assert max(map(len, prompts)) + 1 <= 56
    assert prompts == [found.example(i).prompt for i in range(200)]
    assert len(set(prompts)) > 150


def test_an_endless_task_of_long_prompts_alone_gives_up_with_a_sentence(folder):
    checked = check(folder, one("rollout: {max_tokens: 8, long_prompts: skip}", task="reverse-text"))
    task = checked.pipelines["p"].task
    with pytest.raises(DataError, match="in a row have prompts of more than 3 tokens"):
        type(task)(task.task, task.encode, 3).example(0)


# Workers


def test_more_workers_than_cores_warn_and_far_more_are_refused(folder):
    machine = Machine(cores=2, memory_bytes=64 * GIB, free_bytes=64 * GIB)
    assert check(folder, one(top="workers: 3"), machine).warnings == (
        "jobs/jobs.yaml:7: workers: 3 workers x 1 thread share 2 CPU cores, so they slow each other down.",
    )
    assert problems(folder, one(top="workers: 64"), machine) == [
        "jobs/jobs.yaml:7: workers = 64: this machine has 2 CPU cores, so at most 8 workers make sense; use fewer, or "
        "join a cluster with ray."
    ]
    assert check(folder, one(), machine).workers == 2


def test_each_worker_needs_a_visible_gpu(folder):
    gpus = tuple(Gpu(i, f"GPU-{i}", "H100", 80 * GIB, 79 * GIB) for i in range(2))
    machine = Machine(cores=64, memory_bytes=64 * GIB, free_bytes=64 * GIB, gpus=gpus)
    checked = check(folder, one(), machine)
    assert (checked.workers, checked.device) == (2, "cuda")
    assert problems(folder, one(top="workers: 3"), machine) == [
        "jobs/jobs.yaml:7: workers = 3: this machine has 2 visible GPUs, and each worker needs one."
    ]


def test_hidden_gpus_are_mentioned(folder):
    machine = Machine(4, 64 * GIB, 64 * GIB, hidden_gpus="CUDA_VISIBLE_DEVICES=''")
    assert "CUDA_VISIBLE_DEVICES='' hides this machine's GPUs" in check(folder, one(), machine).warnings[0]


def test_a_cluster_needs_a_number_of_workers_and_its_memory_is_not_checked(folder):
    assert problems(folder, one(top="ray: auto")) == [
        "jobs/jobs.yaml:7: ray = 'auto': say how many workers of the cluster to use, with the key 'workers'."
    ]
    tiny = Machine(1, GIB, 0)
    checked = check(folder, one(top="ray: auto\nworkers: 100"), tiny)
    assert checked.workers == 100
    assert "not checked" in checked.warnings[0]


# Memory


def test_what_does_not_fit_is_refused_with_the_sum(folder):
    (found,) = problems(folder, one(), Machine(4, GIB, 2 * (PROCESS_BYTES + (2 << 20))))
    assert found.startswith(
        "jobs/jobs.yaml:2: pipelines.p: does not fit: weights 1 MiB + gradients 1 MiB + optimizer 1 MiB + KV 1 MiB + "
        "training "
    )
    assert " on each of 2 workers, 2 MiB free. Lower rollout.max_tokens" in found


def test_the_kv_cache_shrinks_before_a_pipeline_is_refused(folder):
    roomy = check(folder, one("algorithm: {group_size: 64}")).pipelines["p"]
    config, rollout = roomy.model, load_jobs("jobs/jobs.yaml").jobs.pipelines["p"]
    fixed = roomy.memory.resident + roomy.memory.peak
    free = int((fixed + roomy.memory.kv_wanted // 2) / USABLE) + PROCESS_BYTES
    checked = check(folder, one("algorithm: {group_size: 64}"), Machine(4, 2 * free, 2 * free))
    tight = checked.pipelines["p"]
    assert roomy.memory.kv_least <= tight.memory.kv < roomy.memory.kv
    assert tight.kv_blocks == tight.memory.kv // block_bytes(config, rollout)
    assert "sequences may be preempted and recomputed: slower, same tokens" in checked.warnings[0]


def test_an_order_that_cannot_be_is_told_at_its_line(folder):
    assert problems(folder, one("rollout: {max_tokens: 8, order: oracle}")) == [
        "jobs/jobs.yaml:5: pipelines.p.rollout.order = 'oracle': the true lengths are known only in fixed-length mode; "
        "name the column of the task's data that holds them in forced_lengths, or use ranked."
    ]
    (found,) = problems(folder, one("rollout: {max_tokens: 8, order: oracle, forced_lengths: tokens}"))
    assert found.startswith("jobs/jobs.yaml:5: pipelines.p.rollout.forced_lengths = 'tokens': the task's data have no")
    (found,) = problems(folder, one("rollout: {max_tokens: 8, ranker: nowhere}"))
    assert found.startswith("jobs/jobs.yaml:5: pipelines.p.rollout.ranker = 'nowhere': ")
    (warning,) = check(folder, one("rollout: {max_tokens: 8, order: fifo, ranker: mine}")).warnings
    assert warning == "jobs/jobs.yaml:5: pipelines.p.rollout.ranker = 'mine': it is not used with order = 'fifo'."


def test_a_built_in_ranker_that_is_damaged_is_only_a_warning(folder, monkeypatch):
    def damaged(path=None):
        raise RankerError("ranker.json is damaged")

    monkeypatch.setattr("longtail.lengths.ranker.Ranker.load", damaged)
    checked = check(folder, one())
    assert checked.pipelines["p"].ranker is None
    assert checked.warnings == (
        "jobs/jobs.yaml:4: pipelines.p.rollout.order: the built-in ranker cannot be used, so only earlier steps tell "
        "how long answers are: ranker.json is damaged.",
    )
