"""What goes in at the door and what comes out: requests and their streamed outputs. Plain frozen data that pickles."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardline.scheduler import InvalidParameterError, SamplingParams

Message = Mapping[str, Any]
"""One chat message: "role", "content" (text, None, or a list of {"type": "text", "text": ...} parts) and what else the
model's template reads."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to complete; give exactly one of `text`, `messages` and `token_ids`.

    Attributes:
        text: A raw prompt, tokenized as it is (with the model's own begin token, if it wants one).
        messages: A chat, rendered by the model's template.
        token_ids: A tokenized prompt.
        params: How tokens are chosen and when they end.
        priority: Lower runs first.
        request_id: Unique among those that run; drawn when None.
        tools: Passed to the chat template.
        template_arguments: Further variables for the chat template.
    """

    text: str | None = None
    messages: tuple[Message, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    request_id: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def checked_id(request: Request) -> str:
    """The id that a request runs under, drawn if it names none. Raises InvalidParameterError."""
    if not isinstance(request.params, SamplingParams):
        raise InvalidParameterError("params", request.params, "SamplingParams")
    if request.request_id is None:
        return uuid.uuid4().hex
    if not isinstance(request.request_id, str) or not request.request_id:
        raise InvalidParameterError("request_id", request.request_id, "a text that is not empty, or None")
    return request.request_id


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request, over all of its sequences.

    Attributes:
        prompt_tokens: Of the prompt, counted once.
        cached_tokens: Of these, found in the prefix cache.
        completion_tokens: Generated so far.
    """

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The chosen token's logprob and those of the most likely ones: (token id, logprob), most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one sequence of a request.

    The joined `text` of a sequence's deltas is its whole text: never half a character, never a part of a stop string.

    Attributes:
        request_id: The request.
        index: Which of its n sequences.
        text: New text; may be empty while a character or a possible stop string is not decided.
        token_ids: New tokens (empty in a delta that only ends the sequence).
        logprobs: One for each of `token_ids`, if asked for.
        finish_reason: None while it goes on; "stop", "length" or "abort".
        stop_reason: The stop string or stop token id that ended it, if one did.
        usage: Counts so far.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None
    stop_reason: str | int | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole sequence, as collected from its deltas."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    stop_reason: str | int | None
    usage: Usage
