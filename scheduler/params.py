"""What a user may ask of one request. Checked when built, so that a wrong value never reaches the scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardline.scheduler.errors import InvalidParameterError

MAX_LOGPROBS = 64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of a request are chosen and when they end.

    Attributes:
        max_tokens: The most tokens to generate; None means as many as the context holds.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        min_p: Keep tokens at least this fraction as likely as the most likely one; 0 keeps all.
        repetition_penalty: Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: Subtracted once from the logit of each token in the output; 0 is off.
        frequency_penalty: Subtracted per occurrence from the logit of each token in the output; 0 is off.
        logit_bias: (token id, bias) pairs, added to the logits.
        seed: The key of the noise. With the same seed, prompt and parameters the tokens are the same. None draws one.
        logprobs: None for none; n for the chosen token's logprob and those of the n most likely tokens. They are of the
            model's own distribution, before penalties, bias, temperature and filters.
        stop: Strings that end the text; none of a stop string is ever part of the text.
        stop_token_ids: Tokens that end the sequence, besides the model's own end tokens.
        ignore_eos: Do not end at the model's own end tokens.
        n: How many sequences to generate from the prompt. Sequence i draws its noise from a seed of its own, derived
            from `seed` and i (sequence 0 uses `seed` itself).

    Raises:
        InvalidParameterError: a value is out of range; names the field, the value and what is allowed.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, None)
        _number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, above_low=True)
        _number("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _integer("seed", self.seed, 0, 2**64 - 1, optional=True)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("n", self.n, 1, 128)
        _boolean("ignore_eos", self.ignore_eos)
        for entry in _sequence("logit_bias", self.logit_bias):
            if not isinstance(entry, tuple) or len(entry) != 2:
                raise InvalidParameterError("logit_bias", entry, "a (token id, bias) pair")
            _integer("logit_bias token id", entry[0], 0, 2**31 - 1)
            _number("logit_bias value", entry[1], -1000.0, 1000.0)
        for text in _sequence("stop", self.stop):
            if not isinstance(text, str) or not text:
                raise InvalidParameterError("stop", text, "a text that is not empty")
        for token_id in _sequence("stop_token_ids", self.stop_token_ids):
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token needs the tokens before it."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _sequence(field: str, value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple):
        raise InvalidParameterError(field, value, "a tuple")
    return value


def _boolean(field: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameterError(field, value, "True or False")


def _integer(field: str, value: object, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    allowed = (
        f"an integer from {low}" + (f" to {high}" if high is not None else " up") + (" or None" if optional else "")
    )
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise InvalidParameterError(field, value, allowed)


def _number(field: str, value: object, low: float, high: float, *, above_low: bool = False) -> None:
    allowed = f"a number {'above' if above_low else 'from'} {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidParameterError(field, value, allowed)
    if value > high or value < low or (above_low and value == low):
        raise InvalidParameterError(field, value, allowed)
