"""Logits of SmolLM2 by transformers, from the weights of the same GGUF file dequantized to float32.

Run it with the extra `peer` to write the few that `tests/stage/test_reference_logits.py` compares with without torch:

    python tests/peer/make_reference_logits.py MODEL.gguf tests/stage/data/smollm2_logits.npz

The file is read with the gguf package and tokenized by a byte-level BPE that is built here from its vocabulary, so that
no code of the project takes part.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TOP = 64

SHORT = "The capital of France is"
SCRIPTS = (
    "El ingenioso hidalgo vivía en un lugar de la Mancha. 東京は日本の首都であり、人口が最も多い都市です。 "
    "Столица России — Москва, город на реке. ירושלים היא עיר עתיקה. 🙂 Größe, façade, naïve."
)
CODE = '''def quicksort(values: list[int]) -> list[int]:
    """Sort by the classic recursion."""
    if len(values) < 2:
        return values
    pivot, *rest = values
    low = [v for v in rest if v < pivot]
    high = [v for v in rest if v >= pivot]
    return quicksort(low) + [pivot] + quicksort(high)


class Node:
    def __init__(self, key, left=None, right=None):
        self.key, self.left, self.right = key, left, right
'''


class Vocabulary:
    """The file's byte-level BPE."""

    def __init__(self, keys: dict[str, Any]) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers

        tokens = keys["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
        self._tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        return self._tokenizer.encode(text).ids


class TransformersLlama:
    """LlamaForCausalLM in float32 with a GGUF file's weights."""

    def __init__(self, path: Path) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        reader = gguf.GGUFReader(path)
        keys = {name: field.contents() for name, field in reader.fields.items()}
        assert keys["general.architecture"] == "llama", keys["general.architecture"]
        self.vocabulary = Vocabulary(keys)
        heads, kv_heads = keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]
        config = LlamaConfig(
            vocab_size=keys["llama.vocab_size"],
            hidden_size=keys["llama.embedding_length"],
            intermediate_size=keys["llama.feed_forward_length"],
            num_hidden_layers=keys["llama.block_count"],
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            max_position_embeddings=keys["llama.context_length"],
            rms_norm_eps=keys["llama.attention.layer_norm_rms_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": keys["llama.rope.freq_base"]},
            tie_word_embeddings=True,
            attention_bias=False,
            mlp_bias=False,
        )
        names = {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }
        state = {}
        for tensor in reader.tensors:
            values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type))
            if tensor.name == "token_embd.weight":
                name = "model.embed_tokens.weight"
            elif tensor.name == "output_norm.weight":
                name = "model.norm.weight"
            else:
                _, layer, part, _ = tensor.name.split(".")
                name = f"model.layers.{layer}.{names[part]}.weight"
                if part in ("attn_q", "attn_k"):
                    # GGUF interleaves the two halves of each head; transformers rotates halves.
                    count = heads if part == "attn_q" else kv_heads
                    values = values.reshape(count, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            state[name] = torch.from_numpy(np.ascontiguousarray(values))
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        with torch.device("meta"):
            self._model = LlamaForCausalLM(config)
        self._model.to_empty(device="cpu")
        self._model.load_state_dict(state, strict=True)
        # The rotary frequencies are a buffer that is not part of the state.
        self._model.model.rotary_emb = type(self._model.model.rotary_emb)(config=config)
        self._model.eval()

    def logits(self, token_ids: list[int]) -> np.ndarray:
        """float32 [tokens, vocab]."""
        import torch

        with torch.inference_mode():
            out = self._model(input_ids=torch.tensor([token_ids]), use_cache=False)
        return out.logits[0].numpy()


def prompts(vocabulary: Vocabulary) -> dict[str, list[int]]:
    """The prompts that are compared: short, 600 tokens of English, several scripts, code."""
    from pydoc_data.topics import topics

    return {
        "short": vocabulary.encode(SHORT),
        "long": vocabulary.encode(topics["assignment"])[:600],
        "scripts": vocabulary.encode(SCRIPTS),
        "code": vocabulary.encode(CODE),
    }


def kept(logits: np.ndarray, positions: np.ndarray) -> dict[str, np.ndarray]:
    """The most likely tokens of some positions, and what all the others together come to."""
    rows = logits[positions].astype(np.float64)
    ids = np.argsort(-rows, axis=1, kind="stable")[:, :TOP]
    largest = rows.max(axis=1)
    total = largest + np.log(np.exp(rows - largest[:, None]).sum(axis=1))
    return {
        "positions": positions.astype(np.int32),
        "top_ids": ids.astype(np.int32),
        "top_logits": np.take_along_axis(rows, ids, axis=1).astype(np.float32),
        "logsumexp": total,
    }


def main() -> None:
    """Write the kept logits."""
    model, target = Path(sys.argv[1]), Path(sys.argv[2])
    reference = TransformersLlama(model)
    arrays = {}
    for name, token_ids in prompts(reference.vocabulary).items():
        last = len(token_ids) - 1
        positions = np.unique(np.linspace(0, last, min(last + 1, 24)).astype(int))
        arrays[f"{name}.token_ids"] = np.array(token_ids, np.int32)
        for field, values in kept(reference.logits(token_ids), positions).items():
            arrays[f"{name}.{field}"] = values
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(target, **arrays)


if __name__ == "__main__":
    main()
