"""llama.cpp in a process of its own, for benchmarks/cpu.py: a JSON command a line on stdin, an answer a line on stdout.

Its time is `llama_decode` alone, without sampling, which is in its favour.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp as lib


class Peer:
    """One model, and a context for each number of sequences."""

    def __init__(self, path: str, threads: int, length: int, batch: int) -> None:
        lib.llama_backend_init()
        # It tells a lot about each tensor otherwise.
        self._quiet = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._threads = threads
        self._length = length
        self._batch = batch
        self._contexts: dict[int, Any] = {}

    def decode(self, prompts: Sequence[Sequence[int]], warm: int, steps: int) -> float:
        """Tokens a second over all sequences, each behind its own prompt."""
        context = self._context(len(prompts))
        for sequence, prompt in enumerate(prompts):
            for start in range(0, len(prompt), self._batch):
                piece = prompt[start : start + self._batch]
                self._run(context, [(token, start + i, sequence, False) for i, token in enumerate(piece)])
        began = 0.0
        for step in range(warm + steps):
            if step == warm:
                began = time.perf_counter()
            rows = [(prompt[step % len(prompt)], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)]
            self._run(context, rows)
        return len(prompts) * steps / (time.perf_counter() - began)

    def prompt(self, tokens: Sequence[int]) -> float:
        """Prompt tokens a second of one sequence."""
        context = self._context(1)
        began = time.perf_counter()
        for start in range(0, len(tokens), self._batch):
            piece = tokens[start : start + self._batch]
            last = len(tokens) - 1
            self._run(context, [(token, start + i, 0, start + i == last) for i, token in enumerate(piece)])
        return len(tokens) / (time.perf_counter() - began)

    def _context(self, sequences: int) -> Any:
        """An empty context."""
        if sequences not in self._contexts:
            params = lib.llama_context_default_params()
            params.n_ctx = self._length * sequences
            params.n_seq_max = sequences
            params.n_batch = params.n_ubatch = self._batch
            params.n_threads = params.n_threads_batch = self._threads
            self._contexts[sequences] = lib.llama_init_from_model(self._model, params)
        context = self._contexts[sequences]
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        return context

    def _run(self, context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        batch = lib.llama_batch_init(len(rows), 0, 1)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        batch.n_tokens = len(rows)
        code = lib.llama_decode(context, batch)
        lib.llama_synchronize(context)
        lib.llama_batch_free(batch)
        if code:
            raise SystemExit(f"llama_decode failed with {code}")


def main() -> None:
    """Serve until stdin ends."""
    peer: Peer | None = None
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("do")
        if name == "open":
            peer = Peer(**command)
            answer: Any = {
                "version": lib.__version__,
                "system": lib.llama_print_system_info().decode(),
            }
        else:
            assert peer is not None, "open first"
            answer = getattr(peer, name)(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
