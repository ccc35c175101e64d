from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.reference import reference_logits, save_hf_model, tiny_config, tiny_hf_config
from longtail.core.errors import CheckpointError, ModelError
from longtail.engine.checkpoint import (
    check_model,
    count_parameters,
    export_model,
    load_model,
    load_weights,
    read_config,
)
from longtail.engine.config import parse_hf_config
from longtail.engine.random import random_model

HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"
TOKENS = list(range(20))


def edit_tensors(folder: Path, edit) -> None:
    """Rewrite the single weight file of a folder after ``edit(tensors)`` changed the dict in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def hf_logits(folder: Path, dtype=torch.float32) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model(torch.tensor([TOKENS])).logits[0]


def our_logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return reference_logits(load_model(folder, dtype=torch.float32), TOKENS)


def same_parameters(a, b) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(name == other and torch.equal(p, q) for (name, p), (other, q) in pairs)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A 3-shard checkpoint with an index, of an untied model with large biases."""
    hf = tiny_hf_config("qwen2", tie_word_embeddings=False)
    save_hf_model(tmp_path / "model", hf, max_shard_size="85KB")
    assert len(list((tmp_path / "model").glob("model-*-of-00003.safetensors"))) == 3
    return tmp_path / "model"


class TestRoundTrip:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
    def test_load_and_export_gives_transformers_the_same_bits(self, family, dtype, tmp_path):
        from transformers import AutoModelForCausalLM

        hf = tiny_hf_config(family, **({"attention_bias": True, "mlp_bias": True} if family == "llama" else {}))
        original = save_hf_model(tmp_path / "a", hf, dtype=dtype)
        model = load_model(tmp_path / "a", dtype=dtype)
        export_model(model, tmp_path / "b", source=tmp_path / "a")
        again, report = AutoModelForCausalLM.from_pretrained(tmp_path / "b", output_loading_info=True)
        assert not any(report.values())
        assert again.dtype == dtype
        for (name, tensor), (other, exported) in zip(
            original.state_dict().items(), again.state_dict().items(), strict=True
        ):
            assert name == other
            assert torch.equal(tensor, exported)
        assert json.loads((tmp_path / "b/config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        assert same_parameters(model, load_model(tmp_path / "b", dtype=dtype))

    def test_sharded_export_stays_within_the_limit_and_loads_in_both(self, sharded, tmp_path):
        model = load_model(sharded, dtype=torch.float32)
        export_model(model, tmp_path / "out", source=sharded, max_shard_bytes=40_000)
        files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
        assert len(files) > 3
        assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
        index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
        sizes = {name: load_file(tmp_path / "out" / name) for name in files}
        for tensors in sizes.values():
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40_000
        assert index["metadata"]["total_size"] == 4 * count_parameters(model.config)
        assert index["weight_map"] == {name: file for file, tensors in sizes.items() for name in tensors}
        assert same_parameters(model, load_model(tmp_path / "out", dtype=torch.float32))
        torch.testing.assert_close(hf_logits(tmp_path / "out"), our_logits(tmp_path / "out"), atol=1e-4, rtol=0)

    @pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision_files_load_into_the_type_that_is_asked_for(self, stored, tmp_path):
        original = save_hf_model(tmp_path, tiny_hf_config(), dtype=stored)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model = load_model(tmp_path, dtype=dtype)
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert torch.equal(model.embed, original.model.embed_tokens.weight.to(dtype))

    def test_weights_replaced_in_place_keep_their_storage(self, tmp_path):
        model, other = (random_model(tiny_config("qwen3"), seed=seed) for seed in (1, 2))
        (tmp_path / "source").mkdir()
        export_model(other, tmp_path / "model", source=tmp_path / "source")
        places = [p.data_ptr() for p in model.parameters()]
        load_weights(model, tmp_path / "model")
        assert places == [p.data_ptr() for p in model.parameters()]
        assert same_parameters(model, other)
        assert model.head is model.embed

    def test_weights_of_another_architecture_are_refused(self, tmp_path):
        (tmp_path / "source").mkdir()
        export_model(random_model(tiny_config(), seed=0), tmp_path / "model", source=tmp_path / "source")
        scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
        model = random_model(tiny_config(rope_parameters=scaled), seed=0)
        with pytest.raises(ModelError, match="another architecture: its rope_parameters"):
            load_weights(model, tmp_path / "model")

    def test_tokenizer_and_generation_files_come_along_and_weights_do_not(self, tmp_path):
        source = tmp_path / "source"
        save_hf_model(source, tiny_hf_config())
        names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt", "tokenizer.model"]
        for name in names:
            (source / name).write_text(name)
        (source / "optimizer.bin").write_text("no")
        (source / "README.md").write_text("no")
        source.chmod(0o555)
        export_model(load_model(source, dtype=torch.float32), tmp_path / "out", source=source)
        kept = {"config.json", "generation_config.json", "model.safetensors", *names}
        assert {path.name for path in (tmp_path / "out").iterdir()} == kept
        assert (tmp_path / "out/merges.txt").read_text() == "merges.txt"

    def test_parameters_are_counted_without_the_model(self):
        for changes in ({}, {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}):
            config = tiny_config(**changes)
            assert count_parameters(config) == sum(p.numel() for p in random_model(config, seed=0).parameters())
        seventy_billion = tiny_config(
            hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        )  # fmt: skip
        assert count_parameters(seventy_billion) == 70_553_706_496

    def test_a_full_disk_is_a_checkpoint_error_that_names_the_file(self, tmp_path):
        if not os.path.exists("/dev/full"):
            pytest.skip("needs /dev/full")
        (tmp_path / "out").mkdir()
        (tmp_path / "out/model.safetensors").symlink_to("/dev/full")
        with pytest.raises(CheckpointError, match=r"model\.safetensors: No space left"):
            export_model(random_model(tiny_config(), seed=0), tmp_path / "out", source=tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
class TestTiedAndUntiedHeads:
    def save(self, folder: Path, family: str, *, tied: bool) -> None:
        save_hf_model(folder, tiny_hf_config(family, tie_word_embeddings=tied))

    def test_tied_without_a_head_tensor(self, family, tmp_path):
        self.save(tmp_path, family, tied=True)
        model = load_model(tmp_path, dtype=torch.float32)
        assert model.head is model.embed
        torch.testing.assert_close(our_logits(tmp_path), hf_logits(tmp_path), atol=1e-4, rtol=0)

    def test_tied_with_an_equal_copy(self, family, tmp_path, caplog):
        self.save(tmp_path, family, tied=True)
        edit_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED].clone()}))
        assert load_model(tmp_path, dtype=torch.float32).config.tied
        assert not caplog.records
        torch.testing.assert_close(our_logits(tmp_path), hf_logits(tmp_path), atol=1e-4, rtol=0)

    def test_tied_with_a_different_copy_is_used_untied_as_transformers_does(self, family, tmp_path, caplog):
        self.save(tmp_path, family, tied=True)
        edit_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBED] * 2 + 1}))
        model = load_model(tmp_path, dtype=torch.float32)
        assert "they are used untied" in caplog.text
        assert not model.config.tied
        torch.testing.assert_close(our_logits(tmp_path), hf_logits(tmp_path), atol=1e-4, rtol=0)
        export_model(model, tmp_path / "out", source=tmp_path)
        assert not read_config(tmp_path / "out").tied
        torch.testing.assert_close(hf_logits(tmp_path / "out"), hf_logits(tmp_path), atol=1e-4, rtol=0)

    def test_tied_with_only_the_head_tensor(self, family, tmp_path):
        self.save(tmp_path, family, tied=True)
        edit_tensors(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBED)}))
        torch.testing.assert_close(our_logits(tmp_path), hf_logits(tmp_path), atol=1e-4, rtol=0)

    def test_untied_with_its_own_head(self, family, tmp_path):
        self.save(tmp_path, family, tied=False)
        assert load_model(tmp_path, dtype=torch.float32).head.data_ptr() != 0
        torch.testing.assert_close(our_logits(tmp_path), hf_logits(tmp_path), atol=1e-4, rtol=0)

    def test_untied_without_a_head_is_an_error_that_names_the_tensor(self, family, tmp_path):
        self.save(tmp_path, family, tied=False)
        edit_tensors(tmp_path, lambda tensors: tensors.pop(HEAD))
        with pytest.raises(ModelError, match=r"lack lm_head\.weight, although config\.json says"):
            load_model(tmp_path, dtype=torch.float32)

    @pytest.mark.parametrize("tied", [True, False])
    def test_training_keeps_the_tie_and_exports_what_transformers_loads(self, family, tied, tmp_path):
        self.save(tmp_path, family, tied=tied)
        model = load_model(tmp_path, dtype=torch.float32)
        before = reference_logits(model, TOKENS).detach()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            reference_logits(model, TOKENS).log_softmax(-1)[:, 5].sum().neg().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (model.head is model.embed) == tied
        after = reference_logits(model, TOKENS).detach()
        assert (after - before).abs().max() > 0.1
        export_model(model, tmp_path / "out", source=tmp_path)
        assert (HEAD in load_file(tmp_path / "out/model.safetensors")) == (not tied)
        torch.testing.assert_close(hf_logits(tmp_path / "out"), after, atol=1e-4, rtol=0)


class TestIncompleteAndClutteredFolders:
    def shard(self, folder: Path, i: int = 2) -> Path:
        return folder / f"model-0000{i}-of-00003.safetensors"

    def fails(self, folder: Path, match: str) -> None:
        """Both the full load and the cheap check refuse the folder."""
        for load in (lambda: load_model(folder, dtype=torch.float32), lambda: check_model(folder)):
            with pytest.raises(ModelError, match=match):
                load()

    def test_a_missing_shard_is_named(self, sharded):
        self.shard(sharded).unlink()
        self.fails(sharded, r"lacks model-00002-of-00003\.safetensors, named by model\.safetensors\.index\.json")

    @pytest.mark.parametrize("keep", [0.5, 0.001, 0])
    def test_a_shard_that_was_cut_short_is_named(self, sharded, keep):
        path = self.shard(sharded)
        os.truncate(path, int(path.stat().st_size * keep))
        self.fails(sharded, r"model-00002-of-00003\.safetensors is damaged or cut short")

    def test_only_indexed_files_are_read(self, sharded, caplog):
        before = our_logits(sharded)
        stray = {name: tensor * 3 for path in sharded.glob("model-*") for name, tensor in load_file(path).items()}
        save_file(stray, sharded / "model.safetensors", metadata={"format": "pt"})
        assert torch.equal(our_logits(sharded), before)
        assert "model.safetensors is ignored" in caplog.text

    def test_complete_shards_load_without_an_index(self, sharded):
        before = our_logits(sharded)
        (sharded / "model.safetensors.index.json").unlink()
        assert torch.equal(our_logits(sharded), before)

    def test_incomplete_shards_without_an_index_are_an_error(self, sharded):
        (sharded / "model.safetensors.index.json").unlink()
        self.shard(sharded, 3).unlink()
        self.fails(sharded, r"lacks model-00003-of-00003\.safetensors: download")

    def test_shards_of_two_models_without_an_index_are_an_error(self, sharded):
        (sharded / "model.safetensors.index.json").unlink()
        shutil.copy(self.shard(sharded, 1), sharded / "model-00001-of-00002.safetensors")
        self.fails(sharded, "shards of several models")

    def test_an_index_that_names_files_which_are_gone_is_an_error_that_names_them(self, sharded):
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"] |= {f"old.{i}": f"model-0000{i}-of-00006.safetensors" for i in (4, 5, 6)}
        path.write_text(json.dumps(index))
        self.fails(sharded, r"lacks model-00004-of-00006.*model-00005-of-00006.*model-00006-of-00006")

    def test_an_index_that_points_to_the_wrong_shard_is_an_error(self, sharded):
        path = sharded / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"]["model.norm.weight"] = self.shard(sharded, 1).name
        path.write_text(json.dumps(index))
        self.fails(sharded, r"says that model-00001-of-00003\.safetensors holds model\.norm\.weight, but it does not")

    def test_an_index_cannot_point_outside_the_folder(self, sharded):
        path = sharded / "model.safetensors.index.json"
        path.write_text(json.dumps({"weight_map": {EMBED: "../model-00001-of-00003.safetensors"}}))
        self.fails(sharded, "not in this folder")

    def test_a_tensor_of_a_wrong_shape_is_named(self, tmp_path):
        save_hf_model(tmp_path, tiny_hf_config())
        name = "model.layers.1.self_attn.k_proj.weight"
        edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name][:12].clone()}))
        self.fails(tmp_path, r"layers\.1\.self_attn\.k_proj\.weight has shape \[12, 48\].*wants \[24, 48\]")

    def test_a_missing_tensor_is_named_so_no_parameter_stays_at_its_initial_value(self, tmp_path):
        save_hf_model(tmp_path, tiny_hf_config("qwen2"))
        edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.0.self_attn.v_proj.bias"))
        self.fails(tmp_path, r"lack model\.layers\.0\.self_attn\.v_proj\.bias")

    def test_an_unused_tensor_is_a_warning(self, tmp_path, caplog):
        save_hf_model(tmp_path, tiny_hf_config())
        old_buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
        edit_tensors(tmp_path, lambda tensors: tensors.update({"value.bias": torch.ones(2), old_buffer: torch.ones(6)}))
        check_model(tmp_path)
        assert "1 tensors are not used: value.bias" in caplog.text

    def test_integer_weights_are_refused(self, tmp_path):
        save_hf_model(tmp_path, tiny_hf_config())
        edit_tensors(tmp_path, lambda tensors: tensors.update({EMBED: tensors[EMBED].to(torch.int8)}))
        self.fails(tmp_path, r"embed_tokens\.weight is of type I8")

    def test_pickled_weights_are_refused_with_the_way_out(self, tmp_path):
        hf_model = save_hf_model(tmp_path, tiny_hf_config())
        (tmp_path / "model.safetensors").unlink()
        torch.save(hf_model.state_dict(), tmp_path / "pytorch_model.bin")
        self.fails(tmp_path, r"pytorch_model\.bin, and Longtail reads safetensors only.*save_pretrained")

    def test_folders_that_are_no_models_are_named(self, tmp_path):
        self.fails(tmp_path / "absent", "there is no model folder")
        self.fails(tmp_path, r"it has no config\.json")
        (tmp_path / "config.json").write_text("{")
        self.fails(tmp_path, r"config\.json is not valid JSON")
        (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
        self.fails(tmp_path, "holds no weights")


class TestReadOnlyAndLinkedFolders:
    def test_a_read_only_folder_on_an_odd_path_loads_and_stays_as_it_is(self, tmp_path):
        folder = tmp_path / "my models ü" / "東京"
        save_hf_model(folder, tiny_hf_config())
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        for path in folder.iterdir():
            path.chmod(0o444)
        folder.chmod(0o555)
        try:
            our_logits(folder)
            assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
        finally:
            folder.chmod(0o755)

    def test_a_hub_cache_snapshot_of_links_loads(self, tmp_path):
        save_hf_model(tmp_path / "blobs", tiny_hf_config())
        snapshot = tmp_path / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        for i, path in enumerate(sorted((tmp_path / "blobs").iterdir())):
            blob = path.rename(path.with_name(f"{i:040x}"))
            (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
        model = load_model(snapshot, dtype=torch.float32)
        export_model(model, tmp_path / "out", source=snapshot)
        assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_a_dangling_link_is_named_with_its_target(self, name, tmp_path):
        save_hf_model(tmp_path, tiny_hf_config())
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("../blobs/gone")
        with pytest.raises(ModelError, match=f"{name} is a link to ../blobs/gone, which does not exist"):
            load_model(tmp_path, dtype=torch.float32)

    def test_two_jobs_load_one_folder_at_once(self, tmp_path):
        save_hf_model(tmp_path, tiny_hf_config())
        models = {}
        threads = [
            threading.Thread(target=lambda i=i: models.update({i: load_model(tmp_path, dtype=torch.float32)}))
            for i in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert same_parameters(models[0], models[1])


REFUSED = {
    "no model_type": ({"model_type": None}, "model_type is missing"),
    "another family": ({"model_type": "mistral"}, "family 'mistral' is not supported; Longtail runs dense decoders"),
    "mixture of experts": ({"model_type": "qwen3_moe"}, "family 'qwen3_moe' is not supported"),
    "encoder": ({"model_type": "bert", "architectures": ["BertModel"]}, "family 'bert' is not supported"),
    "reward model": ({"architectures": ["LlamaForSequenceClassification"]}, "not a causal language model"),
    "quantised": ({"quantization_config": {"quant_method": "awq"}}, r"quantised weights \(awq\)"),
    "activation": ({"hidden_act": "gelu"}, "activation 'gelu'"),
    "dynamic rope": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type 'dynamic'"),
    "longrope": ({"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "RoPE of type 'longrope'"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope without its keys": ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
    "odd head size": ({"head_dim": 15}, "even"),
    "no layers": ({"num_hidden_layers": 0}, "layers = 0 must be at least 1"),
    "text for a number": ({"hidden_size": "48"}, "hidden_size"),
}


class TestConfigs:
    @pytest.mark.parametrize(("changes", "match"), REFUSED.values(), ids=REFUSED)
    def test_what_is_not_supported_is_refused_by_name_and_file(self, changes, match):
        with pytest.raises(ModelError, match=rf"^models/x/config\.json: .*{match}"):
            parse_hf_config(tiny_hf_config(**changes), where="models/x/config.json")

    def test_sliding_windows_are_refused_only_where_they_take_effect(self):
        window = {"use_sliding_window": True, "sliding_window": 64}
        with pytest.raises(ModelError, match="sliding-window"):
            tiny_config("qwen2", **window, max_window_layers=1)
        with pytest.raises(ModelError, match="sliding-window"):
            tiny_config("qwen3", layer_types=["full_attention", "sliding_attention"], **window)
        tiny_config("qwen2", **window, max_window_layers=2)
        tiny_config("qwen2", use_sliding_window=False, sliding_window=64, max_window_layers=0)

    def test_values_that_config_json_omits_are_those_of_transformers(self):
        hf = tiny_hf_config("qwen3")
        for key in ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_parameters", "tie_word_embeddings"):
            del hf[key]
        with pytest.raises(ModelError, match="4 attention heads cannot share 32 KV heads"):
            parse_hf_config(hf, where="x")
        config = parse_hf_config(hf | {"num_key_value_heads": None}, where="x")
        assert (config.head_dim, config.kv_heads, config.tied) == (128, 4, False)
        assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}

    def test_reading_a_config_changes_nothing_in_it(self):
        hf = tiny_hf_config(rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
        before = json.dumps(hf)
        config = parse_hf_config(hf, where="x")
        random_model(config, seed=0)
        assert json.dumps(hf) == before
        assert config.rope_parameters["rope_theta"] == 5e5


def test_random_models_are_equal_in_every_type_and_differ_by_seed():
    config = tiny_config("qwen2")
    model = random_model(config, seed=1)
    assert same_parameters(model.to(torch.float64), random_model(config, seed=1, dtype=torch.float64))
    assert not same_parameters(model, random_model(config, seed=2, dtype=torch.float64))
    assert model.layers[0].qkv_bias.abs().min() > 0
