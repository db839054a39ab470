"""`shardline convert`: the same model, text and bytes as its source; and nothing half done, however it ends."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

from shardline.cluster import convert as module
from shardline.cluster.cli import main
from shardline.cluster.convert import convert
from shardline.cluster.errors import ConvertError
from shardline.cluster.text.model_text import ModelText
from shardline.kernels import cpu_backend
from shardline.scheduler import InvalidParameterError, SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import CheckpointError, Stage, StageSpec, open_checkpoint
from shardline.stage.resident.checkpoint import check_files


@pytest.fixture(scope="module")
def converted(smollm2, tmp_path_factory):
    out = tmp_path_factory.mktemp("convert") / "smollm2"
    files = []
    nbytes = convert(smollm2, out, written=files.append)
    assert nbytes == sum(path.stat().st_size for path in out.iterdir())
    assert [file.done for file in files] == list(range(1, 32))
    assert {file.files for file in files} == {31}
    return out


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    spec = StageSpec(0, 0, 30, True, True, 8, 16, "float16", 64, 2, 64, 2)
    stage = Stage(spec, checkpoint, cpu_backend(2))
    checkpoint.close()
    start = SequenceStart(0, SamplingParams(seed=0), len(tokens), tuple(tokens), ())
    blocks = tuple(range(-(-len(tokens) // 16)))
    found = stage.logits(StepPlan(0, (), (start,), (SequenceRun(0, 0, tuple(tokens), blocks, True),)), None)
    stage.close()
    return found


def test_logits_are_the_same(smollm2, converted):
    tokens = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411]
    expected = logits(smollm2, tokens)
    assert np.isfinite(expected).all()
    np.testing.assert_array_equal(logits(converted, tokens), expected)


def test_text_is_the_same(smollm2, converted):
    source, made = open_checkpoint(smollm2), open_checkpoint(converted)
    one, other = ModelText.from_checkpoint(source), ModelText.from_checkpoint(made)
    messages = [{"role": "user", "content": "Wie geht's? 🦊\n\tדג"}]
    rendered = one.template.render(messages)
    assert other.template.render(messages) == rendered
    encoded = [each.tokenizer.encode(rendered, add_special=True, parse_special=True) for each in (one, other)]
    assert encoded[0] == encoded[1]
    assert other.tokenizer.eos_ids == one.tokenizer.eos_ids
    assert dict(made.metadata) == {key: value for key, value in source.metadata.items() if key.startswith("tokenizer.")}
    for each in (source, made, one, other):
        each.close()


def test_every_file_is_as_it_was_written(converted, capsys):
    assert sum(nbytes for _, nbytes in check_files(converted)) > 90e6
    assert main(["models", "--check", str(converted)]) == 0
    assert "32 files" in capsys.readouterr().out


def llama(folder: Path, dtype: str = "F32") -> Path:
    """A folder of floats, with files of text that are nobody's."""
    from safetensors.numpy import save_file

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 101,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    shapes = {"self_attn.q": (64, 64), "self_attn.k": (32, 64), "self_attn.v": (32, 64), "self_attn.o": (64, 64)}
    shapes |= {"mlp.gate": (128, 64), "mlp.up": (128, 64), "mlp.down": (64, 128)}
    rng = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": rng.normal(size=(101, 64)), "model.norm.weight": np.ones(64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}_proj.weight": rng.normal(size=shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = np.ones(64)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text('{"tokens": "größer"}')
    (folder / "chat_templates").mkdir()
    (folder / "chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin").write_text("code")
    (folder / "modeling.py").write_text("code")
    return folder


def test_a_folder_with_its_files_of_text(tmp_path):
    source = llama(tmp_path / "source")
    out = tmp_path / "out"
    convert(source, out, bits=8, group_size=64)
    names = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    text = ["chat_templates/tools.jinja", "config.json", "tokenizer.json"]
    assert names == sorted(
        [*text, "ends.safetensors", "layer-00000.safetensors", "layer-00001.safetensors", "shardline.json"]
    )
    for name in text:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    checkpoint = open_checkpoint(out)
    assert checkpoint.text_folder == out
    assert (checkpoint.matrix("q", 0).bits, checkpoint.matrix("q", 0).group_size) == (8, 64)
    assert len(list(check_files(out))) == 6
    (out / "tokenizer.json").write_text('{"tokens": "grösser"}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: file: is another than was written"):
        list(check_files(out))
    with pytest.raises(ConvertError, match="such a folder already"):
        convert(out, tmp_path / "again")
    assert out.stat().st_mode & 0o777 == tmp_path.joinpath("source").stat().st_mode & 0o777


def test_what_is_refused(smollm2, tmp_path, capsys):
    taken = tmp_path / "taken"
    for make in (taken.mkdir, lambda: taken.symlink_to("nowhere")):
        make()
        with pytest.raises(ConvertError, match="is there already"):
            convert(smollm2, taken)
        taken.unlink() if taken.is_symlink() else taken.rmdir()
    with pytest.raises(ConvertError, match="is no folder: make it first"):
        convert(smollm2, tmp_path / "nowhere" / "out")
    with pytest.raises(ConvertError, match="quantized already, and are kept"):
        convert(smollm2, tmp_path / "out", bits=4)
    with pytest.raises(InvalidParameterError, match="bits"):
        convert(smollm2, tmp_path / "out", bits=3)
    assert main(["convert", str(smollm2), str(tmp_path / "out"), "--group-size", "48"]) == 2
    assert "16, 32, 64, 128" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_said_before_anything_is_written(smollm2, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage(10**12, 10**12, 90_000_000))
    written = []
    with pytest.raises(ConvertError, match=r"has 0\.1 GB free, but the folder takes about 0\.1 GB"):
        convert(smollm2, tmp_path / "out", written=written.append)
    assert written == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, stop):
    source, out = llama(tmp_path / "source"), tmp_path / "out"

    def written(file):
        assert not out.exists()
        if file.done == 2:
            raise stop

    with pytest.raises(stop):
        convert(source, out, written=written)
    assert list(tmp_path.iterdir()) == [source]
    convert(source, out)
    assert len(list(check_files(out))) == 6


def test_a_disk_that_is_full(tmp_path):
    """The kernel refuses to write past a limit, as it does on a full disk: in a process of its own."""
    source = llama(tmp_path / "source")
    code = "import sys; from shardline.cluster.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "convert", source, tmp_path / "out"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "cannot be written: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == [source]


def test_what_a_killed_process_left_is_removed(tmp_path):
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    dead, alive, other = (tmp_path / f".{name}" for name in ("out.part-dead", "out.part-alive", "outer.part-x"))
    for folder in (dead, alive, other):
        folder.mkdir()
        (folder / "ends.safetensors").write_text("half")
    descriptor = os.open(alive, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    convert(source, out)
    os.close(descriptor)
    assert sorted(tmp_path.iterdir()) == sorted([source, out, alive, other])


def test_a_place_that_was_taken_in_the_meantime(tmp_path):
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    with pytest.raises(ConvertError, match="in the meantime"):
        convert(source, out, written=lambda file: out.mkdir(exist_ok=True))
    assert list(out.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [out, source]


def test_the_command(tmp_path, capsys):
    source, out = llama(tmp_path / "source"), tmp_path / "out"
    assert main(["convert", str(source), str(out), "--bits", "4", "--group-size", "64"]) == 0
    told = capsys.readouterr()
    assert f"shardline run {out}" in told.out
    assert [line.split()[0] for line in told.err.splitlines() if "safetensors" in line] == [
        "ends.safetensors",
        "layer-00000.safetensors",
        "layer-00001.safetensors",
    ]
    data = json.loads((out / "shardline.json").read_text())
    assert data["source"] == "source"
    assert data["shards"]["layer-00000.safetensors"]["sha256"] == (
        hashlib.sha256((out / "layer-00000.safetensors").read_bytes()).hexdigest()
    )
    assert main(["convert", str(source), str(out)]) == 1
    assert "is there already" in capsys.readouterr().err
    shutil.rmtree(out)
