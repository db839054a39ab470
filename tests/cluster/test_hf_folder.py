"""A Hugging Face folder from the door to the token: tokenizer, weights in shards, a vocabulary with padding."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from shardline.cluster import Request
from shardline.cluster.cli import main
from shardline.cluster.client import Client
from shardline.scheduler import SamplingParams
from shardline.scheduler.errors import SchedulerError

HIDDEN, WIDTH, LAYERS = 64, 96, 3
END = "<|end|>"
COMMAND = [sys.executable, "-c", "import sys; from shardline.cluster.cli import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 whose padding would win every choice: 257 ids, 320 rows."""
    path = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(path / "tokenizer.json"))
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    marks = {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(marks))
    ids, rows = tokenizer.get_vocab_size(), 320
    assert ids == 257
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": rows,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": ids - 1,
    }
    (path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.2, shape).astype(np.float16)

    head = matrix(rows, HIDDEN)
    head[ids:] *= 50
    tensors = {"model.embed_tokens.weight": matrix(rows, HIDDEN), "lm_head.weight": head}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (128, HIDDEN),
            "self_attn.k_proj": (64, HIDDEN),
            "self_attn.v_proj": (64, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 128),
            "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDTH),
        }.items():
            tensors[f"{prefix}{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = np.ones(HIDDEN, np.float16)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = np.ones(32, np.float16)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    place = {name: shards["layers.1" in name or "layers.2" in name] for name in tensors}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if place[name] == shard}, path / shard)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    return path


def test_padding_is_never_sampled_and_never_taken(folder: Path) -> None:
    with Client.local(str(folder), context=128) as client:
        tokens = set()
        for seed in range(8):
            params = SamplingParams(max_tokens=40, temperature=3.0, seed=seed, ignore_eos=True)
            for delta in client.submit(f"Request {seed}", params):
                tokens.update(delta.token_ids)
        assert len(tokens) > 100
        assert max(tokens) < 257
        with pytest.raises(SchedulerError, match="256"):
            client.submit(Request(token_ids=(257,), params=SamplingParams(max_tokens=1)))


@pytest.mark.ray
def test_the_command_gives_the_same_answer_over_stages(folder: Path) -> None:
    answers = []
    for split in ([], ["--split", "1,2"]):
        done = subprocess.run(
            [*COMMAND, "run", str(folder), "-p", "Why?", "--max-tokens", "24", "--context", "128", *split],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert len(answers[0]) > 10
    assert answers[0] == answers[1]


ADVICE = {"do_sample": True, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1, "num_beams": 1}


@pytest.fixture(scope="module")
def advised(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, whose makers say how to sample."""
    path = tmp_path_factory.mktemp("advised") / "model"
    shutil.copytree(folder, path)
    (path / "generation_config.json").write_text(json.dumps(ADVICE))
    return path


def test_the_models_own_way_to_sample_is_the_default(folder: Path, advised: Path) -> None:
    full = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.1, max_tokens=40, seed=1)
    greedy = SamplingParams(max_tokens=40)
    with Client.local(str(folder), context=128) as client:
        assert client.generation_defaults().params() == SamplingParams()
        expected = {params: client.submit("Why?", params).text() for params in (full, greedy)}
        as_advised = client.submit("Why?", replace(full, seed=7)).text()
    with Client.local(str(advised), context=128) as client:
        defaults = client.generation_defaults()
        assert client.submit("Why?", defaults.params(max_tokens=40, seed=1)).text() == expected[full]
        assert client.submit("Why?", defaults.params(max_tokens=40, temperature=0)).text() == expected[greedy]
        # Whoever says how is heard, word for word.
        assert client.submit("Why?", greedy).text() == expected[greedy]
        assert client.submit(Request(text="Why?", params=replace(full, seed=7))).text() == as_advised
        # Each of these draws a seed.
        assert len({client.submit("Why?").text() for _ in range(4)}) == 4
        assert len({client.submit("Why?", SamplingParams()).text() for _ in range(2)}) == 1


def test_the_command_says_what_it_takes_from_the_model(
    folder: Path, advised: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(model: Path, *options: str) -> tuple[str, str]:
        assert main(["run", str(model), "-p", "Why?", "--max-tokens", "24", "--context", "128", *options]) == 0
        captured = capsys.readouterr()
        return captured.out, captured.err

    greedy, told = run(folder)
    assert "sampling" not in told
    answer, told = run(advised, "--seed", "1")
    assert (
        "sampling: temperature 0.9, top-k 40, top-p 0.95, repetition penalty 1.1 (from generation_config.json; "
        "--temperature 0 for greedy)\n" in told
    )
    assert answer != greedy
    written = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--repetition-penalty", "1.1")
    assert run(folder, *written, "--seed", "1")[0] == answer
    assert run(advised, "--temperature", "0") == (greedy, run(folder)[1])
    other, told = run(advised, "--seed", "1", "--top-k", "2", "--repetition-penalty", "1")
    assert "sampling: temperature 0.9, top-p 0.95 (from" in told
    assert other == run(folder, "--temperature", "0.9", "--top-p", "0.95", "--top-k", "2", "--seed", "1")[0]


def test_damaged_advice_is_refused_by_file_key_and_value(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    (path / "generation_config.json").write_text('{"temperature": 1e6}')
    assert main(["run", str(path), "-p", "Why?", "--context", "128"]) == 1
    assert "generation_config.json: temperature: is 1e+06; it is 0 or more and at most 100" in capsys.readouterr().err
