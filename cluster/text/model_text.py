"""A model's side of text: prompts to token ids, token ids to streamed text."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from shardline.cluster.errors import TemplateError
from shardline.cluster.request import Request
from shardline.cluster.text.chat_template import ChatTemplate
from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.stop import StopMatcher
from shardline.cluster.text.tokenizer import Tokenizer
from shardline.scheduler import InvalidParameterError, RequestTooLargeError
from shardline.stage import Checkpoint


class ModelText:
    """The tokenizer and the chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | TemplateError) -> None:
        """`template`: why there is none, for a model without one; chats are then refused in these words."""
        self.tokenizer = tokenizer
        self.template = template
        # One thread, so that prompts keep their order and a long one never stops the event loop.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardline-text")
        self._longest_token = max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelText:
        """Read a model file's tokenizer and template. Raises TokenizerError, which names the field."""
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
        try:
            template: ChatTemplate | TemplateError = ChatTemplate.from_metadata(checkpoint.metadata)
        except TemplateError as error:
            template = error
        return cls(tokenizer, template)

    async def prompt_ids(self, request: Request, max_context: int) -> tuple[int, ...]:
        """A request's prompt as token ids; may be empty, and too long.

        Raises:
            InvalidParameterError: not exactly one prompt, or a part of it has a wrong type.
            RequestTooLargeError: its text cannot be `max_context` tokens or less, whatever they are.
            TemplateError: the chat template refuses the messages, or there is none.
        """
        given = [name for name in ("text", "messages", "token_ids") if getattr(request, name) is not None]
        if len(given) != 1:
            raise InvalidParameterError(
                "prompt", " and ".join(given) or None, "exactly one of text, messages and token_ids"
            )
        if request.token_ids is not None:
            return _integers(request.token_ids)
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._encode, request, max_context)

    def sequence(self, prompt_ids: Sequence[int], stops: Sequence[str]) -> SequenceText:
        """The text of a new sequence after that prompt."""
        return SequenceText(Detokenizer(self.tokenizer, previous_id=prompt_ids[-1]), StopMatcher(stops))

    def close(self) -> None:
        """Give the thread back."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _encode(self, request: Request, max_context: int) -> tuple[int, ...]:
        text = request.text if request.text is not None else self._rendered(request)
        if not isinstance(text, str):
            raise InvalidParameterError("text", text, "a text")
        # Seen before it is tokenized, which would take its time from all others' prompts. Composed characters are the
        # one way in which a text gets shorter than it was, by less than four.
        fewest = len(text) // (4 * self._longest_token)
        if fewest > max_context:
            raise RequestTooLargeError(
                f"the prompt has {len(text)} characters, which is more than {fewest} tokens, and the context holds "
                f"{max_context}: shorten the prompt, or start with a longer context"
            )
        # Who writes a whole prompt writes the model's own marks too.
        return tuple(self.tokenizer.encode(text, add_special=True, parse_special=True))

    def _rendered(self, request: Request) -> str:
        if isinstance(self.template, TemplateError):
            raise TemplateError(*self.template.args)
        assert request.messages is not None
        variables = request.template_arguments
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidParameterError("template_arguments", variables, "a mapping of names to values")
        taken = {"messages", "add_generation_prompt", "tools"} & variables.keys()
        if taken:
            raise InvalidParameterError("template_arguments", sorted(taken), "names that are not the request's own")
        return self.template.render(request.messages, tools=request.tools, **variables)


class SequenceText:
    """The text of one sequence, from its tokens as they come: whole characters, and no part of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched

    def push(self, token_id: int) -> str:
        """The text that a new token makes certain; may be empty."""
        return self._stops.feed(self._detokenizer.feed((token_id,)))

    def finish(self) -> str:
        """What was held back, when no more tokens come; a stop string may still be found in it."""
        text = self._stops.feed(self._detokenizer.finish())
        return text if self._stops.matched is not None else text + self._stops.finish()


def _integers(values: object) -> tuple[int, ...]:
    """Token ids of any integer type, NumPy's included."""
    if isinstance(values, str | bytes) or (not isinstance(values, Sequence) and not hasattr(values, "__array__")):
        raise InvalidParameterError("token_ids", values, "a tuple of token ids")
    try:
        return tuple(operator.index(value) for value in values)  # type: ignore[attr-defined]
    except TypeError:
        raise InvalidParameterError("token_ids", values, "a tuple of token ids") from None
