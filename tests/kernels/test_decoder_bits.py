"""All ops of a decoder together, through the Backend alone: tokens and logprobs of sequences in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from shardline.kernels import Backend, GroupedMatrix, KVLayout, RopeTable, Rows, SampleOutput, SamplingBatch

# None of these is a multiple of a tile.
HIDDEN, FFN, VOCAB, QUERY_HEADS, KV_HEADS, DIM, ROTARY, LAYERS = 96, 160, 515, 6, 2, 48, 32, 3
CONTEXT = 360
MAX_ROWS = 96
EPS = 1e-5

Choice = tuple[int, bytes, bytes, bytes]
"""A sampled token: its id and the bytes of its logprob and of the most likely ones."""


class TinyDecoder:
    """A decoder with random weights, some in 4 bits and some in 8, and a pool for `blocks` blocks."""

    def __init__(
        self, backend: Backend, matrix: Callable[..., GroupedMatrix], *, blocks: int, block_size: int, dtype: str
    ) -> None:
        rng = np.random.default_rng(11)
        self.backend = backend
        self.block_size = block_size
        columns = (QUERY_HEADS + 2 * KV_HEADS) * DIM

        def vector(size: int) -> np.ndarray:
            return backend.upload((1 + 0.2 * rng.standard_normal(size)).astype(np.float32))

        self.embed = backend.load_matrix([matrix(VOCAB, HIDDEN, bits=8)])
        self.layers = [
            {
                "norms": (vector(HIDDEN), vector(HIDDEN)),
                "qk": (vector(DIM), vector(DIM)),
                "bias": vector(columns),
                "qkv": backend.load_matrix(
                    [
                        matrix(QUERY_HEADS * DIM, HIDDEN, seed=i),
                        matrix(KV_HEADS * DIM, HIDDEN, seed=10 + i),
                        matrix(KV_HEADS * DIM, HIDDEN, seed=20 + i, bits=8),
                    ]
                ),
                "output": backend.load_matrix([matrix(HIDDEN, QUERY_HEADS * DIM, seed=i)]),
                "gate_up": backend.load_gated(matrix(FFN, HIDDEN, seed=30 + i), matrix(FFN, HIDDEN, seed=40 + i)),
                "down": backend.load_matrix([matrix(HIDDEN, FFN, seed=i, dtype="float32")]),
            }
            for i in range(LAYERS)
        ]
        self.final_norm = vector(HIDDEN)
        angles = np.arange(CONTEXT)[:, None] * 1e4 ** (-np.arange(ROTARY // 2) * 2 / ROTARY)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.rope = RopeTable(backend.upload(cos), backend.upload(sin), False)
        self.cache = backend.allocate_kv(KVLayout(LAYERS, blocks, block_size, KV_HEADS, DIM, dtype))
        self.ids, self.positions, self.slots, self.sequences, self.sampled = (
            backend.empty((MAX_ROWS,), "int32") for _ in range(5)
        )
        self.tables = backend.empty((40, CONTEXT // 8), "int32")
        self.x, self.gathered = (backend.empty((MAX_ROWS, HIDDEN), "float32") for _ in range(2))
        self.normed, self.head_normed = (backend.activations(MAX_ROWS, HIDDEN) for _ in range(2))
        self.qkv = backend.empty((MAX_ROWS, columns), "float32")
        self.attended = backend.activations(MAX_ROWS, QUERY_HEADS * DIM)
        self.gated = backend.activations(MAX_ROWS, FFN)
        self.logits = backend.empty((MAX_ROWS, VOCAB), "float32")

    def issue(self, count: int) -> None:
        backend, x = self.backend, self.x
        rows = Rows(count, self.positions, self.slots, self.sequences, self.tables)
        backend.embedding(self.ids, self.embed, x, count)
        backend.begin_step(rows, self.cache, QUERY_HEADS)
        for i, layer in enumerate(self.layers):
            q_norm, k_norm = layer["qk"]
            backend.rms_norm(x, layer["norms"][0], EPS, self.normed, count)
            backend.linear(self.normed, layer["qkv"], self.qkv, count, bias=layer["bias"])
            backend.rope_kv_write(self.qkv, rows, self.rope, self.cache, i, q_norm=q_norm, k_norm=k_norm, eps=EPS)
            backend.paged_attention(self.qkv, rows, self.cache, i, DIM**-0.5, self.attended)
            backend.linear(self.attended, layer["output"], x, count, accumulate=True)
            backend.rms_norm(x, layer["norms"][1], EPS, self.normed, count)
            backend.gated_linear(self.normed, layer["gate_up"], self.gated, count)
            backend.linear(self.gated, layer["down"], x, count, accumulate=True)

    def step(
        self, ids: list[int], positions: list[int], owners: list[int], tables: np.ndarray, sampled: list[int]
    ) -> None:
        """Run the rows and leave the logits of the `sampled` rows in the first rows of `self.logits`."""
        write = self.backend.write
        where = np.array(positions)
        slots = tables[owners, where // self.block_size] * self.block_size + where % self.block_size
        for array, values in (
            (self.ids, ids),
            (self.positions, positions),
            (self.slots, slots),
            (self.sequences, owners),
            (self.sampled, sampled),
        ):
            write(array, np.array(values, np.int32))
        write(self.tables, tables)
        # The backend serves other tests' models too: the key must be this one's own.
        self.backend.replay((self, len(ids)), lambda: self.issue(len(ids)))
        count = len(sampled)
        if count:
            self.backend.gather_rows(self.x, self.sampled, self.gathered, count)
            self.backend.rms_norm(self.gathered, self.final_norm, EPS, self.head_normed, count)
            self.backend.linear(self.head_normed, self.embed, self.logits, count)


@dataclass
class Sequence:
    index: int
    tokens: list[int]
    prompt: int
    want: int
    done: int = 0

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.prompt + self.want and self.done == len(self.tokens) - 1


def parameters(rows: list[Sequence]) -> SamplingBatch:
    """Each third greedy, each third filtered; each fourth penalised; the rest plain draws. By sequence alone."""
    index = np.array([row.index for row in rows])
    histories = [np.unique(row.tokens) if row.index % 4 == 1 else np.zeros(0, np.int64) for row in rows]
    counts = [
        np.array([row.tokens[row.prompt :].count(token) for token in history], np.int32)
        for row, history in zip(rows, histories, strict=True)
    ]

    def offsets(lengths: list[int]) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

    biased = [int(i % 5 == 2) for i in index]
    return SamplingBatch(
        temperature=np.where(index % 3 == 0, 0, 0.7 + 0.1 * (index % 7)).astype(np.float32),
        top_k=np.where(index % 3 == 1, 20, 0).astype(np.int32),
        top_p=np.where(index % 6 == 1, 0.8, 1).astype(np.float32),
        min_p=np.where(index % 9 == 4, 0.02, 0).astype(np.float32),
        repetition=np.where(index % 4 == 1, 1.3, 1).astype(np.float32),
        presence=np.where(index % 4 == 1, 0.4, 0).astype(np.float32),
        frequency=np.where(index % 4 == 1, 0.1, 0).astype(np.float32),
        seed=(index * 2**40 + 5).astype(np.uint64),
        position=np.array([len(row.tokens) for row in rows], np.int64),
        logprobs=np.where(index % 2 == 0, 4, index % 3 - 1).astype(np.int32),
        bias_offsets=offsets(biased),
        bias_ids=np.full(sum(biased), 7, np.int32),
        bias_values=np.full(sum(biased), 2.5, np.float32),
        history_offsets=offsets([len(history) for history in histories]),
        history_ids=np.concatenate(histories).astype(np.int32),
        history_counts=np.concatenate(counts).astype(np.int32),
    )


def choice(output: SampleOutput, row: int, logprobs: int) -> Choice:
    top = max(logprobs, 0)
    return (
        int(output.token_ids[row]),
        output.logprobs[row].tobytes(),
        output.top_ids[row, :top].tobytes(),
        output.top_logprobs[row, :top].tobytes(),
    )


def alone(model: TinyDecoder, sequence: Sequence, chunk: int) -> list[Choice]:
    """The sequence by itself, its prompt in chunks, then token by token."""
    choices = []
    table = np.arange(CONTEXT // model.block_size)[None].astype(np.int32)
    while not sequence.finished:
        end = min(sequence.done + chunk, len(sequence.tokens))
        span = range(sequence.done, end)
        samples = [end - sequence.done - 1] if end == len(sequence.tokens) else []
        table_rows = np.zeros((1, CONTEXT // 8), np.int32)
        table_rows[:, : table.shape[1]] = table
        model.step([sequence.tokens[p] for p in span], list(span), [0] * len(span), table_rows, samples)
        sequence.done = end
        if samples:
            batch = parameters([sequence])
            output = model.backend.sample(model.logits, batch)
            choices.append(choice(output, 0, int(batch.logprobs[0])))
            sequence.tokens.append(choices[-1][0])
    return choices


def together(model: TinyDecoder, sequences: list[Sequence], rng: np.random.Generator) -> list[list[Choice]]:
    """All sequences in random steps: chunks and decodes mixed, any order of rows, some preempted into other blocks."""
    choices: list[list[Choice]] = [[] for _ in sequences]
    per_sequence = CONTEXT // model.block_size
    places = rng.permutation(len(sequences))
    tables = np.zeros((len(sequences), CONTEXT // 8), np.int32)
    free = list(rng.permutation(len(sequences) * per_sequence + 2 * per_sequence))

    def give_blocks(sequence: Sequence) -> None:
        row = places[sequence.index]
        old = tables[row, :per_sequence].copy() if sequence.done else []
        tables[row, :per_sequence] = [free.pop() for _ in range(per_sequence)]
        free.extend(old)
        rng.shuffle(free)
        sequence.done = 0

    for sequence in sequences:
        give_blocks(sequence)
    while any(not sequence.finished for sequence in sequences):
        ids, positions, owners, sampled, rows = [], [], [], [], []
        for index in rng.permutation(len(sequences)):
            sequence = sequences[index]
            if sequence.finished or rng.random() < 0.3 or len(ids) == MAX_ROWS:
                continue
            if sequence.done and rng.random() < 0.02:
                give_blocks(sequence)
            left = min(len(sequence.tokens) - sequence.done, MAX_ROWS - len(ids))
            take = min(left, int(rng.choice([1, 2, 7, 40, MAX_ROWS])))
            span = range(sequence.done, sequence.done + take)
            ids += [sequence.tokens[p] for p in span]
            positions += span
            owners += [int(places[index])] * take
            sequence.done += take
            if sequence.done == len(sequence.tokens):
                sampled.append(len(ids) - 1)
                rows.append(sequence)
        if not ids:
            continue
        model.step(ids, positions, owners, tables, sampled)
        if rows:
            batch = parameters(rows)
            output = model.backend.sample(model.logits, batch)
            for place, sequence in enumerate(rows):
                choices[sequence.index].append(choice(output, place, int(batch.logprobs[place])))
                if len(sequence.tokens) < sequence.prompt + sequence.want:
                    sequence.tokens.append(choices[sequence.index][-1][0])
    return choices


def fresh(count: int, seed: int) -> list[Sequence]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 70, count)
    lengths[0] = 290
    return [
        Sequence(i, [int(token) for token in rng.integers(0, VOCAB, length)], int(length), int(rng.integers(2, 14)))
        for i, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_tokens_and_logprobs_do_not_depend_on_company_chunks_blocks_threads_or_preemption(
    cpu: Callable[[int], Backend], random_matrix: Callable[..., GroupedMatrix], dtype: str
) -> None:
    count = 24
    lone = TinyDecoder(cpu(1), random_matrix, blocks=CONTEXT // 16, block_size=16, dtype=dtype)
    expected = [alone(lone, sequence, MAX_ROWS) for sequence in fresh(count, 3)]
    assert len({one[0] for sequence in expected for one in sequence}) > 20, "the model says too little to differ"
    again = [alone(lone, sequence, 13) for sequence in fresh(count, 3)]
    assert again == expected
    for seed, (threads, block_size) in enumerate(((1, 8), (2, 64), (3, 16), (2, 8))):
        per_sequence = CONTEXT // block_size
        model = TinyDecoder(
            cpu(threads), random_matrix, blocks=(count + 2) * per_sequence, block_size=block_size, dtype=dtype
        )
        assert together(model, fresh(count, 3), np.random.default_rng(seed)) == expected
