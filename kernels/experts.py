"""A mixture of experts as data: how a router chooses, and one expert's matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardline.kernels.matrix import GroupedMatrix

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""What joins a gate g and an up u:

- silu: silu(g) * u.
- gelu_tanh: gelu(g) * u, with the tanh form of gelu.
- clamped_swiglu: g' = min(g, 7), u' = clamp(u, -7, 7); g' * sigmoid(1.702 g') * (u' + 1)  (gpt-oss).
"""


@dataclass(frozen=True, slots=True)
class RouterRule:
    """From a row's router logits to the experts that it goes to, best first, and their shares.

    A score is the logit through `scoring`. Experts are *chosen* by score + choice bias (if there is one; it has no part
    in the shares), equal ones by the lowest id. With groups, experts lie in `num_groups` equal runs of ids; a group is
    worth the sum of its two best choices, and only the `groups_kept` best groups (ties: the lowest) are chosen from.

    Attributes:
        experts_per_token: How many are chosen.
        scoring: "softmax" over all experts, "sigmoid" of each, or "softmax_of_chosen": choose by logit, then softmax
            over the chosen alone.
        normalise: Divide the chosen scores by their sum.
        scale: Multiplies the shares at last.
        num_groups, groups_kept: 1 and 1 without groups.
    """

    experts_per_token: int
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    groups_kept: int = 1


@dataclass(frozen=True, slots=True)
class Expert:
    """One expert: gate and up [F, K], down [K, F]."""

    gate: GroupedMatrix
    up: GroupedMatrix
    down: GroupedMatrix
