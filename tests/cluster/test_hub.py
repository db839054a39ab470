"""`hf:owner/name` against a server that speaks the hub's protocol: what is fetched, what is not, and what is said."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from shardline.cluster import hub
from shardline.cluster.build import EngineOptions, build_engine, model_bytes, prepare
from shardline.cluster.errors import ModelNotFoundError
from shardline.cluster.models import resolve
from shardline.cluster.stage_loading import CheckpointLoader, HubLoader
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import StageSpec, open_checkpoint
from shardline.stage.huggingface.needed import needed_files

REPO = "maker/tiny"
LAYERS = 3


class Hub:
    """A server of one repository.

    Attributes:
        url: Where.
        commits: Commit -> the folder of its files.
        refs: Branch or tag -> commit.
        asked: (method, path, the Range header) of each request.
        cut: After so many bytes of a file's body the connection is closed, once a file.
        slow: Seconds after each 8 KiB of a body of weights; None: it never goes on after the first.
        status: Answer every request with that status and error code.
        token: Without it there is no answer.
    """

    def __init__(self) -> None:
        self.commits: dict[str, Path] = {}
        self.refs: dict[str, str] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.cut: dict[str, int] = {}
        self.slow: float | None = 0.0
        self.closed = threading.Event()
        self.status: tuple[int, str] | None = None
        self.token: str | None = None
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def publish(self, folder: Path, ref: str = "main") -> str:
        names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        commit = hashlib.sha1("".join(names).encode() + (folder / "config.json").read_bytes()).hexdigest()
        self.commits[commit] = folder
        self.refs[ref] = commit
        return commit

    def fetched(self) -> list[str]:
        """The files whose bodies were asked for."""
        return [path.split("/")[-1] for method, path, _ in self.asked if method == "GET" and "/resolve/" in path]

    def close(self) -> None:
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(False)

    def do_GET(self) -> None:
        self.answer(True)

    def answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        kind, revision, *rest = [*path.partition(f"{REPO}/")[2].split("/"), ""]
        commit = self.hub.refs.get(revision, revision)
        folder = self.hub.commits.get(commit)
        if self.hub.status is not None:
            self.fail(*self.hub.status)
        elif self.hub.token is not None and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.fail(403, "GatedRepo")
        elif REPO not in path:
            self.fail(401, "RepoNotFound")
        elif folder is None:
            self.fail(404, "RevisionNotFound")
        elif kind == "revision":
            self.send({"id": REPO, "sha": commit, "siblings": [], "tags": []})
        elif kind == "tree":
            self.send([self.entry(path, folder) for path in sorted(folder.rglob("*")) if path.is_file()])
        elif kind == "resolve" and (folder / "/".join(rest[:-1])).is_file():
            self.send_file(folder / "/".join(rest[:-1]), commit, with_body)
        else:
            self.fail(404, "EntryNotFound")

    def entry(self, path: Path, folder: Path) -> dict[str, object]:
        oid = hashlib.sha1(path.read_bytes()).hexdigest()
        return {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": oid}

    def send_file(self, path: Path, commit: str, with_body: bool) -> None:
        content = path.read_bytes()
        start, end = 0, len(content)
        asked = self.headers.get("Range")
        if asked is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1, end) if last else end
        self.send_response(200 if asked is None else 206)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(end - start))
        if asked is not None:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        cut = self.hub.cut.pop(path.name, None) if with_body else 0
        body = content[start : end if cut is None else start + cut]
        if self.hub.slow == 0 or path.suffix != ".safetensors":
            self.wfile.write(body)
        else:
            for first in range(0, len(body), 1 << 13):
                self.wfile.write(body[first : first + (1 << 13)])
                if self.hub.closed.wait(self.hub.slow):
                    return
        if cut:
            self.wfile.flush()
            self.close_connection = True

    def send(self, data: object) -> None:
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def write_model(folder: Path, *, seed: int = 0, indexed: bool = True, tied: bool = False, head: bool = True) -> Path:
    """A tiny Llama with a real tokenizer, a file a layer, and files that must not be fetched."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        "vocab_size": 101,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "eos_token_id": 1,
        "initializer_range": seed,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"self_attn.q": (64, 64), "self_attn.k": (32, 64), "self_attn.v": (32, 64), "self_attn.o": (64, 64)}
    shapes |= {"mlp.gate": (96, 64), "mlp.up": (96, 64), "mlp.down": (64, 96)}
    rng = np.random.default_rng(seed)
    files: dict[str, dict[str, np.ndarray]] = {
        "embed": {"model.embed_tokens.weight": rng.normal(0, 0.2, (101, 64))},
        "head": {"model.norm.weight": np.ones(64)},
    }
    if head:
        files["head"]["lm_head.weight"] = rng.normal(0, 0.2, (101, 64))
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        made = {f"{prefix}{name}_proj.weight": rng.normal(0, 0.2, shape) for name, shape in shapes.items()}
        made |= {f"{prefix}{norm}.weight": np.ones(64) for norm in ("input_layernorm", "post_attention_layernorm")}
        files[f"layer{layer}"] = made
    if indexed:
        place = {name: f"{file}.safetensors" for file, tensors in files.items() for name in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    else:
        files = {"model": {name: values for tensors in files.values() for name, values in tensors.items()}}
    for file, tensors in files.items():
        save_file({name: values.astype(np.float32) for name, values in tensors.items()}, folder / f"{file}.safetensors")
    vocabulary = {chr(33 + index): index for index in range(100)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "original").mkdir()
    for name in ("pytorch_model.bin", "modeling_tiny.py", "original/whole.safetensors", "onnx.data", "README.md"):
        (folder / name).write_text("never to be fetched")
    return folder


SMALL = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json"}
WEIGHTS = {"embed.safetensors", "head.safetensors", *(f"layer{layer}.safetensors" for layer in range(LAYERS))}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one commit; huggingface-hub is pointed to it and to an empty cache."""
    made = Hub()
    made.publish(write_model(tmp_path / "published"))
    point_to(made.url, tmp_path, monkeypatch)
    yield made
    made.close()


def point_to(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Not by SHARDLINE_CACHE: compiled code is kept there too.
    monkeypatch.setattr(hub, "cache_folder", lambda: folder / "cache")
    monkeypatch.delenv("HF_TOKEN", raising=False)


def present(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_only_what_is_read_is_fetched(server, tmp_path):
    told = []
    path = resolve(f"hf:{REPO}", progress=told.append)
    assert present(path) == SMALL | WEIGHTS
    assert set(server.fetched()) == SMALL | WEIGHTS
    assert any("fetching 5 of 5 files of weights" in line for line in told)
    for name in SMALL | WEIGHTS:
        assert (path / name).read_bytes() == (tmp_path / "published" / name).read_bytes()
    open_checkpoint(path).close()
    server.asked.clear()
    assert resolve(f"hf:{REPO}") == path
    assert server.fetched() == []


def test_a_model_in_one_file(server, tmp_path):
    server.publish(write_model(tmp_path / "single", indexed=False), "single")
    path = resolve(f"hf:{REPO}@single")
    assert present(path) == SMALL - {"model.safetensors.index.json"} | {"model.safetensors"}


def test_a_name_is_pinned_to_a_commit(server, tmp_path):
    first = server.refs["main"]
    model = hub.pin(f"hf:{REPO}")
    assert model == hub.HubModel(REPO, first)
    second = server.publish(write_model(tmp_path / "second", seed=1))
    # Whoever was given the commit gets it, whatever the branch says by then.
    assert hub.fetch_all(model).name == first
    assert hub.pin(f"hf:{REPO}").commit == second
    assert resolve(f"hf:{REPO}@{first}").name == first
    assert resolve(f"hf:{REPO}").name == second
    loaders = [HubLoader(hub.HubModel(REPO, commit)) for commit in (first, second)]
    assert loaders[0].identity() != loaders[1].identity()


def stage_specs() -> list[StageSpec]:
    ends = ((0, 1, True, False), (1, 2, False, False), (2, 3, False, True))
    return [
        StageSpec(index, first, end, embed, head, 8, 16, "float32", 16, 2, 64, 2)
        for index, (first, end, embed, head) in enumerate(ends)
    ]


def test_a_node_fetches_only_what_its_stage_needs(server, tmp_path, monkeypatch):
    plan = StepPlan(
        0,
        (),
        (SequenceStart(0, SamplingParams(seed=0), 3, (2, 3, 4), ()),),
        (SequenceRun(0, 0, (2, 3, 4), (0,), True),),
    )
    model = hub.pin(f"hf:{REPO}")
    wanted = [{"embed", "layer0"}, {"layer1"}, {"layer2", "head"}]
    results = []
    for source in ("hub", "folder"):
        hidden, output = None, None
        for spec, names in zip(stage_specs(), wanted, strict=True):
            if source == "folder":
                loader = CheckpointLoader(tmp_path / "published")
            else:
                monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / f"node{spec.index}"))
                loader = HubLoader(model)
                assert present(hub.fetch_small(model)) == SMALL
                assert loader.identity().fingerprint == model.fingerprint
            loaded = loader.load(spec)
            if source == "hub":
                assert present(hub.fetch_small(model)) == SMALL | {f"{name}.safetensors" for name in names}
            output = loaded.runner.begin(plan, hidden).wait()
            hidden = None if output.hidden is None else output.hidden.copy()
            loaded.runner.close()
        results.append(output.result)
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("tied", "head", "share", "names"),
    [
        (False, True, (0, 2, True, False), {"embed", "layer0", "layer1"}),
        (False, True, (1, 1, False, False), set()),
        (True, False, (2, 3, False, True), {"layer2", "embed", "head"}),
        # Told to be one, and yet there are two: opening compares them, so every stage needs both.
        (True, True, (1, 2, False, False), {"layer1", "embed", "head"}),
    ],
)
def test_the_files_that_a_stage_needs(tmp_path, tied, head, share, names):
    folder = write_model(tmp_path / "model", tied=tied, head=head)
    found = needed_files(folder, share[0], share[1], has_embed=share[2], has_head=share[3])
    assert found == {f"{name}.safetensors" for name in names}
    for path in WEIGHTS - found:
        (folder / path).unlink(missing_ok=True)
    checkpoint = open_checkpoint(folder)
    for layer in range(*share[:2]):
        checkpoint.matrix("down", layer)
    if share[2]:
        checkpoint.matrix("embed", None)
    if share[3]:
        checkpoint.matrix("head", None)
        checkpoint.vector("final_norm", None)
    checkpoint.close()


def test_an_outline_is_enough_to_plan_with(server, tmp_path):
    """Where the stages are elsewhere, the planner's host fetches headers only."""
    options = EngineOptions(f"hf:{REPO}", stages=3, split=(1, 1, 1), address="local", context=64)
    prepared = prepare(options)
    whole = prepare(EngineOptions(str(tmp_path / "published"), stages=3, split=(1, 1, 1), address="local", context=64))
    assert prepared.plan.specs == whole.plan.specs
    assert [stage.weight_bytes for stage in prepared.plan.stages] == [stage.weight_bytes for stage in whole.plan.stages]
    assert prepared.hub_model == hub.pin(f"hf:{REPO}")
    one, other = open_checkpoint(prepared.path), open_checkpoint(tmp_path / "published")
    assert one.spec == other.spec
    assert model_bytes(one) == model_bytes(other)
    one.close()
    other.close()
    headers = [asked for asked in server.asked if asked[0] == "GET" and asked[1].endswith(".safetensors")]
    assert headers
    assert all(asked[2] is not None and asked[2].startswith("bytes=0-") for asked in headers)
    assert present(hub.fetch_small(prepared.hub_model)) == SMALL
    assert sum(os.stat(prepared.path / name).st_blocks for name in WEIGHTS) * 512 < 100_000
    # In this process the engine computes, so it must have the weights themselves.
    engine = build_engine(prepared, in_process=True)
    assert present(hub.fetch_small(prepared.hub_model)) == SMALL | WEIGHTS
    del engine


def test_a_download_that_breaks_is_gone_on_with(server, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    server.cut = {"layer1.safetensors": 10_000}
    path = resolve(f"hf:{REPO}")
    assert (path / "layer1.safetensors").read_bytes() == (
        next(iter(server.commits.values())) / "layer1.safetensors"
    ).read_bytes()
    asked = [ranged for method, name, ranged in server.asked if method == "GET" and name.endswith("layer1.safetensors")]
    assert asked == [None, "bytes=10000-"]


def test_an_interrupted_fetch_keeps_the_files_that_were_whole(server, tmp_path):
    """Killed in the middle, in a process of its own, as the command line: the next one fetches the rest."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
    }
    environment.pop("HF_HUB_CACHE", None)
    code = (
        "import os\n"
        "from shardline.cluster import hub\n"
        f"model = hub.pin('hf:{REPO}')\n"
        "hub.fetch_needed(model, 0, 2, has_embed=False, has_head=False)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=False)
    assert done.returncode == -9
    assert {name for name in server.fetched() if name in WEIGHTS} == {"layer0.safetensors", "layer1.safetensors"}
    server.asked.clear()
    command = [sys.executable, "-m", "shardline.cluster.cli", "convert", f"hf:{REPO}", str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(server.fetched()) == WEIGHTS - {"layer0.safetensors", "layer1.safetensors"}
    assert "fetching 3 of 5 files of weights" in done.stderr
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.spec.num_layers == LAYERS
    checkpoint.close()


def test_offline_the_cache_is_used(server, monkeypatch):
    path = resolve(f"hf:{REPO}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert resolve(f"hf:{REPO}") == path
    assert resolve(f"hf:{REPO}@{path.name}") == path
    assert server.asked == []
    (path / "layer1.safetensors").resolve().unlink()
    with pytest.raises(ModelNotFoundError, match=r"not wholly, in .* HF_HUB_OFFLINE is set"):
        resolve(f"hf:{REPO}")
    with pytest.raises(ModelNotFoundError, match=r"hf:maker/other is not.* HF_HUB_OFFLINE is set"):
        resolve("hf:maker/other")


def test_without_a_network_what_is_in_the_cache_is_used(server, tmp_path, monkeypatch):
    path = resolve(f"hf:{REPO}")
    # Nobody listens there.
    point_to("http://127.0.0.1:9", tmp_path, monkeypatch)
    assert resolve(f"hf:{REPO}") == path
    with pytest.raises(ModelNotFoundError, match=r"hf:maker/other is not in .* cannot be reached"):
        resolve("hf:maker/other")


def test_a_token_is_sent(server, monkeypatch):
    server.token = "hf_secret"
    with pytest.raises(ModelNotFoundError, match=r"is gated: accept its terms at .*HF_TOKEN") as caught:
        resolve(f"hf:{REPO}")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert present(resolve(f"hf:{REPO}")) == SMALL | WEIGHTS
    assert "hf_secret" not in str(caught.value)


def no_safetensors(folder: Path) -> None:
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def only_gguf(folder: Path) -> None:
    no_safetensors(folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "tiny.Q4_1.gguf").write_text("GGUF")


def lost_shard(folder: Path) -> None:
    (folder / "layer1.safetensors").unlink()


def escaping(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("layer1.safetensors", "../../layer1.safetensors"))


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (no_safetensors, r"pytorch_model\.bin can run code when loaded, and is not fetched"),
        (only_gguf, r"has GGUF files \(tiny\.Q4_1\.gguf\)"),
        (lost_shard, r"names layer1\.safetensors, which the repository does not have"),
        (escaping, r"\.\./\.\./layer1\.safetensors is not the name of a \.safetensors file"),
    ],
)
def test_repositories_that_are_refused(server, tmp_path, edit: Callable[[Path], None], says: str):
    folder = write_model(tmp_path / "other")
    edit(folder)
    server.publish(folder, "other")
    with pytest.raises(Exception, match=says) as caught:
        resolve(f"hf:{REPO}@other")
    assert type(caught.value).__module__.startswith("shardline.")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hf:tiny", "is no name of a model: write hf:owner/name"),
        ("hf:", "is no name of a model"),
        ("hf:../../etc/passwd", "is no name of a model"),
        ("hf:maker/tiny@", "is no name of a model"),
        ("hf:maker/..", "is no name of a model of the hub"),
        ("hf:maker/other", "has no model maker/other, or it is private"),
        ("hf:maker/tiny@v9", "has no such revision"),
    ],
)
def test_names_that_are_wrong(server, name, says):
    with pytest.raises(ModelNotFoundError, match=says):
        resolve(name)


def test_a_server_that_fails(server):
    server.status = (500, "Broken")
    with pytest.raises(ModelNotFoundError, match=r"could not give hf:maker/tiny.*500"):
        resolve(f"hf:{REPO}")
