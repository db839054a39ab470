"""A decoder in float64 over a GGUF file, which it reads with the gguf package; no code of the room under test.

Written from the families' own definitions: what a tensor is there for decides what is done with it, and what files
leave to their reader (which layers have a window, how pairs lie, which activation) is said here once more, by family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

FLOATS = (Kind.F32, Kind.F16, Kind.BF16)


class Reference:
    """One sequence, no cache."""

    def __init__(self, path: Path, max_context: int = 0) -> None:
        """max_context: The engine's; longrope depends on it."""
        reader = gguf.GGUFReader(path)
        self._keys = {name: field.contents() for name, field in reader.fields.items()}
        self._architecture = self._keys["general.architecture"]
        self._tensors = {tensor.name: self._weights(tensor) for tensor in reader.tensors}
        self._max_context = max_context or self._key("context_length")
        self._count = 0

    @classmethod
    def of(cls, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> Reference:
        """Of weights that lie in no GGUF file; names and keys are a GGUF file's, keys without the prefix."""
        made = cls.__new__(cls)
        made._architecture = architecture
        made._keys = {f"{architecture}.{name}": value for name, value in keys.items()}
        made._tensors = {name: values.astype(np.float64) for name, values in tensors.items()}
        made._max_context, made._count = keys["context_length"], 0
        return made

    @staticmethod
    def _weights(tensor: gguf.ReaderTensor) -> np.ndarray:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        is_matrix = values.ndim > 1 and "ffn_gate_inp" not in tensor.name and not tensor.name.endswith(".bias")
        if tensor.tensor_type in FLOATS and is_matrix:
            # The reader's documented rounding of float matrices.
            values = gguf.dequantize(gguf.quantize(values, Kind.Q8_0), Kind.Q8_0)
        return values.astype(np.float64)

    def _key(self, name: str, default: Any = None) -> Any:
        return self._keys.get(f"{self._architecture}.{name}", default)

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float64 [tokens, vocab]."""
        tensors, gemma = self._tensors, self._architecture.startswith("gemma")
        self._count = len(token_ids)
        x = tensors["token_embd.weight"][list(token_ids)] * (math.sqrt(self._key("embedding_length")) if gemma else 1)
        layers = self._key("block_count") - self._key("nextn_predict_layers", 0)
        for layer in range(layers):
            prefix = f"blk.{layer}."
            attended = self._attention(self._norm(x, prefix + "attn_norm.weight"), layer, prefix)
            # The norm of this name is behind attention in some families, before the MLP in others.
            is_post_norm = prefix + "ffn_norm.weight" in tensors
            if is_post_norm and prefix + "post_attention_norm.weight" in tensors:
                attended = self._norm(attended, prefix + "post_attention_norm.weight")
            x = x + attended
            normed = self._norm(x, prefix + ("ffn_norm.weight" if is_post_norm else "post_attention_norm.weight"))
            made = (
                self._experts(normed, prefix)
                if prefix + "ffn_gate_inp.weight" in tensors
                else self._mlp(normed, prefix)
            )
            if prefix + "post_ffw_norm.weight" in tensors:
                made = self._norm(made, prefix + "post_ffw_norm.weight")
            x = x + made
        logits = self._norm(x, "output_norm.weight") @ tensors.get("output.weight", tensors["token_embd.weight"]).T
        cap = self._key("final_logit_softcapping", 30.0 if self._architecture == "gemma2" else 0)
        return cap * np.tanh(logits / cap) if cap else logits

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        eps = self._key("attention.layer_norm_rms_epsilon")
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * self._tensors[name]

    # -- attention ---------------------------------------------------------------------------------------------------

    def _attention(self, normed: np.ndarray, layer: int, prefix: str) -> np.ndarray:
        tensors, count = self._tensors, self._count
        heads, kv_heads, head_dim = (
            self._key("attention.head_count"),
            self._key("attention.head_count_kv"),
            self._key("attention.key_length"),
        )
        if prefix + "attn_qkv.weight" in tensors:
            rows = normed @ tensors[prefix + "attn_qkv.weight"].T + tensors.get(prefix + "attn_qkv.bias", 0.0)
            q, k, v = np.split(rows, [heads * head_dim, (heads + kv_heads) * head_dim], axis=1)
        else:
            q, k, v = (
                normed @ tensors[f"{prefix}attn_{part}.weight"].T + tensors.get(f"{prefix}attn_{part}.bias", 0.0)
                for part in "qkv"
            )
        if self._architecture == "olmoe":
            q, k = self._norm(q, prefix + "attn_q_norm.weight"), self._norm(k, prefix + "attn_k_norm.weight")
        q, k, v = (part.reshape(count, -1, head_dim) for part in (q, k, v))
        if self._architecture != "olmoe" and prefix + "attn_q_norm.weight" in tensors:
            q, k = self._norm(q, prefix + "attn_q_norm.weight"), self._norm(k, prefix + "attn_k_norm.weight")
        window = self._window(layer)
        if not (self._architecture == "smollm3" and layer % 4 == 3):
            local = window is not None and self._architecture == "gemma3"
            q, k = self._turn(q, local), self._turn(k, local)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * self._key("attention.scale", head_dim**-0.5)
        cap = self._key("attn_logit_softcapping", 50.0 if self._architecture == "gemma2" else 0)
        if cap:
            scores = cap * np.tanh(scores / cap)
        behind = np.arange(count)[:, None] - np.arange(count)
        seen = (behind >= 0) & (behind < (window or count))
        scores = np.where(seen, scores, -np.inf)
        if prefix + "attn_sinks.weight" in tensors:
            sinks = np.broadcast_to(tensors[prefix + "attn_sinks.weight"][:, None, None], (heads, count, 1))
            scores = np.concatenate([scores, sinks], axis=2)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        attended = np.einsum("hqk,khd->qhd", weights[:, :, :count], v).reshape(count, -1)
        return attended @ tensors[prefix + "attn_output.weight"].T + tensors.get(prefix + "attn_output.bias", 0.0)

    def _window(self, layer: int) -> int | None:
        window = self._key("attention.sliding_window", 4096 if self._architecture == "gemma2" else 0)
        if not window:
            return None
        pattern = self._key("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            return window if pattern[layer] else None
        period = pattern or {"gemma2": 2, "gpt-oss": 2, "gemma3": 6}.get(self._architecture)
        return None if period and layer % period == period - 1 else window

    def _turn(self, x: np.ndarray, local: bool) -> np.ndarray:
        """x [tokens, heads, head_dim]."""
        size = self._key("rope.dimension_count", x.shape[-1])
        base = self._key("rope.freq_base_swa", 10000.0) if local else self._key("rope.freq_base")
        frequencies = base ** (-2 * np.arange(size // 2) / size)
        factor = 1.0
        if not local:
            frequencies, factor = self._scaled(frequencies, base, size)
        turn = factor * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None, :]
        out = x.copy()
        if self._architecture in ("llama", "glm4", "smollm3"):
            first, second = slice(0, size, 2), slice(1, size, 2)
        else:
            first, second = slice(0, size // 2), slice(size // 2, size)
        turned = (x[..., first] + 1j * x[..., second]) * turn
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    def _scaled(self, frequencies: np.ndarray, base: float, size: int) -> tuple[np.ndarray, float]:
        factor, kind = self._key("rope.scaling.factor", 1.0), self._key("rope.scaling.type", "linear")
        original = self._key("rope.scaling.original_context_length", self._key("context_length"))
        scale = self._key("rope.scaling.attn_factor", 1.0)
        if "rope_factors_long.weight" in self._tensors:
            name = "long" if self._max_context > original else "short"
            return frequencies / self._tensors[f"rope_factors_{name}.weight"], scale
        if kind != "yarn":
            return frequencies / self._tensors.get("rope_freqs.weight", 1.0) / factor, scale
        fast, slow = self._key("rope.scaling.yarn_beta_fast", 32.0), self._key("rope.scaling.yarn_beta_slow", 1.0)
        first, last = (size * math.log(original / (n * 2 * math.pi)) / (2 * math.log(base)) for n in (fast, slow))
        if self._architecture != "gpt-oss":
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        ramp = np.clip((np.arange(size // 2) - first) / (last - first), 0, 1)
        grown = 0.1 * math.log(factor) + 1
        return frequencies / factor * ramp + frequencies * (1 - ramp), scale * grown

    # -- MLP ---------------------------------------------------------------------------------------------------------

    def _mlp(self, normed: np.ndarray, prefix: str, part: str = "") -> np.ndarray:
        tensors = self._tensors
        up = normed @ tensors[f"{prefix}ffn_up{part}.weight"].T + tensors.get(f"{prefix}ffn_up.bias", 0.0)
        if f"{prefix}ffn_gate{part}.weight" in tensors:
            gate = normed @ tensors[f"{prefix}ffn_gate{part}.weight"].T + tensors.get(f"{prefix}ffn_gate.bias", 0.0)
        else:
            gate, up = np.split(up, 2, axis=1)
        down = self._joined(gate, up) @ tensors[f"{prefix}ffn_down{part}.weight"].T
        return down + tensors.get(f"{prefix}ffn_down.bias", 0.0)

    def _joined(self, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        if self._architecture.startswith("gemma"):
            return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        if self._architecture == "gpt-oss":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
        return gate / (1 + np.exp(-gate)) * up

    def _experts(self, normed: np.ndarray, prefix: str) -> np.ndarray:
        tensors = self._tensors
        ids, shares = self._chosen(normed, prefix)
        out = np.zeros_like(normed)
        for row, chosen in enumerate(ids):
            for expert, share in zip(chosen, shares[row], strict=True):
                gate, up, down = (self._expert(prefix, part, expert) for part in ("gate", "up", "down"))
                biases = [tensors.get(f"{prefix}ffn_{part}_exps.bias") for part in ("gate", "up", "down")]
                g, u, d = (0.0 if bias is None else bias[expert] for bias in biases)
                inner = self._joined(gate @ normed[row] + g, up @ normed[row] + u)
                out[row] += share * (down @ inner + d)
        if prefix + "ffn_up_shexp.weight" in tensors:
            shared = self._mlp(normed, prefix, "_shexp")
            if prefix + "ffn_gate_inp_shexp.weight" in tensors:
                shared = shared / (1 + np.exp(-(normed @ tensors[prefix + "ffn_gate_inp_shexp.weight"])))[:, None]
            out = out + shared
        return out

    def _expert(self, prefix: str, part: str, expert: int) -> np.ndarray:
        tensors = self._tensors
        if f"{prefix}ffn_{part}.{expert}.weight" in tensors:
            return tensors[f"{prefix}ffn_{part}.{expert}.weight"]
        if part != "down" and prefix + "ffn_gate_up_exps.weight" in tensors:
            both = tensors[prefix + "ffn_gate_up_exps.weight"][expert]
            return both[: len(both) // 2] if part == "gate" else both[len(both) // 2 :]
        return tensors[f"{prefix}ffn_{part}_exps.weight"][expert]

    def _chosen(self, normed: np.ndarray, prefix: str) -> tuple[np.ndarray, np.ndarray]:
        """Each row's experts, best first, and their shares."""
        tensors, used = self._tensors, self._key("expert_used_count")
        logits = normed @ tensors[prefix + "ffn_gate_inp.weight"].T + tensors.get(prefix + "ffn_gate_inp.bias", 0.0)
        sigmoid = self._key("expert_gating_func", 2 if self._architecture == "glm4moe" else 1) == 2
        if self._architecture == "gpt-oss":
            scores = logits
        elif sigmoid:
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max(1, keepdims=True))
            scores /= scores.sum(1, keepdims=True)
        choice = scores + tensors.get(prefix + "exp_probs_b.bias", 0.0)
        groups = self._key("expert_group_count", 1)
        if groups > 1:
            grouped = np.sort(choice.reshape(len(choice), groups, -1), axis=2)
            best = np.argsort(-grouped[:, :, -2:].sum(2), axis=1, kind="stable")
            for row, order in enumerate(best):
                left_out = order[self._key("expert_group_used_count") :]
                choice[row].reshape(groups, -1)[left_out] = -np.inf
        ids = np.argsort(-choice, axis=1, kind="stable")[:, :used]
        shares = np.take_along_axis(scores, ids, axis=1)
        if self._architecture == "gpt-oss":
            shares = np.exp(shares - shares.max(1, keepdims=True))
        plain = {"qwen2moe": False, "olmoe": False, "glm4moe": False}.get(self._architecture, True)
        if self._key("expert_weights_norm", plain):
            shares = shares / shares.sum(1, keepdims=True)
        return ids, shares * self._key("expert_weights_scale", 1.0)
