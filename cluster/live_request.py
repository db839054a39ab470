"""A request that has not ended: its sequences' text, and the deltas that come of its tokens."""

from __future__ import annotations

from shardline.cluster.inbox import Inbox
from shardline.cluster.request import Delta, TokenLogprob, Usage
from shardline.cluster.text.model_text import ModelText, SequenceText
from shardline.scheduler import SamplingParams, SequenceUpdate


class LiveRequest:
    """What the engine keeps of a request until all of its sequences have ended.

    Attributes:
        request_id, params: The request's.
        inbox: Where its deltas go.
    """

    def __init__(self, request_id: str, params: SamplingParams, inbox: Inbox) -> None:
        """Its prompt is not known yet."""
        self.request_id = request_id
        self.params = params
        self.inbox = inbox
        # The sequences that go on; without text until the prompt is known.
        self._texts: dict[int, SequenceText | None] = dict.fromkeys(range(params.n))
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._completion_tokens = 0

    @property
    def running(self) -> tuple[int, ...]:
        """Indices of the sequences that go on."""
        return tuple(self._texts)

    @property
    def has_ended(self) -> bool:
        """Whether none goes on."""
        return not self._texts

    def runs(self, index: int) -> bool:
        """Whether that sequence goes on."""
        return index in self._texts

    def accept(self, prompt_ids: tuple[int, ...], text: ModelText) -> None:
        """Its prompt is known and tokens will come."""
        self._prompt_tokens = len(prompt_ids)
        for index in self._texts:
            self._texts[index] = text.sequence(prompt_ids, self.params.stop)

    def advance(self, update: SequenceUpdate) -> Delta:
        """The delta of a token of a running sequence. It may end the sequence where the update does not: a stop string
        was completed."""
        index, token = update.index, update.token
        text = self._texts[index]
        assert text is not None, "a token before the prompt"
        self._cached_tokens = max(self._cached_tokens, update.cached_tokens)
        self._completion_tokens += 1
        logprobs: tuple[TokenLogprob, ...] = ()
        if token.logprob is not None:
            logprobs = (TokenLogprob(token.token_id, token.logprob, token.top_logprobs),)
        new_text = ""
        stop_reason: str | int | None = None
        if update.finish_reason == "stop":
            # A stop token ends the text; its own is not part of it.
            stop_reason = token.token_id
        else:
            new_text = text.push(token.token_id)
        finish_reason = update.finish_reason
        if finish_reason is not None or text.stopped_by is not None:
            new_text += text.finish()
            if text.stopped_by is not None:
                finish_reason, stop_reason = "stop", text.stopped_by
            del self._texts[index]
        return Delta(
            self.request_id,
            index,
            new_text,
            (token.token_id,),
            logprobs,
            finish_reason,
            stop_reason,
            self._usage(),
        )

    def abort(self, index: int) -> Delta:
        """The last delta of a running sequence that ends now, with the text that was held back."""
        text = self._texts.pop(index)
        rest = "" if text is None else text.finish()
        return Delta(self.request_id, index, rest, (), (), "abort", None, self._usage())

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._cached_tokens, self._completion_tokens)
