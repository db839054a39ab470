"""Model families as data: what sets each apart that its files' keys do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardline.kernels import Activation

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Which layers have a sliding window, if the file has a window at all.

    Attributes:
        period: The last of each `period` layers sees everything, the others the window; 0: every layer has it.
        default: The window of a file that names none; 0: none.
        local_base: The rotary base of the layers with a window, which are not scaled then; None: as of the others.
    """

    period: int
    default: int = 0
    local_base: float | None = None


@dataclass(frozen=True, slots=True)
class ExpertRule:
    """A family's mixture of experts, where a file has one.

    Attributes:
        scoring, normalise: See `RouterRule`; keys of the file can say otherwise.
        required: Every file of the family has one.
        width_is_shared_out: A file without the experts' width means the dense width divided by the experts a token.
        shared: Whether there is a shared expert, and whether it is gated.
        router_bias, choice_bias, biases: See `ExpertsSpec`.
    """

    scoring: Scoring = "softmax"
    normalise: bool = True
    required: bool = True
    width_is_shared_out: bool = False
    shared: Literal["gated", "plain"] | None = None
    router_bias: bool = False
    choice_bias: bool = False
    biases: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a family apart.

    Attributes:
        name: `general.architecture` in the file, and the prefix of its keys.
        interleaved: How rotary pairs lie; see `RopeSpec`. GGUF has q and k of llama and smollm3 permuted for it.
        names: Names of a layer's tensors that differ from the usual ones, by role.
        fused_mlp: The tensor ffn_up has the gate's channels, then the up's.
        qkv_bias, output_bias, mlp_bias: Whether there are these biases; None when that depends on the file.
        qk_norm: See `ModelSpec`; `qk_norm_depends`: files may also have none.
        sinks, post_norms, activation: See `ModelSpec`.
        head_required: The head is never the embedding.
        may_predict: A file may have more layers behind the model's, which predict further tokens; they are not used.
        windows: None refuses a window shorter than the context.
        nope_period: The last of each so many layers does not turn queries and keys; 0: all turn.
        softcaps: Of attention and of the logits, for a file that names none.
        scales_embedding: Embeddings are multiplied by the root of their size.
        scale_of_mean_head: Numbers of layers with which attention's scale is of hidden size / heads, not of the head's.
        yarn_truncates: See `rope_scaling.yarn`.
        experts: None when it has no mixture of experts.
    """

    name: str
    interleaved: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    fused_mlp: bool = False
    qkv_bias: bool | None = False
    output_bias: bool | None = False
    mlp_bias: bool | None = False
    qk_norm: Literal["head", "row"] | None = None
    qk_norm_depends: bool = False
    sinks: bool = False
    post_norms: bool = False
    activation: Activation = "silu"
    head_required: bool = False
    may_predict: bool = False
    windows: WindowRule | None = None
    nope_period: int = 0
    softcaps: tuple[float, float] = (0.0, 0.0)
    scales_embedding: bool = False
    scale_of_mean_head: tuple[int, ...] = ()
    yarn_truncates: bool = True
    experts: ExpertRule | None = None


# These families name the norm before the MLP after its place behind attention.
_NORM_BEHIND_ATTENTION = {"mlp_norm": "post_attention_norm.weight"}

FAMILIES = {
    family.name: family
    for family in (
        # Llama, Mistral, Mixtral. Mistral's window, where a file names one, is every layer's.
        Family(
            "llama",
            interleaved=True,
            qkv_bias=None,
            output_bias=None,
            mlp_bias=None,
            windows=WindowRule(period=0),
            experts=ExpertRule(required=False),
        ),
        Family("qwen2", qkv_bias=True),
        Family("qwen3", qk_norm="head"),
        Family(
            "qwen2moe",
            qkv_bias=True,
            head_required=True,
            experts=ExpertRule(normalise=False, width_is_shared_out=True, shared="gated"),
        ),
        Family("qwen3moe", qk_norm="head", experts=ExpertRule(width_is_shared_out=True)),
        Family("olmoe", qk_norm="row", head_required=True, experts=ExpertRule(normalise=False)),
        Family("phi3", fused_mlp=True, windows=WindowRule(period=0)),
        Family(
            "gemma2",
            post_norms=True,
            activation="gelu_tanh",
            windows=WindowRule(period=2, default=4096),
            softcaps=(50.0, 30.0),
            scales_embedding=True,
            scale_of_mean_head=(46,),  # 27B
        ),
        Family(
            "gemma3",
            qk_norm="head",
            post_norms=True,
            activation="gelu_tanh",
            windows=WindowRule(period=6, local_base=10000.0),
            scales_embedding=True,
            scale_of_mean_head=(62,),  # 27B
        ),
        Family("glm4", interleaved=True, fused_mlp=True, qkv_bias=None, post_norms=True, may_predict=True),
        Family(
            "glm4moe",
            names=_NORM_BEHIND_ATTENTION,
            qkv_bias=None,
            qk_norm="head",
            qk_norm_depends=True,
            may_predict=True,
            experts=ExpertRule(scoring="sigmoid", normalise=False, shared="plain", choice_bias=True),
        ),
        Family(
            "gpt-oss",
            names=_NORM_BEHIND_ATTENTION,
            qkv_bias=True,
            output_bias=True,
            sinks=True,
            activation="clamped_swiglu",
            head_required=True,
            windows=WindowRule(period=2),
            # As the model was made; its ramp has no whole ends.
            yarn_truncates=False,
            experts=ExpertRule(scoring="softmax_of_chosen", router_bias=True, biases=True),
        ),
        Family("smollm3", interleaved=True, qkv_bias=None, nope_period=4),
    )
}
