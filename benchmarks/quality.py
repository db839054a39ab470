"""What 4 bits cost in quality: our quantizer, and llama.cpp's Q4_0 and Q4_1, against the model in float32.

    python -m benchmarks.quality MODEL TEXT [--tokens N] [--context N] [--shuffle SEED] [--out FILE]

MODEL is a Hugging Face folder of a Llama in floats, or a GGUF file of one, whose weights are then what its integers
stand for. The matrices of the layers are quantized and dequantized: by our quantizer, as a stage does when it loads
them, and by the gguf package's, which are llama.cpp's without an importance matrix. All else (embedding, head, norms)
and all arithmetic is float32, so that nothing but the quantizer differs. Compared are whole distributions over the
vocabulary: KL(float32 || quantized), in natural logarithms.

A file in Q4_1 would get from Q4_1 what it holds, exactly. `--shuffle` takes that away: it permutes the channels of the
residual stream, of each MLP and of each value head, in every matrix that has them. The model computes the same, and
that is measured too; the channels of a trained model are in no order anyhow; and a group gets weights from many of the
file's groups, each with a grid of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from benchmarks import record
from benchmarks.float_llama import Floats, Weights, load, logits

from shardline.cluster.cli.output import stdout, table
from shardline.cluster.models import resolve
from shardline.cluster.text.model_text import ModelText
from shardline.stage import ModelSpec, matrix_shapes, open_checkpoint
from shardline.stage.huggingface.formats import quantize
from shardline.stage.resident.checkpoint import hash_file

Quantizer = Callable[[Floats], tuple[Floats, int]]
"""A matrix [N, K] to what its quantized form stands for, and the bytes of that form."""


def ours(group_size: int) -> Quantizer:
    """Our 4 bits in groups of that size, or of the largest smaller size that divides K."""

    def quantized(matrix: Floats) -> tuple[Floats, int]:
        fitting = math.gcd(matrix.shape[1], group_size)
        made = quantize([matrix], matrix.shape, 4, fitting, 2)
        return made.dequantize(), made.nbytes

    return quantized


def ggufs(kind: gguf.GGMLQuantizationType) -> Quantizer:
    """GGUF's form of that name."""

    def quantized(matrix: Floats) -> tuple[Floats, int]:
        made = gguf.quantize(matrix, kind)
        return gguf.dequantize(made, kind), made.nbytes

    return quantized


QUANTIZERS: dict[str, Quantizer] = {
    "shardline, group 32": ours(32),
    "shardline, group 64": ours(64),
    "shardline, group 128": ours(128),
    "Q4_1": ggufs(gguf.GGMLQuantizationType.Q4_1),
    "Q4_0": ggufs(gguf.GGMLQuantizationType.Q4_0),
}


def shuffled(spec: ModelSpec, weights: Weights, seed: int) -> Weights:
    """The same model with its channels in another order."""
    draw = np.random.default_rng(seed)
    stream = draw.permutation(spec.hidden_size)
    out = {key: matrix[:, stream] for key, matrix in weights.items() if key[0] in ("embed", "head")}
    out["final_norm", None] = weights["final_norm", None][stream]
    shared = spec.num_heads // spec.num_kv_heads
    for layer in range(spec.num_layers):
        width = draw.permutation(spec.intermediate_size)
        # Of each value head; the query heads that share it find its channels in the same places.
        values = np.stack([draw.permutation(spec.head_dim) for _ in range(spec.num_kv_heads)])
        values += spec.head_dim * np.arange(spec.num_kv_heads)[:, None]
        within = np.repeat(values % spec.head_dim, shared, axis=0)
        attended = (within + spec.head_dim * np.arange(spec.num_heads)[:, None]).ravel()
        for norm in ("attention_norm", "mlp_norm"):
            out[norm, layer] = weights[norm, layer][stream]
        for role in ("q", "k", "v", "gate", "up"):
            out[role, layer] = weights[role, layer][:, stream]
        out["v", layer] = out["v", layer][values.ravel()]
        out["o", layer] = weights["o", layer][stream][:, attended]
        out["gate", layer], out["up", layer] = out["gate", layer][width], out["up", layer][width]
        out["down", layer] = weights["down", layer][stream][:, width]
    return {key: np.ascontiguousarray(part) for key, part in out.items()}


def with_quantized(spec: ModelSpec, weights: Weights, quantizer: Quantizer) -> tuple[Weights, dict[str, float]]:
    """The model with its layers' matrices quantized; the bits a weight takes and the relative error of the weights."""
    out, nbytes, count, error, size = dict(weights), 0, 0, 0.0, 0.0
    for layer in range(spec.num_layers):
        for role in matrix_shapes(spec, layer):
            exact = weights[role, layer]
            out[role, layer], taken = quantizer(exact)
            nbytes += taken
            count += exact.size
            error += float(np.square(out[role, layer] - exact, dtype=np.float64).sum())
            size += float(np.square(exact, dtype=np.float64).sum())
    return out, {"bits_a_weight": 8 * nbytes / count, "weight_error": math.sqrt(error / size)}


def log_shares(found: Floats) -> np.ndarray:
    """Logarithms of each position's probabilities, float64 [tokens, vocab]."""
    shifted = found.astype(np.float64) - found.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return np.asarray(shifted)


def compare(spec: ModelSpec, expected: list[Floats], found: Weights, windows: list[list[int]]) -> dict[str, float]:
    """Perplexity, and how far the distributions are from those expected; `kl_error` is the mean's standard error."""
    likelihoods, kl, same = [], [], []
    for window, wanted in zip(windows, expected, strict=True):
        ours, theirs = log_shares(wanted), log_shares(logits(spec, found, window))
        # What each position but the last gives to the token behind it.
        likelihoods.append(theirs[np.arange(len(window) - 1), window[1:]])
        same.append(ours.argmax(1) == theirs.argmax(1))
        theirs -= ours
        kl.append(-np.einsum("tv,tv->t", np.exp(ours), theirs))
    each = np.concatenate(kl)
    return {
        "perplexity": math.exp(-np.concatenate(likelihoods).mean()),
        "kl_mean": float(each.mean()),
        "kl_error": float(each.std(ddof=1) / math.sqrt(len(each))),
        "kl_p99": float(np.quantile(each, 0.99)),
        "kl_max": float(each.max()),
        "same_first": float(np.concatenate(same).mean()),
    }


def measure(model: Path, text: str, tokens: int, context: int, seed: int | None) -> dict[str, Any]:
    """A row for the model as it is and one for each quantizer."""
    checkpoint = open_checkpoint(model)
    spec, words = checkpoint.spec, ModelText.from_checkpoint(checkpoint)
    token_ids = words.tokenizer.encode(text, add_special=False, parse_special=False)[:tokens]
    words.close()
    windows = [token_ids[start : start + context] for start in range(0, len(token_ids) - context + 1, context)]
    if not windows:
        raise SystemExit(f"the text has {len(token_ids)} tokens, fewer than a window of {context}")
    original = load(checkpoint)
    checkpoint.close()
    weights = original if seed is None else shuffled(spec, original, seed)
    expected = [logits(spec, weights, window) for window in windows]
    rows = {"float32": compare(spec, expected, original, windows)}
    record.say(f"float32: perplexity {rows['float32']['perplexity']:.3f}")
    del original
    for name, quantizer in QUANTIZERS.items():
        found, cost = with_quantized(spec, weights, quantizer)
        rows[name] = cost | compare(spec, expected, found, windows)
        record.say(f"{name}: mean KL {rows[name]['kl_mean']:.4f}")
    return {
        "parameters": sum(part.size for (role, _), part in weights.items() if role != "head"),
        "positions": sum(map(len, windows)),
        "rows": rows,
    }


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    made = table(
        ("layers' matrices", "bits", "weights' error", "perplexity", "mean KL", "99 %", "largest", "same first")
    )
    for name, row in report["rows"].items():
        cost = (f"{row['bits_a_weight']:.2f}", f"{row['weight_error']:.2%}") if "bits_a_weight" in row else ("32", "-")
        mean = f"{row['kl_mean']:.2e} ± {row['kl_error']:.1e}"
        spread = f"{row['kl_p99']:.2e}", f"{row['kl_max']:.2e}", f"{row['same_first']:.1%}"
        made.add_row(name, *cost, f"{row['perplexity']:.3f}", mean, *spread)
    stdout().print(made)


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, from its beginning")
    parser.add_argument("--context", type=int, default=512, help="tokens of each window")
    parser.add_argument("--shuffle", type=int, metavar="SEED")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "quality.json")
    given = parser.parse_args()
    model = resolve(given.model)
    report = record.machine(None, "benchmarks.quality")
    report["command"] = report["command"].replace(str(given.text), given.text.name)
    files = [model] if model.is_file() else sorted(model.glob("*.safetensors"))
    report["weights"] = {path.name: hash_file(path).sha256 for path in files}
    report["text"] = {"name": given.text.name, "sha256": hash_file(given.text).sha256}
    report |= {"context": given.context, "shuffle": given.shuffle}
    report |= measure(model, given.text.read_text(), given.tokens, given.context, given.shuffle)
    show(report)
    record.write(given.out, report)


if __name__ == "__main__":
    main()
