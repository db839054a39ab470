"""The tensors of a model by role: what each layer has, in which shape, whatever the file calls it."""

from __future__ import annotations

from shardline.stage.spec import ModelSpec

EXPERT_ROLES = ("expert_gate", "expert_up", "expert_down")


def matrix_shapes(spec: ModelSpec, layer: int | None) -> dict[str, tuple[int, int]]:
    """Role -> (N, K) of a layer's matrices, or (None) of the model's own. An expert role has that shape an expert."""
    hidden = spec.hidden_size
    if layer is None:
        shape = (spec.vocab_size, hidden)
        return {"embed": shape} if spec.tied_embeddings else {"embed": shape, "head": shape}
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    experts = spec.experts
    if not spec.layers[layer].experts:
        width = spec.intermediate_size
        return shapes | {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    assert experts is not None
    width = experts.intermediate_size
    shapes |= {"expert_gate": (width, hidden), "expert_up": (width, hidden), "expert_down": (hidden, width)}
    if experts.shared_size:
        width = experts.shared_size
        shapes |= {"shared_gate": (width, hidden), "shared_up": (width, hidden), "shared_down": (hidden, width)}
    return shapes


def vector_shapes(spec: ModelSpec, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Role -> shape of a layer's float tensors, or (None) of the model's own."""
    hidden = spec.hidden_size
    if layer is None:
        return {"final_norm": (hidden,)}
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm": (hidden,), "mlp_norm": (hidden,)}
    if spec.post_norms:
        shapes |= {"attention_post_norm": (hidden,), "mlp_post_norm": (hidden,)}
    if spec.qkv_bias:
        shapes |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
    if spec.output_bias:
        shapes["o_bias"] = (hidden,)
    if spec.qk_norm is not None:
        whole = spec.qk_norm == "row"
        shapes |= {"q_norm": (queries if whole else spec.head_dim,), "k_norm": (keys if whole else spec.head_dim,)}
    if spec.sinks:
        shapes["sinks"] = (spec.num_heads,)
    experts = spec.experts
    if not spec.layers[layer].experts:
        if spec.mlp_bias:
            shapes |= {
                "gate_bias": (spec.intermediate_size,),
                "up_bias": (spec.intermediate_size,),
                "down_bias": (hidden,),
            }
        return shapes
    assert experts is not None
    count, width = experts.num_experts, experts.intermediate_size
    shapes["router"] = (count, hidden)
    if experts.router_bias:
        shapes["router_bias"] = (count,)
    if experts.choice_bias:
        shapes["choice_bias"] = (count,)
    if experts.biases:
        shapes |= {
            "expert_gate_bias": (count, width),
            "expert_up_bias": (count, width),
            "expert_down_bias": (count, hidden),
        }
    if experts.shared_gate:
        shapes["shared_expert_gate"] = (hidden,)
    return shapes
