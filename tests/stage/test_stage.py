"""A stage's own part: what it loads, which plans it takes, what it remembers, and how it samples."""

from __future__ import annotations

import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest

from shardline.kernels import cpu_backend
from shardline.scheduler import SamplingParams, SequenceRun, SequenceStart, StepPlan
from shardline.stage import CheckpointError, PlanError, Stage, open_checkpoint

PROMPT = np.random.default_rng(3).integers(0, 101, 40).tolist()
GREEDY = SamplingParams(seed=0)


def start(seq_id, token_ids=(1, 2, 3), blocks=(), params=GREEDY, prompt_len=None):
    return SequenceStart(
        seq_id, params, len(token_ids) if prompt_len is None else prompt_len, tuple(token_ids), tuple(blocks)
    )


def run(seq_id, position, token_ids, new_blocks=(), samples=False):
    return SequenceRun(seq_id, position, tuple(token_ids), tuple(new_blocks), samples)


def plan(step_id, runs=(), starts=(), forget=()):
    return StepPlan(step_id, tuple(forget), tuple(starts), tuple(runs))


def counted(backend, names):
    """How often each of those methods is called from here on, with the bytes that went in."""
    calls = {name: [] for name in names}

    def count(name, method):
        def call(*args):
            calls[name].append(getattr(args[-1], "nbytes", 0) if args else 0)
            return method(*args)

        return call

    for name in names:
        setattr(backend, name, count(name, getattr(backend, name)))
    return calls


def poison(*names):
    """Scales that are no numbers: to read such a tensor is an error."""

    def edit(tensors):
        for name in names:
            data, kind = tensors[name]
            data = data.copy()
            data[:, :2] = 255
            tensors[name] = (data, kind)

    return edit


def test_a_stage_reads_its_own_tensors_only(tiny_model, stage_row):
    good, damaged = tiny_model(tied=False), tiny_model(tied=False, edit=poison("blk.2.ffn_up.weight", "output.weight"))
    expected = stage_row(good, (2,)).stages[0].run(plan(0, [run(0, 0, PROMPT, range(3))], [start(0)]), None)
    checkpoint = open_checkpoint(damaged)
    specs = stage_row(good, (2,)).specs
    stage = Stage(specs[0], checkpoint, cpu_backend(1))
    got = stage.run(plan(0, [run(0, 0, PROMPT, range(3))], [start(0)]), None)
    assert np.array_equal(got.hidden, expected.hidden)
    stage.close()
    backend = cpu_backend(1)
    with pytest.raises(CheckpointError, match=r"blk\.2\.ffn_up\.weight"):
        Stage(replace(specs[1], has_head=False), checkpoint, backend)
    with pytest.raises(CheckpointError, match=r"tensor output\.weight"):
        Stage(replace(specs[1], first_layer=3), checkpoint, backend)
    backend.close()
    checkpoint.close()


def test_a_step_is_few_copies_and_one_wait(tiny_model, stage_row):
    """All indices go up in one copy, and nothing is read or waited for but the result."""
    row = stage_row(tiny_model(), (1, 2), max_step_tokens=128, block_size=16)
    calls = [counted(stage._backend, ("write", "read_later", "sample_later")) for stage in row.stages]
    row.run(row.plan({0: PROMPT, 1: PROMPT[:5]}, samples=True))
    tables = 4 * 2 * row.stages[0]._decoder.max_blocks
    indices = 4 * 4 * 128 + tables
    hidden = 4 * 45 * row.model.hidden_size
    assert [one["write"] for one in calls] == [[indices], [hidden, indices], [hidden, indices, 4 * 2]]
    assert [len(one["read_later"]) for one in calls] == [1, 1, 0]
    assert [len(one["sample_later"]) for one in calls] == [0, 0, 1]


def test_hidden_states_are_the_receivers_and_the_senders_own(tiny_model, stage_row):
    """What came in may be overwritten as soon as the stage has it, and what went out stays while later steps run."""
    path = tiny_model()
    expected = stage_row(path, (1, 2))
    row = stage_row(path, (1, 2))
    kept = []
    for _ in range(3):
        tokens = {0: PROMPT[:7]}
        wanted, sent = expected.plan(tokens), row.plan(tokens)
        first = row.stages[0].run(sent, None).hidden
        received = np.empty((first.nbytes + 8,), np.uint8)[8:].view(np.float32).reshape(first.shape)
        received[...] = first
        second = row.stages[1].run(sent, received).hidden
        received[...] = np.nan
        _, passed = expected.logits(wanted)
        kept.append(([first, second], [array.copy() for array in passed]))
    for given, passed in kept:
        assert all(np.array_equal(a, b) for a, b in zip(given, passed, strict=True))


def test_an_embedding_that_is_not_the_head_stays_on_the_first_stage(tiny_model, stage_row):
    damaged = tiny_model(tied=False, edit=poison("token_embd.weight"))
    specs = stage_row(tiny_model(tied=False), (2,)).specs
    checkpoint = open_checkpoint(damaged)
    backend = cpu_backend(1)
    Stage(specs[1], checkpoint, backend).close()
    backend = cpu_backend(1)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight"):
        Stage(specs[0], checkpoint, backend)
    backend.close()
    checkpoint.close()


def test_tensors_are_not_kept_while_others_are_read(tiny_model, stage_row):
    """Only the parts of one resident matrix (q, k and v; gate and up) are on the host at once."""

    class Counting:
        def __init__(self, checkpoint):
            self._checkpoint = checkpoint
            self.path, self.spec, self.vector = checkpoint.path, checkpoint.spec, checkpoint.vector
            self.alive = self.most = self.read = 0

        def matrix(self, role, layer):
            matrix = self._checkpoint.matrix(role, layer)
            self.read += 1
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(matrix.q, self._gone)
            return matrix

        def _gone(self):
            self.alive -= 1

    path = tiny_model()
    counting = Counting(open_checkpoint(path))
    backend = cpu_backend(1)
    stage = Stage(stage_row(path).specs[0], counting, backend)
    assert counting.read == 1 + 3 * 7
    assert counting.most <= 4
    assert counting.alive == 0
    stage.close()
    counting._checkpoint.close()


def test_a_tied_head_is_resident_once(tiny_model, stage_row):
    def resident(path):
        stage = stage_row(path).stages[0]
        return stage._backend.resident_bytes()

    path = tiny_model(vocab=1009)
    checkpoint = open_checkpoint(path)
    matrices = checkpoint.matrix_bytes("embed", None)
    checkpoint.close()
    assert resident(tiny_model(vocab=1009, layers=1)) < resident(tiny_model(vocab=11, layers=1)) + 1.2 * matrices


BAD = {
    "a step out of order": (plan(2, [run(0, 40, [1])]), "plan 2 came where plan 1 was due"),
    "an old step": (plan(0, [run(0, 40, [1])]), "plan 0 came where plan 1 was due"),
    "no runs": (plan(1), "runs nothing"),
    "a run of no tokens": (plan(1, [run(0, 40, [])]), "run of sequence 0: no tokens"),
    "an unknown sequence": (plan(1, [run(9, 0, [1], [5])]), "runs sequence 9, which is not known"),
    "a forgotten sequence": (plan(1, [run(0, 40, [1])], forget=[0]), "runs sequence 0, which is not known"),
    "an unknown one forgotten": (plan(1, [run(0, 40, [1])], forget=[9]), "forgets sequence 9, which is not known"),
    "one forgotten twice": (plan(1, [run(1, 5, [1])], forget=[0, 0]), "forgets sequence 0, which is not known"),
    "a known one started": (plan(1, [run(0, 40, [1])], [start(0)]), "starts sequence 0, which is known already"),
    "one started twice": (
        plan(1, [run(0, 40, [1])], [start(7), start(7)]),
        "starts sequence 7, which is known already",
    ),
    "one run twice": (plan(1, [run(0, 40, [1]), run(0, 41, [1])]), "runs sequence 0 twice"),
    "a gap": (plan(1, [run(0, 41, [1])]), "begins at 41, not where it left off, 40"),
    "a step back": (plan(1, [run(0, 39, [1])]), "begins at 39, not where it left off, 40"),
    "a start behind nothing": (plan(1, [run(2, 1, [1], [5])], [start(2)]), "begins at 1, but its cached prefix has 0"),
    "a start before zero": (plan(1, [run(2, -1, [1], [5])], [start(2)]), "begins at -1"),
    "too few blocks": (plan(1, [run(0, 40, [1] * 9)]), "ends at 49 with 3 blocks of 16"),
    "too many blocks": (plan(1, [run(0, 40, [1], range(3, 8))]), "the most is 100 tokens in 7 blocks"),
    "too long a context": (plan(1, [run(0, 40, [1] * 61, range(3, 7))]), "ends at 101 with 7 blocks"),
    "a block out of range": (plan(1, [run(0, 40, [1], [12])]), "block id 12 is not one of 0 to 11"),
    "a negative block": (plan(1, [run(0, 40, [1], [-1])]), "block id -1 is not one of 0 to 11"),
    "a started block out of range": (plan(1, [run(2, 0, [1])], [start(2, blocks=[99])]), "block id 99 is not one of"),
    "too many started blocks": (plan(1, [run(2, 0, [1])], [start(2, blocks=range(8))]), "8 blocks; the most .* is 7"),
    "a token out of range": (plan(1, [run(0, 40, [101])]), "token id 101 is not one of 0 to 100"),
    "a negative token": (plan(1, [run(0, 40, [-1])]), "token id -1 is not one of"),
    "a started token out of range": (plan(1, [run(0, 40, [1])], [start(2, [500])]), "token id 500 is not one of"),
    "a biased token out of range": (
        plan(1, [run(0, 40, [1])], [start(2, params=replace(GREEDY, logit_bias=((101, 1.0),)))]),
        "logit_bias token id 101 is not one of",
    ),
    "a prompt longer than its tokens": (plan(1, [run(0, 40, [1])], [start(2, prompt_len=4)]), "a prompt of 4 of 3"),
    "too many rows": (plan(1, [run(0, 40, [1] * 65)]), "has 65 rows; the most is 64"),
    "too many sequences": (plan(1, [run(0, 40, [1])], [start(2), start(3)]), "makes 4 sequences known; the most is 3"),
    "all forgotten for others": (
        plan(1, [run(7, 0, [1], [0]), run(8, 0, [101], [1])], [start(7), start(8), start(9)], forget=[0, 1]),
        "sequence 8: token id 101 is not one of 0 to 100",
    ),
    "blocks for one run and too few for another": (
        plan(1, [run(0, 40, [1] * 9, [9]), run(1, 5, [1] * 12)]),
        "sequence 1: ends at 17 with 1 blocks of 16",
    ),
    "a number beyond 64 bits": (plan(1, [run(0, 40, [2**64])]), "a number beyond 64 bits"),
    "one slot written twice": (
        plan(1, [run(0, 40, [1]), run(2, 8, [1])], [start(2, blocks=[2])]),
        "writes to one place of the pool twice",
    ),
}


@pytest.fixture
def small_row(tiny_model, stage_row):
    return stage_row(
        tiny_model(), (1,), num_blocks=12, max_context=100, max_step_tokens=64, max_sequences=3, num_threads=1
    )


def through(row, one):
    hidden = None
    for stage in row.stages:
        output = stage.run(one, hidden)
        hidden = output.hidden
    return output.result


FIRST = plan(0, [run(0, 0, PROMPT, [0, 1, 2]), run(1, 0, [4, 5, 6, 7, 8], [3])], [start(0), start(1)])
AFTER = plan(1, [run(0, 40, [9], samples=True), run(1, 5, [10], samples=True)])


@pytest.mark.parametrize("name", BAD)
def test_a_plan_that_does_not_fit_changes_nothing(name, small_row):
    bad, message = BAD[name]
    through(small_row, FIRST)
    for stage in small_row.stages:
        hidden = None if stage.spec.has_embed else np.zeros((bad.num_tokens, 64), np.float32)
        with pytest.raises(PlanError, match=message):
            stage.run(bad, hidden)
    got = through(small_row, AFTER)
    small_row.stages[0].reset()
    small_row.stages[1].reset()
    through(small_row, FIRST)
    assert got == through(small_row, AFTER)


@pytest.mark.parametrize(
    ("stage", "hidden", "message"),
    [
        (0, np.zeros((2, 64), np.float32), "with hidden states, but this stage has the embedding"),
        (1, None, "without hidden states"),
        (1, np.zeros((3, 64), np.float32), r"float32 \[3, 64\], not float32 \[2, 64\]"),
        (1, np.zeros((2, 63), np.float32), r"float32 \[2, 63\], not"),
        (1, np.zeros((2, 64), np.float16), r"float16 \[2, 64\], not"),
    ],
)
def test_hidden_states_that_do_not_fit_change_nothing(stage, hidden, message, small_row):
    through(small_row, FIRST)
    with pytest.raises(PlanError, match=message):
        small_row.stages[stage].run(AFTER, hidden)
    assert len(through(small_row, AFTER).tokens) == 2


def test_errors_pickle(small_row):
    with pytest.raises(PlanError) as caught:
        small_row.stages[0].run(plan(0), None)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_reset_forgets_sequences_and_the_step(small_row):
    through(small_row, FIRST)
    for stage in small_row.stages:
        stage.reset()
    with pytest.raises(PlanError, match="sequence 0, which is not known"):
        small_row.stages[0].run(plan(1, [run(0, 40, [1])]), None)
    again = replace(FIRST, step_id=77)
    through(small_row, again)
    with pytest.raises(PlanError, match="plan 77 came where plan 78 was due"):
        small_row.stages[0].run(again, None)


def test_an_id_may_return_after_it_was_forgotten(small_row):
    """In one plan, as preemption and readmission may do; with the blocks of another sequence."""
    through(small_row, FIRST)
    expected = through(small_row, AFTER).tokens[0]
    back = plan(2, [run(0, 0, [*PROMPT, 9], [7, 5, 6], True)], [start(0)], forget=[0])
    assert through(small_row, back).tokens == (expected,)


def test_a_cached_prefix_is_read_not_run(tiny_model, stage_row):
    """A sequence that starts behind blocks that another one filled has the logits of one that ran it all."""
    path = tiny_model("qwen2")
    row = stage_row(path)
    whole = row.stages[0].logits(plan(0, [run(0, 0, PROMPT, [3, 1, 2])], [start(0)]), None)
    tail = row.stages[0].logits(plan(1, [run(1, 32, PROMPT[32:], [9])], [start(1, PROMPT, [3, 1])]), None)
    assert np.array_equal(tail, whole[32:])
    other = row.stages[0].logits(plan(2, [run(2, 32, PROMPT[32:], [10])], [start(2, PROMPT, [1, 3])]), None)
    assert not np.array_equal(other, whole[32:])


def test_greedy_is_the_argmax_of_the_last_row(tiny_model, stage_row):
    path = tiny_model("qwen3")
    logits, _ = stage_row(path).logits(plan(0, [run(0, 0, PROMPT, range(3))], [start(0)]))
    two = plan(
        0,
        [run(0, 0, PROMPT, range(3), True), run(1, 0, PROMPT[:9], [3]), run(2, 0, PROMPT[:7], [4], True)],
        [start(0), start(1), start(2)],
    )
    result = stage_row(path, (1, 2)).run(two)
    assert (result.step_id, [token.seq_id for token in result.tokens]) == (0, [0, 2])
    assert [token.token_id for token in result.tokens] == [logits[39].argmax(), logits[6].argmax()]
    assert all(token.logprob is None and token.top_logprobs == () for token in result.tokens)


def test_a_step_that_samples_nothing(tiny_model, stage_row):
    result = stage_row(tiny_model(), (1,)).run(plan(0, [run(0, 0, PROMPT, range(3))], [start(0)]))
    assert (result.step_id, result.tokens) == (0, ())


def test_logprobs(tiny_model, stage_row):
    path = tiny_model()
    logits, _ = stage_row(path).logits(plan(0, [run(0, 0, PROMPT, range(3))], [start(0)]))
    expected = logits[-1].astype(np.float64)
    expected -= np.log(np.exp(expected).sum())
    order = np.argsort(-expected, kind="stable")
    asked = {0: 3, 1: None, 2: 0, 3: 5}
    row = stage_row(path, max_step_tokens=160)
    starts = [start(seq_id, params=replace(GREEDY, logprobs=count)) for seq_id, count in asked.items()]
    runs = [run(seq_id, 0, PROMPT, range(3 * seq_id, 3 * seq_id + 3), True) for seq_id in asked]
    for token, count in zip(row.run(plan(0, runs, starts)).tokens, asked.values(), strict=True):
        assert token.token_id == order[0]
        if count is None:
            assert token.logprob is None
            assert token.top_logprobs == ()
            continue
        assert token.logprob == pytest.approx(expected[order[0]], abs=1e-5)
        assert [token_id for token_id, _ in token.top_logprobs] == order[:count].tolist()
        assert [p for _, p in token.top_logprobs] == pytest.approx(expected[order[:count]], abs=1e-5)


VARIED = [
    SamplingParams(seed=11, temperature=0.9),
    SamplingParams(seed=12, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, logprobs=2),
    SamplingParams(
        seed=2**64 - 1, temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2
    ),
    SamplingParams(seed=14, repetition_penalty=1.5),
    SamplingParams(seed=15, frequency_penalty=2.0, logit_bias=((7, 3.0), (8, -2.0))),
]


def generated(row, seq_ids, count, known=None):
    """Tokens of each sequence: `count` steps, all in one batch, or from `known` tokens on as after a preemption."""
    known = known or {seq_id: [] for seq_id in seq_ids}
    out = {seq_id: list(known[seq_id]) for seq_id in seq_ids}
    step, first_block = 0, 0
    starts, runs, lengths = [], [], {}
    for seq_id in seq_ids:
        tokens = [*PROMPT[: 10 + seq_id], *known[seq_id]]
        starts.append(start(seq_id, tokens, params=VARIED[seq_id], prompt_len=10 + seq_id))
        runs.append(run(seq_id, 0, tokens, range(first_block, first_block + 4), True))
        first_block += 4
        lengths[seq_id] = len(tokens)
    while True:
        result = row.run(plan(step, runs, starts))
        for token in result.tokens:
            out[token.seq_id].append(token)
        step += 1
        starts = []
        if step == count:
            return out
        runs = []
        for token in result.tokens:
            runs.append(run(token.seq_id, lengths[token.seq_id], [token.token_id], samples=True))
            lengths[token.seq_id] += 1


def test_sampling_depends_on_the_sequence_alone(tiny_model, stage_row):
    """All together, each alone, split, and started again half way with what it had: the same tokens and logprobs."""
    path = tiny_model()
    together = generated(stage_row(path), range(5), 24)
    assert len({token.token_id for tokens in together.values() for token in tokens}) > 20
    for seq_id in range(5):
        assert generated(stage_row(path, (2,)), [seq_id], 24) == {seq_id: together[seq_id]}
    half = {seq_id: [token.token_id for token in tokens[:11]] for seq_id, tokens in together.items()}
    resumed = generated(stage_row(path, (1,)), range(5), 13, half)
    assert {seq_id: tokens[11:] for seq_id, tokens in resumed.items()} == {
        seq_id: tokens[11:] for seq_id, tokens in together.items()
    }


def test_penalties_follow_the_rule_over_prompt_and_output(tiny_model, stage_row):
    """The tokens of greedy sampling with penalties, from the logits and the rule in plain words."""
    path = tiny_model()
    for seq_id, params in ((3, VARIED[3]), (4, VARIED[4])):
        tokens = [token.token_id for token in generated(stage_row(path), [seq_id], 24)[seq_id]]
        prompt = PROMPT[: 10 + seq_id]
        logits, _ = stage_row(path).logits(plan(0, [run(0, 0, prompt + tokens[:-1], range(4))], [start(0)]))
        for index, token_id in enumerate(tokens):
            row = logits[len(prompt) - 1 + index].astype(np.float64)
            for biased, bias in params.logit_bias:
                row[biased] += bias
            for seen in {*prompt, *tokens[:index]}:
                row[seen] = (
                    row[seen] / params.repetition_penalty if row[seen] > 0 else row[seen] * params.repetition_penalty
                )
            for seen in tokens[:index]:
                row[seen] -= params.frequency_penalty
            assert token_id == row.argmax(), (seq_id, index)
        assert len(set(tokens)) > 5
