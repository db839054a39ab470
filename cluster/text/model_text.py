"""A model's side of text: prompts to token ids, token ids to streamed text."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shardline.cluster.errors import TemplateError, TokenizerError
from shardline.cluster.request import Request
from shardline.cluster.text.chat_template import ChatTemplate
from shardline.cluster.text.detokenizer import Detokenizer
from shardline.cluster.text.folder_marks import FolderMarks
from shardline.cluster.text.folder_template import template_from_folder
from shardline.cluster.text.folder_tokenizer import tokenizer_from_folder
from shardline.cluster.text.generation_defaults import GenerationDefaults
from shardline.cluster.text.stop import StopMatcher
from shardline.cluster.text.tokenizer import Tokenizer
from shardline.scheduler import InvalidParameterError, RequestTooLargeError
from shardline.stage import Checkpoint


class ModelText:
    """The tokenizer and the chat template of one model.

    Attributes:
        tokenizer: Its tokenizer.
        template: Its chat template, or why it has none.
        generation_defaults: How its makers advise to sample.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | TemplateError,
        *,
        generation_defaults: GenerationDefaults | None = None,
        template_adds_marks: bool = False,
    ) -> None:
        """
        Args:
            tokenizer: Its tokenizer.
            template: Its chat template; or why there is none, and chats are then refused in these words.
            generation_defaults: How to sample, if the model says.
            template_adds_marks: Whether a rendered chat is the whole prompt, to which no begin token is added.
        """
        self.tokenizer = tokenizer
        self.template = template
        self.generation_defaults = generation_defaults or GenerationDefaults()
        self._template_adds_marks = template_adds_marks
        # One thread, so that prompts keep their order and a long one never stops the event loop.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardline-text")

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelText:
        """Read a model's tokenizer and template.

        Raises TokenizerError, which names the field, where they are damaged, not supported or another model's.
        """
        num_ids = checkpoint.spec.vocab_size
        if checkpoint.text_folder is not None:
            return cls.from_folder(checkpoint.text_folder, num_ids)
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
        _check_size(tokenizer, num_ids, "tokenizer.ggml.tokens")
        try:
            template: ChatTemplate | TemplateError = ChatTemplate.from_metadata(checkpoint.metadata)
        except TemplateError as error:
            template = error
        return cls(tokenizer, template, generation_defaults=GenerationDefaults.from_metadata(checkpoint.metadata))

    @classmethod
    def from_folder(cls, folder: Path, num_ids: int | None) -> ModelText:
        """Read the tokenizer and the template of a Hugging Face folder.

        Args:
            folder: The folder. Names in its files are never used as paths.
            num_ids: The rows of the model's embedding; None if they are not known.

        Raises:
            TokenizerError: Something is missing, damaged, not supported or another model's; names the file, the field
                and the remedy.
        """
        marks = FolderMarks.read(folder)
        tokenizer = tokenizer_from_folder(folder, marks)
        if num_ids is not None:
            _check_size(tokenizer, num_ids, str(folder))
        try:
            template: ChatTemplate | TemplateError = template_from_folder(folder, marks)
        except TemplateError as error:
            template = error
        return cls(tokenizer, template, generation_defaults=marks.defaults, template_adds_marks=True)

    @property
    def num_ids(self) -> int:
        """The ids from 0 on that can have a token. The rows of the model's matrices past them are padding, which must
        not be sampled."""
        return self.tokenizer.vocab_size

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
        is_chat = request.text is None
        text = self._rendered(request) if is_chat else request.text
        if not isinstance(text, str):
            raise InvalidParameterError("text", text, "a text")
        # Seen before it is tokenized, which would take its time from all others' prompts.
        fewest = self.tokenizer.fewest_tokens(text)
        if fewest > max_context:
            raise RequestTooLargeError(
                f"the prompt has {len(text)} characters, which is more than {fewest} tokens, and the context holds "
                f"{max_context}: shorten the prompt, or start with a longer context"
            )
        # Who writes a whole prompt writes the model's own marks too.
        add_special = not (is_chat and self._template_adds_marks)
        return tuple(self.tokenizer.encode(text, add_special=add_special, parse_special=True))

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


def _check_size(tokenizer: Tokenizer, num_ids: int, where: str) -> None:
    largest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids, tokenizer.bos_id or 0)
    if largest >= num_ids:
        raise TokenizerError(
            where,
            f"has a token with the id {largest} ({tokenizer.token_text(largest)!r}), but the model's vocabulary ends at"
            f" {num_ids - 1}: the tokenizer is another model's, or tokens were added to it without the model",
        )


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
        return self._stops.feed(self._detokenizer.push(token_id))

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
