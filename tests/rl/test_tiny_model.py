"""The built-in tiny model: it loads everywhere, writes characters without loss, and knows the tasks only partly."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from longtail.rl.tasks import BUILT_IN, load_task

FOLDER = Path(str(files("longtail"))) / "data" / "tiny"
ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@settings(deadline=None)
@given(text=ASCII)
def test_text_comes_back_unchanged_with_one_beginning_token_in_front(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids == [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode(ids[1:]) == text
    assert "".join(tokenizer.decode([i]) for i in ids[1:]) == text


def test_characters_it_does_not_know_become_question_marks(tokenizer):
    assert tokenizer.decode(tokenizer("süß 東\t!")["input_ids"], skip_special_tokens=True) == "s?? ??!"


def test_its_shape_is_the_documented_one(model, tokenizer):
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (192, 4, 512)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 32)
    assert config.tie_word_embeddings
    assert config.max_position_embeddings == 1024
    assert config.vocab_size == len(tokenizer) == 99
    assert 1.7e6 < sum(p.numel() for p in model.parameters()) < 1.9e6
    assert model.generation_config.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template is None
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 5e6


@pytest.mark.parametrize("spec", BUILT_IN)
def test_greedy_answers_are_better_than_samples_and_samples_of_a_prompt_differ_in_reward(spec, model, tokenizer):
    """Knowledge that sampling does not yet show is what reinforcement learning raises in few steps."""
    prompts, samples = 8, 8
    task = load_task(spec, {}, seed=77, base=Path())
    examples = [task.example(i) for i in range(prompts)]

    def rewards(repeat, **kwargs):
        asked = [e for e in examples for _ in range(repeat)]
        inputs = tokenizer([e.prompt for e in asked], return_tensors="pt", padding=True)
        out = model.generate(**inputs, max_new_tokens=128, **kwargs)
        texts = tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        columns = {key: [e.columns[key] for e in asked] for key in examples[0].columns}
        return torch.tensor(task.score([e.prompt for e in asked], texts, **columns)).view(prompts, repeat)

    torch.manual_seed(0)
    sampled = rewards(samples, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    greedy = rewards(1, do_sample=False)
    assert 0.15 < sampled.mean() < 0.7
    assert greedy.mean() > sampled.mean() + 0.1
    assert (sampled.std(dim=1) > 0).float().mean() >= 0.75


def test_the_model_card_tells_what_was_measured():
    card = (FOLDER / "README.md").read_text()
    assert "apache-2.0" in card
    for spec in BUILT_IN:
        assert f"| {spec} |" in card
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] == "llama"
