"""The yardstick of the quality table must itself be right: the float decoder, the shuffle, the quantizers' costs."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from benchmarks import quality
from benchmarks.float_llama import Weights, load, logits
from benchmarks.kv_accuracy import logits_of
from safetensors.numpy import save_file

from shardline.stage import ModelSpec, matrix_shapes, open_checkpoint

HIDDEN, WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 2, 4, 2, 32
PROMPT = [7, 3, 250, 41, 41, 9, 100, 3, 77, 12]


@pytest.fixture(scope="module", params=["tied", "own head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama of random floats, in bfloat16's precision but for its type."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": 256,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": request.param == "tied",
    }
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.12, shape).astype(np.float16)

    tensors = {"model.embed_tokens.weight": matrix(256, HIDDEN)}
    tensors["model.norm.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    if request.param != "tied":
        tensors["lm_head.weight"] = matrix(256, HIDDEN)
    names = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn"}
    names |= {"gate": "mlp", "up": "mlp", "down": "mlp"}
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"q": (queries, HIDDEN), "k": (keys, HIDDEN), "v": (keys, HIDDEN), "o": (HIDDEN, queries)}
    shapes |= {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    for layer in range(LAYERS):
        for role, module in names.items():
            tensors[f"model.layers.{layer}.{module}.{role}_proj.weight"] = matrix(*shapes[role])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> tuple[ModelSpec, Weights]:
    checkpoint = open_checkpoint(folder)
    loaded = checkpoint.spec, load(checkpoint)
    checkpoint.close()
    return loaded


def test_weights_are_the_folders_floats_and_logits_the_engines(folder: Path, model: tuple[ModelSpec, Weights]) -> None:
    spec, weights = model
    checkpoint = open_checkpoint(folder)
    kept = dict(weights)
    for layer in (None, *range(LAYERS)):
        for role in matrix_shapes(spec, layer):
            # Each is near what the engine keeps of it, and so the right one; then the engine's own are put in.
            kept[role, layer] = checkpoint.matrix(role, layer).dequantize()
            assert 0 < np.abs(kept[role, layer] - weights[role, layer]).max() < 0.05, (role, layer)
    kept["head", None] = checkpoint.matrix("head", None).dequantize()
    checkpoint.close()
    (engines,) = logits_of(folder, "float32", [PROMPT])
    ours = logits(spec, kept, PROMPT)
    assert ours.dtype == np.float32
    assert np.abs(ours - engines).max() < 1e-4 * np.abs(engines).max()


def test_a_gguf_files_logits_are_those_kept_of_another_program(smollm2: Path) -> None:
    checkpoint = open_checkpoint(smollm2)
    spec, weights = checkpoint.spec, load(checkpoint)
    checkpoint.close()
    with np.load(Path(__file__).parents[1] / "stage" / "data" / "smollm2_logits.npz") as file:
        token_ids, positions, ids, values = (
            file[f"scripts.{part}"] for part in ("token_ids", "positions", "top_ids", "top_logits")
        )
    found = logits(spec, weights, token_ids.tolist())[positions]
    assert np.abs(np.take_along_axis(found, ids.astype(np.int64), axis=1) - values).max() < 2e-3


def test_a_shuffled_model_is_the_same_in_other_groups(model: tuple[ModelSpec, Weights]) -> None:
    spec, weights = model
    # As a file in Q4_1 has it: a grid of 16 points a group.
    q4_1 = quality.QUANTIZERS["Q4_1"]
    onto_grids, _ = quality.with_quantized(spec, weights, q4_1)
    _, cost = quality.with_quantized(spec, onto_grids, q4_1)
    assert cost["weight_error"] < 0.005, "Q4_1 gives back what it made"
    other = quality.shuffled(spec, onto_grids, seed=3)
    for key, matrix in other.items():
        assert matrix.shape == onto_grids[key].shape
        assert np.array_equal(np.sort(matrix, axis=None), np.sort(onto_grids[key], axis=None))
    close = np.abs(logits(spec, other, PROMPT) - logits(spec, onto_grids, PROMPT)).max()
    assert close < 1e-4 * np.abs(logits(spec, onto_grids, PROMPT)).max()
    for role in matrix_shapes(spec, 0):
        assert not np.array_equal(other[role, 0], onto_grids[role, 0]), role
    _, cost = quality.with_quantized(spec, other, q4_1)
    assert cost["weight_error"] > 0.04


def test_costs_and_their_order(model: tuple[ModelSpec, Weights]) -> None:
    costs = {name: quality.with_quantized(*model, made)[1] for name, made in quality.QUANTIZERS.items()}
    bits = [costs[name]["bits_a_weight"] for name in quality.QUANTIZERS]
    assert bits == [5.0, 4.5, 4.25, 5.0, 4.5]
    errors = [costs[f"shardline, group {size}"]["weight_error"] for size in (32, 64, 128)]
    assert errors == sorted(errors)
    assert errors[0] < costs["Q4_1"]["weight_error"] < costs["Q4_0"]["weight_error"]
    matrix = np.random.default_rng(0).normal(size=(4, 576)).astype(np.float32)
    assert quality.ours(128)(matrix)[1] == 4 * 576 * 4.5 / 8, "64 divides 576, 128 does not"


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("It was the best of times, it was the worst of times. " * 4)
    options = ["--tokens", "192", "--context", "64", "--shuffle", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["quality", str(folder), str(text), *options])
    quality.main()
    report = json.loads(out.read_text())
    weights = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert report["weights"] == {"model.safetensors": weights}
    assert (report["positions"], report["shuffle"]) == (192, 1)
    rows = report["rows"]
    assert list(rows) == ["float32", *quality.QUANTIZERS]
    assert 0 <= rows["float32"]["kl_max"] < 1e-8
    assert rows["float32"]["same_first"] == 1.0
    means = [rows[name]["kl_mean"] for name in quality.QUANTIZERS]
    assert min(means) > 1e-4
    assert means[0] < means[3], "group 32 is nearer than Q4_1"
    printed = capsys.readouterr().out
    assert f"{rows['Q4_0']['perplexity']:.3f}" in printed
