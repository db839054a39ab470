"""The central continuous-batching scheduler: three verbs, `add`, `schedule`, `update` (and `abort`).

A conductor over small managers: `WaitingQueue` (order), `BlockPool` (who holds which block), `PrefixCache` (which
blocks keep which tokens), `Sequence` (how far one sequence is), `Slots` (how many sequences a plan takes), `Suspects`
(who may have killed a stage). A sequence is always in exactly one of

    waiting       in the queue; holds no blocks; the stages do not know it
    ready         one token is not computed yet: the one that was sampled last, or the last of a prompt
    catching up   more than one token is not computed yet; goes in chunks, several of which may be in flight
    sampling      everything is computed or in flight, and its next token is not known yet
    ahead         sampling, and that next token is in flight too: the plan says `AHEAD` in its place

and runs in the last four. A plan takes ready sequences first, then chunks, then admits from the queue. Decoding
sequences go in groups, one for each slot of the pipeline, and a group's plans take turns with the others'. With
`SchedulerConfig.ahead` there is one plan more than slots: when each has its plan, the next one takes those whose turn
comes next, though they are sampling, so that the first stage has that step when their tokens come. Where it would leave
somebody behind, or preempt somebody, it waits for a result.

One order rules all: a sequence's rank, by arrival and priority. The queue is sorted by it; who lacks a block takes the
blocks of the running sequence that ranks last, never of one that ranks before itself. So the first in rank always makes
progress, and everybody becomes the first in the end.
"""

from __future__ import annotations

from collections import deque

from shardline.scheduler import integrity
from shardline.scheduler.admission import victims_of
from shardline.scheduler.block_pool import BlockPool
from shardline.scheduler.config import SchedulerConfig
from shardline.scheduler.errors import InvalidParameterError, QueueFullError
from shardline.scheduler.limits import check_request, most_tokens
from shardline.scheduler.microbatch import Draft, InFlight, Slots, whose_turn
from shardline.scheduler.plan import StepPlan, StepResult
from shardline.scheduler.prefix import PrefixCache
from shardline.scheduler.request import NewRequest, SchedulerStats, SequenceUpdate
from shardline.scheduler.sequence import RequestState, Sequence
from shardline.scheduler.suspects import Suspects
from shardline.scheduler.waiting import WaitingQueue


class Scheduler:
    """See `SchedulerConfig`. Not thread-safe: one owner calls it.

    Plans must reach every stage, and results come back here, in the order of the plans. While anything is unfinished
    and nothing is in flight, `schedule` always gives a plan.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self._pool = BlockPool(config.num_blocks, config.block_size)
        self._prefixes = PrefixCache(self._pool, config.prefix_cache)
        self._requests: dict[str, RequestState] = {}
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # by seq_id
        self._ready: dict[int, Sequence] = {}  # in the order in which they became ready
        self._catching_up: dict[int, Sequence] = {}
        self._in_flight: deque[InFlight] = deque()
        self._slots = Slots(config, self._in_flight)
        self._suspects = Suspects()
        self._forget: list[int] = []
        self._arrivals = 0
        self._next_seq_id = 0
        self._next_step_id = 0
        self._preemptions = 0
        self._prefix_hit_tokens = 0

    # The verbs.

    def add(self, request: NewRequest, *, alone: bool = False) -> None:
        """Queue a request; with `alone` it runs as a suspect does, and a full queue does not refuse it.

        Raises:
            RequestTooLargeError: it could never run here; the text has the numbers and the remedy.
            QueueFullError: `max_waiting` requests wait already.
            InvalidParameterError: an empty prompt, an id in use, a token out of the vocabulary, a seed that is missing.
        """
        if request.request_id in self._requests:
            raise InvalidParameterError("request_id", request.request_id, "an id that no unfinished request has")
        check_request(request, self.config)
        max_tokens = most_tokens(request, self.config)
        if self._waiting.num_requests >= self.config.max_waiting and not alone:
            raise QueueFullError(
                f"{self._waiting.num_requests} requests wait already, which is the limit: try again later, or raise "
                "max_waiting"
            )
        state = RequestState.of(request, max_tokens, self._arrivals, self.config)
        self._arrivals += 1
        self._requests[request.request_id] = state
        for index in range(request.params.n):
            sequence = Sequence.of(state, index)
            state.live[index] = sequence
            self._waiting.push(sequence)
            if alone:
                self._suspects.add(sequence)

    def schedule(self) -> StepPlan | None:
        """The next plan, or None when nothing can run or the pipeline is full."""
        if len(self._in_flight) >= self.config.depth:
            return None
        draft = Draft(self.config.max_step_tokens)
        if self._suspects:
            # One plan at a time, so that a loss says whose it was.
            if self._in_flight:
                return None
            if self._take_suspect(draft):
                return self._issue(draft)
        if self._slots.are_free(self._num_active):
            self._take_ready(draft)
            self._take_others(draft)
            rows = self.config.max_step_tokens - draft.budget
            if rows:
                too_thin = self._in_flight and rows < self.config.min_microbatch
                return None if too_thin else self._issue(draft)
        if self.config.ahead and self._in_flight:
            ahead = Draft(self.config.max_step_tokens, ahead=True)
            if self._take_turn(ahead):
                return self._issue(ahead)
        return None

    def update(self, result: StepResult) -> list[SequenceUpdate]:
        """Take a result, in the order of the plans."""
        assert self._in_flight, f"the result of step {result.step_id} came, but no plan is in flight"
        plan = self._in_flight.popleft()
        assert result.step_id == plan.step_id, f"the result of step {result.step_id} came before step {plan.step_id}'s"
        sampled = tuple(token.seq_id for token in result.tokens)
        assert sampled == plan.sampling, f"step {plan.step_id} samples for {plan.sampling}, the result is of {sampled}"
        updates = []
        for token in result.tokens:
            sequence = self._running.get(token.seq_id)
            if sequence is None:  # ended or preempted since
                continue
            update = sequence.append(token)
            self._suspects.clear(sequence)
            updates.append(update)
            if update.finish_reason is not None:
                self._stop_running(sequence)
                self._end(sequence)
            elif sequence.lag == 1:
                self._ready[sequence.seq_id] = sequence
            elif sequence.num_computed % self.config.block_size == 0:
                # It was ahead: only now is it known what the block keeps that this token fills.
                self._prefixes.publish(sequence, sequence.num_computed - 1)
        return updates

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its sequences) now; unknown or ended ones are no error. No update follows for it."""
        state = self._requests.get(request_id)
        if state is None:
            return
        for sequence in list(state.live.values()):
            if index is None or sequence.index == index:
                if sequence.seq_id in self._running:
                    self._stop_running(sequence)
                else:
                    self._waiting.remove(sequence)
                self._end(sequence)

    def drop_in_flight(self) -> list[str]:
        """A stage was lost: forget all plans in flight and every cached block; unfinished sequences are recomputed.

        The stages must know no sequence afterwards, and take the next plan's step id as it is. Returns the requests
        that it is to be blamed on, which the caller ends: a stage is lost each time that they run.
        """
        in_flight = (sequence for plan in self._in_flight for sequence in plan.sequences)
        blamed = self._suspects.note_loss(sequence for sequence in in_flight if sequence.lives)
        for sequence in list(self._running.values()):
            self._stop_running(sequence)
            self._waiting.push(sequence)
        self._in_flight.clear()
        self._forget.clear()
        self._pool.reset()
        return blamed

    # What can be asked.

    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._requests)

    def has_suspects(self) -> bool:
        """Whether any sequence was in flight at so many losses that it runs alone now."""
        return bool(self._suspects)

    def unfinished(self) -> list[str]:
        """Ids of the requests that have not ended, in the order in which they came."""
        return list(self._requests)

    def stats(self) -> SchedulerStats:
        """A snapshot."""
        return SchedulerStats(
            waiting=len(self._waiting),
            running=len(self._running),
            blocks_used=self._pool.num_held,
            blocks_cached=self._pool.num_idle,
            blocks_total=self._pool.num_blocks,
            in_flight=len(self._in_flight),
            preemptions=self._preemptions,
            prefix_hit_tokens=self._prefix_hit_tokens,
            steps=self._next_step_id,
        )

    # From the queue into a plan.

    def _admit(self, draft: Draft, at_most: int) -> None:
        """Let waiting sequences in, in order of rank, for up to `at_most` chunks of this plan.

        A sequence enters when all the tokens that it has fit, not only its first chunk: otherwise two long prompts
        would both enter, and then take each other's blocks. Who does not fit stops those behind it, so that a long
        prompt is not passed by short ones for ever. Who waits for a prefix that is being computed lets them pass.
        """
        if at_most <= 0 or draft.budget <= 0:
            return
        for sequence in self._waiting:
            if sequence in self._suspects:
                # For the moment it does not fit.
                return
            found = self._prefixes.find(sequence)
            if found is None:
                continue
            if not self._make_room(sequence, found, draft):
                return
            self._start_running(sequence, found)
            entered = self._reserve(sequence, min(sequence.lag, self.config.prefill_chunk, draft.budget), draft)
            assert entered, "an admitted sequence has its blocks"
            at_most -= 1
            if at_most == 0 or draft.budget == 0:
                return

    def _make_room(self, sequence: Sequence, found: list[int], draft: Draft) -> bool:
        """Whether a waiting sequence, of which some blocks were found, may enter now; preempts for it."""
        victims = victims_of(sequence, found, self._running.values(), self._pool, self.config)
        if victims is None:
            return False
        if victims and draft.ahead:
            draft.give_up()
            return False
        for victim in victims:
            self._preempt(victim, draft)
        return True

    # Drafting a plan.

    def _take_suspect(self, draft: Draft) -> bool:
        """Draft the next chunk of the first suspect; False when it must wait for others to give up blocks.

        Only before it runs: what it needs is free when it enters, and nobody else runs until its next token.
        """
        sequence = self._suspects.first
        if sequence.seq_id not in self._running:
            found = self._prefixes.find(sequence)
            if found is None or not self._make_room(sequence, found, draft):
                return False
            self._start_running(sequence, found)
        return self._reserve(sequence, min(sequence.lag, self.config.prefill_chunk, draft.budget), draft)

    def _take_ready(self, draft: Draft) -> None:
        share = self._decoding_share()
        for sequence in list(self._ready.values()):
            if len(draft.counts) == share or draft.budget == 0:
                return
            # A sequence that was preempted for one before it is not ready any more.
            if sequence.seq_id in self._ready:
                self._reserve(sequence, 1, draft)

    def _take_turn(self, draft: Draft) -> bool:
        """Draft a plan ahead, with those whose turn it is; False when none is to be made now.

        The blocks that it took before it found that stay with their sequences, which will need them.
        """
        before = self._slots.before(self._num_active)
        decoding = whose_turn(self._ready.values(), before, self._decoding_share())
        if decoding is None or len(decoding) > draft.budget:
            return False
        if not all(self._reserve(sequence, 1, draft) for sequence in decoding):
            return False
        self._take_others(draft)
        return bool(draft.counts)

    def _take_others(self, draft: Draft) -> None:
        """Besides those that decode."""
        num_chunks = self._chunk_share(draft)
        num_chunks -= self._take_chunks(draft, num_chunks)
        self._admit(draft, num_chunks)

    def _chunk_share(self, draft: Draft) -> int:
        """How many sequences may have chunks in this plan: as the queue enters, it is spread over the plans too."""
        share = self._slots.share(self._num_active, lambda plan: plan.size)
        return max(1, share - len(draft.counts))

    def _take_chunks(self, draft: Draft, at_most: int) -> int:
        taken = 0
        for sequence in sorted(self._catching_up.values(), key=lambda other: other.rank):
            if taken == at_most or draft.budget == 0:
                break
            if sequence.seq_id in self._catching_up:
                count = min(sequence.lag, self.config.prefill_chunk, draft.budget)
                taken += self._reserve(sequence, count, draft)
        return taken

    @property
    def _num_active(self) -> int:
        """Sequences that run, and those of the queue that may."""
        return len(self._running) + min(len(self._waiting), self.config.max_sequences - len(self._running))

    def _decoding_share(self) -> int:
        return self._slots.share(len(self._running) - len(self._catching_up), lambda plan: len(plan.sampling))

    def _reserve(self, sequence: Sequence, count: int, draft: Draft) -> bool:
        """Draft `count` tokens of a running sequence, with their blocks; False when it must wait for blocks."""
        need = self._pool.blocks_for(sequence.num_computed + count) - len(sequence.table)
        if need > 0:
            while self._pool.num_available < need:
                last = max(self._running.values(), key=lambda other: other.rank)
                if last is sequence:
                    return False
                if draft.ahead:
                    draft.give_up()
                    return False
                self._preempt(last, draft)
            sequence.table.extend(self._pool.take(need))
        draft.put(sequence, count)
        return True

    def _issue(self, draft: Draft) -> StepPlan:
        """Make the plan of a draft. From here on its tokens count as computed, and its full blocks can be found.

        But for a block that ends in a token which is not known yet: `update` publishes it.
        """
        starts, runs, sampling = [], [], []
        block_size = self.config.block_size
        for sequence, count in draft.counts.items():
            first = sequence.num_computed
            if sequence.known_blocks is None:
                starts.append(sequence.start_message(block_size))
                sequence.known_blocks = first // block_size
            run = sequence.run_message(count)
            runs.append(run)
            sequence.known_blocks = len(sequence.table)
            sequence.num_computed = first + count
            sequence.last_step = self._next_step_id
            if sequence.lag >= 0 and first // block_size != sequence.num_computed // block_size:
                self._prefixes.publish(sequence, first)
            self._sort_in(sequence)
            if run.samples:
                sampling.append(run.seq_id)
        plan = StepPlan(self._next_step_id, tuple(self._forget), tuple(starts), tuple(runs))
        self._forget.clear()
        self._next_step_id += 1
        self._in_flight.append(InFlight(plan.step_id, tuple(draft.counts), tuple(sampling)))
        return plan

    # From state to state.

    def _start_running(self, sequence: Sequence, found: list[int]) -> None:
        """From waiting to running, with the blocks that were found."""
        self._waiting.remove(sequence)
        self._pool.hold(found)
        sequence.table = found
        sequence.num_computed = len(found) * self.config.block_size
        sequence.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self._prefix_hit_tokens += sequence.num_computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.num_computed
        self._running[sequence.seq_id] = sequence
        self._sort_in(sequence)
        self._prefixes.expect(sequence)

    def _sort_in(self, sequence: Sequence) -> None:
        """Put a running sequence among the ready or those that catch up, as its lag says."""
        seq_id, lag = sequence.seq_id, sequence.lag
        self._ready.pop(seq_id, None)
        self._catching_up.pop(seq_id, None)
        if lag == 1:
            self._ready[seq_id] = sequence
        elif lag > 1:
            self._catching_up[seq_id] = sequence

    def _stop_running(self, sequence: Sequence) -> None:
        """Give up a running sequence's blocks and its name. What is in flight for it will find nobody.

        Others may have the blocks at once, though plans in flight still write to them: stages run plans in order, so
        that what they write lands before anything of a later plan does. And a block that can be found again is full.
        """
        self._pool.release(sequence.table)
        self._prefixes.withdraw(sequence)
        if sequence.known_blocks is not None:
            self._forget.append(sequence.seq_id)
        del self._running[sequence.seq_id]
        self._ready.pop(sequence.seq_id, None)
        self._catching_up.pop(sequence.seq_id, None)
        sequence.table = []
        sequence.num_computed = 0
        sequence.seq_id = -1
        sequence.known_blocks = None

    def _preempt(self, sequence: Sequence, draft: Draft) -> None:
        """Take a running sequence's blocks; it waits with all its tokens so far, to be recomputed."""
        draft.discard(sequence)
        self._stop_running(sequence)
        sequence.was_preempted = True
        self._preemptions += 1
        self._waiting.push(sequence)

    def _end(self, sequence: Sequence) -> None:
        state = sequence.request
        self._suspects.clear(sequence)
        del state.live[sequence.index]
        if not state.live:
            del self._requests[state.request.request_id]

    # Proof.

    def check_integrity(self) -> None:
        """Raise AssertionError if a block is leaked, shared wrongly or counted wrongly, or a sequence is lost."""
        integrity.check(self)
