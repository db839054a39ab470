"""What is refused at the door: requests that are wrong, and requests that could never run here."""

from __future__ import annotations

from shardline.scheduler.config import SchedulerConfig
from shardline.scheduler.errors import InvalidParameterError, RequestTooLargeError
from shardline.scheduler.request import NewRequest


def check_request(request: NewRequest, config: SchedulerConfig) -> None:
    """Raise InvalidParameterError for what no configuration would take."""
    if not request.prompt_ids:
        raise InvalidParameterError("prompt_ids", request.prompt_ids, "at least one token")
    if isinstance(request.priority, bool) or not isinstance(request.priority, int):
        raise InvalidParameterError("priority", request.priority, "an integer")
    params = request.params
    if params.seed is None and params.temperature > 0:
        raise InvalidParameterError("seed", None, "a seed, which the caller draws, when temperature is above 0")
    last = config.vocab_size - 1
    for field, token_ids in (
        ("prompt_ids", request.prompt_ids),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", tuple(token_id for token_id, _bias in params.logit_bias)),
    ):
        # Prompts are long: the usual case is decided without a loop in Python.
        if not token_ids or (set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) <= last):
            continue
        wrong = next(token_id for token_id in token_ids if type(token_id) is not int or not 0 <= token_id <= last)
        raise InvalidParameterError(field, wrong, f"token ids from 0 to {last}")


def most_tokens(request: NewRequest, config: SchedulerConfig) -> int:
    """The tokens, prompt and output, at which a sequence of the request ends with "length".

    That is where `max_tokens` or the context ends, whichever comes first; and without `max_tokens` also where the whole
    pool is full of this one sequence. The last token of a sequence is never run, so it takes no place in the pool.

    Raises:
        RequestTooLargeError: the prompt leaves no room for one token in the context or the pool, or the tokens that
            were asked for do not fit the pool; with the numbers and the remedy.
    """
    prompt, wanted = len(request.prompt_ids), request.params.max_tokens
    capacity = config.num_blocks * config.block_size
    if prompt >= config.max_context:
        raise RequestTooLargeError(
            f"the prompt has {prompt} tokens, and the context holds {config.max_context}, of which at least one is to "
            f"be generated: shorten the prompt to {config.max_context - 1} tokens, or start with a longer context"
        )
    in_context = config.max_context if wanted is None else min(config.max_context, prompt + wanted)
    if prompt > capacity:
        raise RequestTooLargeError(
            f"the prompt of {prompt} tokens needs {_blocks(prompt, config)}: shorten it to {capacity} tokens, or start "
            "with more blocks"
        )
    if wanted is not None and in_context - 1 > capacity:
        raise RequestTooLargeError(
            f"the prompt of {prompt} tokens with max_tokens={wanted} needs {_blocks(in_context - 1, config)}: lower "
            f"max_tokens to {capacity + 1 - prompt}, or start with more blocks"
        )
    return min(in_context, capacity + 1)


def _blocks(num_tokens: int, config: SchedulerConfig) -> str:
    size, there = config.block_size, config.num_blocks
    return f"{-(-num_tokens // size)} blocks of {size} tokens, and the pool has {there} ({there * size} tokens)"
