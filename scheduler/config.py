"""The scheduler's limits and policy: one frozen object, checked when built."""

from __future__ import annotations

from dataclasses import dataclass

from shardline.scheduler.errors import InvalidParameterError

MIN_BLOCK_SIZE = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and policy.

    Attributes:
        num_blocks: Blocks in the pool: the smallest stage's.
        block_size: Tokens a block: a power of two from 8.
        max_context: The most tokens of one sequence, prompt and output.
        depth: The most plans in flight.
        max_step_tokens: The most rows of one step.
        prefill_chunk: The most prompt tokens of one sequence in one step.
        max_sequences: The most sequences that hold blocks at once.
        min_microbatch: Do not spread ready sequences thinner than this over the free slots of the pipeline: a step of
            fewer rows is planned only while nothing else is in flight. 1 where each stage has a device of its own;
            more where stages share one; `max_sequences` on one GPU, where a step of few rows takes as long as one of
            many.
        max_waiting: The most requests that may wait; more are refused.
        watermark: Blocks that an admission must leave free.
        prefix_cache: Whether full blocks of ended and running sequences are found again by their tokens.
        eos_token_ids: The model's own end tokens.
        vocab_size: For checking token ids.
        priority_span: A request is overtaken by at most this many later requests for each priority that they are ahead
            of it, so that a steady stream of urgent requests does not starve the others.
        ahead: Plan a sequence's next token while the one before is still being sampled (see `plan.AHEAD`), so that the
            first stage has its next step when the last one ends its own. One of the `depth` plans is for that, the
            others are slots: 2 for one stage, one more than stages that each have a device. All of a group are in its
            plan then, and where one of them cannot be, no plan is made while every slot is taken.

    Raises:
        InvalidParameterError: a value is out of range; names the field, the value and what is allowed.
    """

    num_blocks: int
    block_size: int
    max_context: int
    depth: int
    max_step_tokens: int
    prefill_chunk: int
    max_sequences: int
    min_microbatch: int = 1
    max_waiting: int = 4096
    watermark: int = 0
    prefix_cache: bool = True
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 2**31 - 1
    priority_span: int = 1024
    ahead: bool = False

    def __post_init__(self) -> None:
        for field in (
            "num_blocks",
            "max_context",
            "depth",
            "max_step_tokens",
            "prefill_chunk",
            "max_sequences",
            "min_microbatch",
            "max_waiting",
            "vocab_size",
            "priority_span",
        ):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidParameterError(field, value, "an integer from 1 up")
        size = self.block_size
        if isinstance(size, bool) or not isinstance(size, int) or size < MIN_BLOCK_SIZE or size & (size - 1):
            raise InvalidParameterError("block_size", size, f"a power of two from {MIN_BLOCK_SIZE} up")
        if not isinstance(self.ahead, bool):
            raise InvalidParameterError("ahead", self.ahead, "True or False")
        if not isinstance(self.watermark, int) or not 0 <= self.watermark < self.num_blocks:
            raise InvalidParameterError("watermark", self.watermark, f"an integer from 0 to {self.num_blocks - 1}")
