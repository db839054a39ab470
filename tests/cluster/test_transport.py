"""The data plane without Ray: real sockets, real threads, stages that pretend."""

from __future__ import annotations

import os
import pickle
import queue
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardline.cluster.errors import TransportError
from shardline.cluster.wire import handshake
from shardline.cluster.wire.engine_link import EngineLink
from shardline.cluster.wire.frames import (
    HEADER_BYTES,
    MAX_FAILURE_TEXT,
    Frame,
    FrameHeader,
    FrameKind,
    FrameLimits,
    StageFailure,
    decode_failure,
    decode_plan,
    decode_result,
    encode_message,
)
from shardline.cluster.wire.handshake import ENGINE, Credentials
from shardline.cluster.wire.stage_worker import StageWorker
from shardline.cluster.wire.transport import (
    ChannelClosedError,
    Handoff,
    Listener,
    TcpReceiver,
    TcpSender,
    connect,
)
from shardline.scheduler import SamplingParams
from shardline.scheduler.plan import (
    SampledToken,
    SequenceRun,
    SequenceStart,
    StepPlan,
    StepResult,
    plan_of_columns,
)
from shardline.stage.errors import PlanError
from shardline.stage.stage import DoneStep, StepOutput

HOST = "127.0.0.1"
HIDDEN = 32
LIMITS = FrameLimits(max_meta_bytes=1 << 20, max_rows=1 << 20, columns=HIDDEN)


def plan_of(step_id: int, rows: int = 3) -> StepPlan:
    start = SequenceStart(7, SamplingParams(seed=1, stop=("x",)), 2, (5, 6), (1,))
    return StepPlan(step_id, (3,), (start,), (SequenceRun(7, 0, tuple(range(rows)), (2,), True),))


def step_frame(step_id: int, rows: int = 3, hidden: NDArray[np.float32] | None = None) -> Frame:
    return Frame(FrameKind.STEP, step_id, encode_message(plan_of(step_id, rows)), hidden)


class PretendStage:
    """Adds its own mark to each row's values, so that a step which skipped or repeated a stage shows."""

    def __init__(self, index: int, num_stages: int) -> None:
        self.index = index
        self.last = index + 1 == num_stages
        self.before_step: Callable[[StepPlan], None] = lambda plan: None
        self.resets = 0
        self.closed = False

    def begin(self, plan: StepPlan, hidden: NDArray[np.float32] | None) -> DoneStep:
        self.before_step(plan)
        if self.index == 0:
            assert hidden is None
            hidden = np.full((plan.num_tokens, HIDDEN), plan.step_id, np.float32)
        assert hidden is not None
        # In place: what a stage returns may be the very memory that it was given.
        hidden *= 7
        hidden += self.index + 1
        if not self.last:
            return DoneStep(StepOutput(hidden, None))
        value = hidden[0, 0]
        assert np.array_equal(hidden, np.full((plan.num_tokens, HIDDEN), value, np.float32))
        return DoneStep(StepOutput(None, StepResult(plan.step_id, (SampledToken(7, int(value)),))))

    def reset(self) -> None:
        self.resets += 1

    def close(self) -> None:
        self.closed = True


class Chain:
    """A pipeline of pretend stages in this process, and the engine's link to it."""

    def __init__(self, num_stages: int, max_in_flight: int = 8) -> None:
        self.stages = [PretendStage(index, num_stages) for index in range(num_stages)]
        self.workers = [
            StageWorker(index, num_stages, stage, HIDDEN, 64, max_in_flight) for index, stage in enumerate(self.stages)
        ]
        self.key = secrets.token_bytes(32)
        self.epoch = 0
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.link: EngineLink | None = None

    def wire(self) -> EngineLink:
        self.epoch += 1
        credentials = Credentials(self.key, self.epoch, b"p" * 32)
        self.frames = queue.SimpleQueue()
        self.ends = queue.SimpleQueue()
        link = EngineLink(HOST, credentials, len(self.workers), self.frames.put, self.ends.put)
        self.link = link
        addresses = [worker.listen(HOST, credentials) for worker in self.workers]
        for worker, address in zip(self.workers, [*addresses[1:], link.address], strict=True):
            worker.connect(address)
        link.open(addresses[0], 60.0)
        return link

    def expected(self, step_id: int) -> int:
        value = step_id
        for stage in self.stages:
            value = value * 7 + stage.index + 1
        return value

    def result(self) -> StepResult:
        frame = self.frames.get(timeout=60)
        assert frame.kind is FrameKind.RESULT, decode_failure(frame.meta)
        return decode_result(frame.meta)

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture
def chain() -> Iterator[Callable[..., Chain]]:
    made: list[Chain] = []

    def make(num_stages: int, max_in_flight: int = 8) -> Chain:
        made.append(Chain(num_stages, max_in_flight))
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_until(lambda: not data_threads(), "the data threads end")


def data_threads() -> list[str]:
    roles = ("compute", "receive", "send", "accept", "handshake", "engine-")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(roles)]


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s until {what}"
        time.sleep(0.002)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection: (sending, receiving)."""
    with socket.create_server((HOST, 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        yield sender, receiver


# -- frames ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 2, 127, 4096, 64 * 1024 * 1024 // (HIDDEN * 4)])
def test_a_frame_of_any_size_arrives_bit_for_bit(pair, rows):
    bits = np.random.default_rng(rows).integers(0, 2**32, (rows, HIDDEN), dtype=np.uint32)
    hidden = bits.view(np.float32)  # every bit pattern: NaNs with payloads, infinities, denormals
    sender = TcpSender(pair[0], "peer")
    receiver = TcpReceiver(pair[1], "peer", LIMITS)
    frame = Frame(FrameKind.STEP, 2**64 - 1, os.urandom(rows % 1000), hidden if rows else None)
    slot = np.zeros(LIMITS.slot_bytes, np.uint8)
    sending = threading.Thread(target=sender.send, args=(3, frame))
    sending.start()
    arrived = receiver.receive(3, slot)
    sending.join()
    assert (arrived.kind, arrived.step_id, bytes(arrived.meta)) == (frame.kind, frame.step_id, frame.meta)
    if rows:
        assert np.array_equal(arrived.hidden.view(np.uint32), bits)
    else:
        assert arrived.hidden is None
    assert slot[rows * HIDDEN * 4 :].max(initial=0) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"epoch": 4}, "epoch 4 came in epoch 3"),
        ({"meta_bytes": (1 << 20) + 1}, "message of 1048577 bytes"),
        ({"meta_bytes": 2**32 - 1}, "message of 4294967295 bytes"),
        ({"rows": 65, "columns": HIDDEN}, "65 rows is over the limit 64"),
        ({"rows": 2**32 - 1, "columns": HIDDEN}, "4294967295 rows"),
        ({"rows": 64, "columns": HIDDEN + 1}, "33 columns instead of 32"),
        ({"rows": 0, "columns": HIDDEN}, "32 columns"),
        ({"kind": FrameKind.RESULT, "rows": 1, "columns": HIDDEN}, "RESULT carries 1 rows"),
    ],
)
def test_a_header_that_lies_is_refused_before_anything_is_allocated(pair, change, words):
    header = replace(FrameHeader(FrameKind.STEP, 3, 0, 10, 0, 0), **change)
    # Nothing follows the header: a receiver that acted on its lengths would wait for ever.
    pair[0].sendall(header.pack())
    receiver = TcpReceiver(pair[1], "peer", replace(LIMITS, max_rows=64))
    with pytest.raises(TransportError, match=words):
        receiver.receive(3, np.empty(64 * HIDDEN * 4, np.uint8))


@pytest.mark.parametrize(("offset", "words"), [(0, "the stream is out of step"), (4, "a frame of unknown kind 99")])
def test_a_header_that_is_none_is_refused(offset, words):
    data = bytearray(FrameHeader(FrameKind.STEP, 3, 0, 0, 0, 0).pack())
    data[offset] = 99
    with pytest.raises(TransportError, match=words):
        FrameHeader.unpack(data, LIMITS, 3)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_random_header_is_refused_or_within_the_limits(data, with_magic):
    if with_magic:
        data = FrameHeader(FrameKind.STEP, 0, 0, 0, 0, 0).pack()[:4] + data[4:]
    try:
        header = FrameHeader.unpack(data, replace(LIMITS, max_rows=64), 3)
    except TransportError:
        return
    assert header.meta_bytes <= LIMITS.max_meta_bytes
    assert header.payload_bytes <= 64 * HIDDEN * 4


def test_a_frame_cut_at_any_byte_is_an_error_and_never_a_frame():
    listening = socket.create_server((HOST, 0))
    hidden = np.arange(2 * HIDDEN, dtype=np.float32).reshape(2, HIDDEN)
    meta = b"message"
    whole = FrameHeader(FrameKind.STEP, 3, 5, len(meta), 2, HIDDEN).pack() + meta + hidden.tobytes()
    with listening:
        for cut in range(len(whole) + 1):
            with socket.create_connection(listening.getsockname()) as sending, listening.accept()[0] as receiving:
                receiver = TcpReceiver(receiving, "stage 1", LIMITS)
                sending.sendall(whole[:cut])
                sending.shutdown(socket.SHUT_WR)
                slot = np.empty(LIMITS.slot_bytes, np.uint8)
                if cut == len(whole):
                    assert np.array_equal(receiver.receive(3, slot).hidden, hidden)
                    cut = 0
                with pytest.raises(TransportError) as caught:
                    receiver.receive(3, slot)
                # Only between two frames is a closed connection an end and not damage.
                assert isinstance(caught.value, ChannelClosedError) == (cut == 0)


def test_a_peer_that_falls_silent_in_mid_frame_does_not_hang_the_receiver(pair):
    receiver = TcpReceiver(pair[1], "stage 1", LIMITS, stall_seconds=0.2)
    pair[0].sendall(step_frame_bytes()[:-1])
    with pytest.raises(TransportError, match="stage 1 stopped in mid-frame"):
        receiver.receive(3, np.empty(LIMITS.slot_bytes, np.uint8))


def test_a_peer_that_is_silent_between_frames_is_waited_for(pair):
    receiver = TcpReceiver(pair[1], "stage 1", LIMITS, stall_seconds=0.05)
    threading.Timer(0.3, pair[0].sendall, args=(step_frame_bytes(),)).start()
    assert receiver.receive(3, np.empty(LIMITS.slot_bytes, np.uint8)).step_id == 5


def step_frame_bytes() -> bytes:
    meta = encode_message(plan_of(5))
    return FrameHeader(FrameKind.STEP, 3, 5, len(meta), 3, HIDDEN).pack() + meta + bytes(3 * HIDDEN * 4)


def test_a_peer_that_stops_reading_does_not_hang_the_sender(pair):
    sender = TcpSender(pair[0], "stage 1", stall_seconds=0.3)
    frame = Frame(FrameKind.STEP, 0, b"", np.zeros((8192, HIDDEN), np.float32))

    def send_for_ever() -> None:
        while True:
            sender.send(3, frame)

    with pytest.raises(TransportError, match=r"stage 1 has not taken a byte for 0\.3 s"):
        send_for_ever()


def test_closing_wakes_a_sender_and_a_receiver(pair):
    sender = TcpSender(pair[0], "peer")
    receiver = TcpReceiver(pair[1], "peer", LIMITS)
    frame = Frame(FrameKind.STEP, 0, b"", np.zeros((1 << 18, HIDDEN), np.float32))
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def expect_error(call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except TransportError as error:
            errors.put(error)

    sending = threading.Thread(target=expect_error, args=(sender.send, 3, frame))
    sending.start()
    sender_waits = pair[0].fileno()
    assert sender_waits > 0
    time.sleep(0.05)
    sender.close()
    sending.join(60)
    assert not sending.is_alive()
    receiving = threading.Thread(target=expect_error, args=(receiver.receive, 3, np.empty(LIMITS.slot_bytes, np.uint8)))
    receiving.start()
    receiver.close()
    receiving.join(60)
    assert not receiving.is_alive()
    assert errors.qsize() == 2


def test_a_descriptor_is_not_given_back_while_a_thread_is_inside_a_call_on_it(pair):
    """Its number could belong to another epoch's connection before that thread reads from it."""
    receiver = TcpReceiver(pair[1], "peer", LIMITS)
    inside = threading.Event()
    leave = threading.Event()

    class Slow:
        def recv_into(self, view: memoryview) -> int:
            inside.set()
            leave.wait(60)
            return pair[1].recv_into(view)

        def __getattr__(self, name: str) -> object:
            return getattr(pair[1], name)

    receiver._guard.sock = Slow()  # type: ignore[assignment]
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def receive() -> None:
        try:
            receiver.receive(3, np.empty(0, np.uint8))
        except TransportError as error:
            errors.put(error)

    thread = threading.Thread(target=receive)
    thread.start()
    assert inside.wait(60)
    receiver.close()
    assert pair[1].fileno() != -1
    leave.set()
    thread.join(60)
    assert pair[1].fileno() == -1
    assert errors.qsize() == 1


# -- messages --------------------------------------------------------------------------------------------------------


def test_messages_come_back_equal():
    plan = plan_of(3)
    assert decode_plan(encode_message(plan)) == plan
    result = StepResult(3, (SampledToken(1, 2, -0.1, ((2, -0.1), (5, float("-inf")))),))
    assert decode_result(encode_message(result)) == result
    failure = StageFailure(2, "ValueError", "wörds", True)
    assert decode_failure(encode_message(failure)) == failure


class _Columns:
    """The columns of a plan's runs, right or wrong."""

    def __init__(self, *columns: tuple[object, ...]) -> None:
        self.columns = columns

    def __reduce__(self) -> tuple[object, ...]:
        return plan_of_columns, (1, (), (), *self.columns)


def test_a_long_failure_is_shortened_in_the_middle():
    failure = decode_failure(encode_message(StageFailure(0, "E" * 1000, "a" * 10**6 + "the end", False)))
    assert len(failure.text) < MAX_FAILURE_TEXT + 10
    assert failure.text.endswith("the end")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (pickle.dumps(np.float32(1)), "numpy"),
        (pickle.dumps((1, 2)), "is a tuple, not a StepPlan"),
        (encode_message(StepResult(1, ())), "is a StepResult, not a StepPlan"),
        (encode_message(plan_of(1))[:-10], "cannot be decoded"),
        (pickle.dumps(_Columns((1, 2), (0, 0))), "cannot be decoded"),
        (pickle.dumps(_Columns((1, 2), (0, 0), ((5,), (6,)), ((), ()), (True,))), "cannot be decoded"),
        (b"", "cannot be decoded"),
    ],
)
def test_a_message_that_is_no_plan_is_refused(data, words):
    with pytest.raises(TransportError, match=words):
        decode_plan(data)


def test_nothing_in_a_message_runs(tmp_path):
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "made"),)

    data = pickle.dumps((plan_of(1), Evil()))
    with pytest.raises(TransportError, match=r"names posix\.mkdir, which no message has"):
        decode_plan(data)
    assert not (tmp_path / "made").exists()


# -- handshake -------------------------------------------------------------------------------------------------------

RIGHT = Credentials(b"k" * 32, 3, b"p" * 32)


@pytest.fixture
def listener() -> Iterator[Listener]:
    one = Listener(HOST, RIGHT, own=1, peer=0, limits=LIMITS, handshake_seconds=60.0)
    yield one
    one.close()
    wait_until(lambda: not data_threads(), "the listener's threads end")


@pytest.mark.parametrize(
    ("credentials", "own", "peer", "words"),
    [
        (replace(RIGHT, key=b"q" * 32), 0, 1, "does not know this pipeline's key"),
        (replace(RIGHT, epoch=2), 0, 1, "it is of epoch 2, the pipeline is in epoch 3"),
        (replace(RIGHT, epoch=4), 0, 1, "it is of epoch 4, the pipeline is in epoch 3"),
        (replace(RIGHT, plan_hash=b"x" * 32), 0, 1, "its plan .* is another one"),
        (RIGHT, 2, 1, "stage 2 wants stage 1; stage 1 expects stage 0"),
        (RIGHT, 0, 2, "stage 0 wants stage 2; stage 1 expects stage 0"),
        (RIGHT, ENGINE, 1, "the engine wants stage 1; stage 1 expects stage 0"),
    ],
)
def test_a_wrong_peer_is_refused_with_the_reason_and_the_right_one_still_gets_in(
    listener, credentials, own, peer, words
):
    with pytest.raises(TransportError, match=words):
        connect(listener.address, credentials, own, peer)
    sender = connect(listener.address, RIGHT, 0, 1)
    receiver = listener.accept(60.0)
    sender.send(3, step_frame(5))
    assert receiver.receive(3, np.empty(0, np.uint8)).step_id == 5
    sender.close()
    receiver.close()


def test_another_protocol_version_is_told_so(listener, monkeypatch):
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", handshake.PROTOCOL_VERSION + 1)
    sock = socket.create_connection(listener.address)
    hello = handshake._HELLO.pack(b"shardln\n", 9, 0, 1, 3, b"p" * 32, bytes(32))
    sock.sendall(hello)
    assert b"protocol version 9" in sock.recv(1000)
    sock.close()


def test_a_second_peer_is_refused(listener):
    first = connect(listener.address, RIGHT, 0, 1)
    with pytest.raises(TransportError, match="stage 0 is connected already"):
        connect(listener.address, RIGHT, 0, 1)
    first.close()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100, step_frame_bytes(), os.urandom(200)])
def test_a_stranger_is_cut_off_before_anything_is_decoded(listener, monkeypatch, data):
    monkeypatch.setattr(pickle, "Unpickler", None)
    with socket.create_connection(listener.address) as stranger:
        stranger.sendall(data)
        stranger.settimeout(60)
        try:
            answer = stranger.recv(1)
        except ConnectionResetError:
            answer = b""
        assert answer == b""
    with pytest.raises(TransportError, match=r"did not connect to stage 1 within 0.1 s; a stranger connected"):
        listener.accept(0.1)


def test_silent_strangers_do_not_keep_the_right_peer_out(listener):
    silent = [socket.create_connection(listener.address) for _ in range(8)]
    # The strangers have much longer than the peer is ready to wait.
    connect(listener.address, RIGHT, 0, 1).close()
    for sock in silent:
        sock.close()


def test_a_silent_stranger_is_cut_off_when_the_handshakes_time_is_over():
    listener = Listener(HOST, RIGHT, own=1, peer=0, limits=LIMITS, handshake_seconds=0.1)
    with socket.create_connection(listener.address) as sock:
        sock.settimeout(60)
        assert sock.recv(1) == b""
    listener.close()
    wait_until(lambda: not data_threads(), "the listener's threads end")


def test_a_recorded_proof_is_worth_nothing_on_another_connection(listener):
    class Recorder:
        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock
            self.sent = b""

        def sendall(self, data: bytes) -> None:
            self.sent += data
            self.sock.sendall(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self.sock, name)

    recorder = Recorder(socket.create_connection(listener.address))
    handshake.greet(recorder, RIGHT, 0, 1, 60.0)  # type: ignore[arg-type]
    recorder.sock.close()
    second = Listener(HOST, RIGHT, own=1, peer=0, limits=LIMITS)
    with socket.create_connection(second.address) as replay:
        replay.sendall(recorder.sent)
        replay.settimeout(60)
        answer = b""
        while part := replay.recv(1000):
            answer += part
    assert b"does not know this pipeline's key" in answer
    second.close()


def test_a_connector_does_not_trust_an_acceptor_without_the_key():
    impostor = Listener(HOST, replace(RIGHT, key=b"z" * 32), own=1, peer=0, limits=LIMITS)
    with pytest.raises(TransportError, match="the peer that was connected to does not know this pipeline's key"):
        connect(impostor.address, RIGHT, 0, 1)
    impostor.close()


def test_the_key_is_not_in_a_repr():
    assert b"k" * 32 not in repr(RIGHT).encode()
    assert "kkkk" not in repr(RIGHT)


# -- stages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_every_step_passes_every_stage_once_and_in_order(chain, num_stages):
    pipeline = chain(num_stages)
    link = pipeline.wire()
    submitted = 0
    for finished in range(200):
        while submitted < 200 and submitted - finished < 8:
            link.send(step_frame(submitted, rows=1 + submitted % 64))
            submitted += 1
        assert pipeline.result() == StepResult(finished, (SampledToken(7, pipeline.expected(finished)),))
    counters = [worker.counters() for worker in pipeline.workers]
    assert [c.steps for c in counters] == [200] * num_stages
    assert len({c.rows for c in counters}) == 1


def test_a_probe_names_the_stages_it_passed(chain):
    pipeline = chain(4)
    pipeline.wire().send(Frame(FrameKind.PROBE, 0, b""))
    assert bytes(pipeline.frames.get(timeout=60).meta) == bytes([0, 1, 2, 3])


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError("odd words"), PlanError("no such sequence")])
def test_an_exception_in_a_stage_is_that_steps_result_and_the_loop_goes_on(chain, where, error):
    pipeline = chain(3)
    link = pipeline.wire()

    def fail_at_four(plan: StepPlan) -> None:
        if plan.step_id == 4:
            raise error

    pipeline.stages[where].before_step = fail_at_four
    for step_id in range(8):
        link.send(step_frame(step_id))
    for step_id in range(4):
        assert pipeline.result().step_id == step_id
    for step_id in range(4, 8):
        # Later steps of the epoch must not run on a state that missed one.
        frame = pipeline.frames.get(timeout=60)
        assert (frame.kind, frame.step_id) == (FrameKind.FAILURE, step_id)
        failure = decode_failure(frame.meta)
        assert (failure.stage, failure.error) == (where, type(error).__name__)
        assert str(error) in failure.text
        assert "test_transport.py" in failure.text
        assert failure.keeps_state == isinstance(error, PlanError)
    assert pipeline.ends.empty()
    pipeline.wire().send(step_frame(100))
    assert pipeline.result().tokens[0].token_id == pipeline.expected(100)


def test_an_output_of_the_wrong_shape_is_a_failure_and_not_a_hang(chain):
    pipeline = chain(2)
    link = pipeline.wire()
    wrong = StepOutput(np.zeros((1, HIDDEN + 1), np.float32), None)
    pipeline.stages[0].begin = lambda plan, hidden: DoneStep(wrong)
    link.send(step_frame(0))
    assert decode_failure(pipeline.frames.get(timeout=60).meta).error == "AssertionError"


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_when_one_stage_ends_every_other_and_the_engine_learn_of_it(chain, victim):
    pipeline = chain(3)
    link = pipeline.wire()
    link.send(step_frame(0))
    pipeline.result()
    pipeline.workers[victim].end("it was killed")
    assert "closed the connection" in pipeline.ends.get(timeout=60)
    for later in pipeline.workers[victim + 1 :]:
        wait_until(lambda later=later: later.progress().ended is not None, "the stages after it end")
    # Those before it see it when they next send, or when the engine begins the next epoch.
    new_link = pipeline.wire()
    new_link.send(step_frame(17))
    assert pipeline.result().step_id == 17
    assert all(stage.resets == 2 for stage in pipeline.stages)


def test_rewiring_in_the_middle_of_traffic_mixes_nothing(chain):
    pipeline = chain(3)
    for round_number in range(10):
        link = pipeline.wire()
        first = round_number * 1000
        for step_id in range(first, first + 8):
            link.send(step_frame(step_id))
        for step_id in range(first, first + round_number % 8):
            assert pipeline.result().tokens[0].token_id == pipeline.expected(step_id)


def test_a_process_of_an_older_epoch_is_refused(chain):
    pipeline = chain(2)
    pipeline.wire()
    old = Credentials(pipeline.key, 1, b"p" * 32)
    new = Credentials(pipeline.key, 2, b"p" * 32)
    address = pipeline.workers[1].listen(HOST, new)
    with pytest.raises(TransportError, match="it is of epoch 1, the pipeline is in epoch 2"):
        connect(address, old, 0, 1)


def test_a_step_that_hangs_is_named_when_the_next_epoch_begins(chain):
    pipeline = chain(1)
    release = threading.Event()
    pipeline.stages[0].before_step = lambda plan: release.wait(240) and None
    pipeline.wire().send(step_frame(41))
    wait_until(lambda: pipeline.workers[0].progress().running == 41, "the step runs")
    assert pipeline.workers[0].progress().running_seconds >= 0
    with pytest.raises(TransportError, match="stage 0 still computes step 41 of epoch 1"):
        pipeline.workers[0].listen(HOST, Credentials(pipeline.key, 2, b"p" * 32), join_seconds=0.1)
    assert pipeline.stages[0].resets == 1, "a stage that computes must not be reset"
    release.set()


class Neighbour:
    """A peer that knows the key, before and behind one stage, to send it what no honest peer sends."""

    def __init__(self, index: int, num_stages: int, max_in_flight: int = 2) -> None:
        self.stage = PretendStage(index, num_stages)
        self.worker = StageWorker(index, num_stages, self.stage, HIDDEN, 64, max_in_flight)
        following = ENGINE if index + 1 == num_stages else index + 1
        self.behind = Listener(HOST, RIGHT, following, index, LIMITS)
        address = self.worker.listen(HOST, RIGHT)
        self.before = connect(address, RIGHT, ENGINE if index == 0 else index - 1, index)
        self.worker.connect(self.behind.address)
        self.receiver = self.behind.accept(60.0)

    def receive(self) -> Frame:
        return self.receiver.receive(RIGHT.epoch, np.empty(LIMITS.slot_bytes, np.uint8))

    def close(self) -> None:
        self.before.close()
        self.receiver.close()
        self.behind.close()
        self.worker.close()


@pytest.fixture
def neighbour() -> Iterator[Callable[..., Neighbour]]:
    made: list[Neighbour] = []

    def make(*args: int, **options: int) -> Neighbour:
        made.append(Neighbour(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    wait_until(lambda: not data_threads(), "the data threads end")


def hidden_of(rows: int) -> NDArray[np.float32]:
    return np.ones((rows, HIDDEN), np.float32)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([step_frame(5, 3, hidden_of(3)), step_frame(7, 3, hidden_of(3))], "step 7 came where step 6 was due"),
        ([step_frame(5, 3, hidden_of(3)), step_frame(5, 3, hidden_of(3))], "step 5 came where step 6 was due"),
        ([step_frame(5, 3, hidden_of(2))], "step 5 with 2 rows carries the plan of step 5 with 3 rows"),
        ([step_frame(5, 3)], "step 5 with 0 rows carries"),
        ([replace(step_frame(5, 3, hidden_of(3)), step_id=6)], "the frame of step 6 .* carries the plan of step 5"),
        ([step_frame(5, 65, hidden_of(65))], "65 rows is over the limit 64"),
        ([Frame(FrameKind.STEP, 5, b"junk", hidden_of(3))], "cannot be decoded"),
        ([Frame(FrameKind.RESULT, 5, encode_message(StepResult(5, ())))], "RESULT has no business in a stage"),
    ],
)
def test_a_stage_ends_the_epoch_rather_than_mix_steps(neighbour, frames, words):
    peer = neighbour(1, 3)
    for frame in frames:
        peer.before.send(RIGHT.epoch, frame)

    def receive_all() -> None:
        # The frames before the bad one may still come out.
        while True:
            peer.receive()

    with pytest.raises(TransportError):
        receive_all()
    wait_until(lambda: peer.worker.progress().ended is not None, "the epoch ends")
    assert re.search(words, peer.worker.progress().ended), peer.worker.progress().ended


def test_a_peer_of_another_epoch_inside_a_connection_is_cut_off(neighbour):
    peer = neighbour(1, 3)
    peer.before.send(RIGHT.epoch + 1, step_frame(0, 3, hidden_of(3)))
    with pytest.raises(TransportError):
        peer.receive()
    assert "a frame of epoch 4 came in epoch 3" in (peer.worker.progress().ended or "")


def test_a_peer_that_sends_too_much_is_held_back(neighbour):
    peer = neighbour(0, 1, max_in_flight=2)
    sock = peer.before._guard.sock
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    release = threading.Event()
    peer.stage.before_step = lambda plan: release.wait(240) and None
    taken = 0
    padding = SequenceRun(1, 0, tuple(range(60)), tuple(range(20000)), True)
    sock.settimeout(0.5)

    def send_too_much() -> None:
        nonlocal taken
        while taken < 1000:
            plan = StepPlan(taken, (), (), (padding,))
            peer.before.send(RIGHT.epoch, Frame(FrameKind.STEP, taken, encode_message(plan)))
            taken += 1

    with pytest.raises(TransportError, match="has not taken a byte"):
        send_too_much()
    # Three slots, and what the kernel's buffers of some hundred KB hold: never all of it.
    assert taken < 500
    assert len(peer.worker._session._inbox._items) <= 2
    # The end of the epoch frees the receiving thread, although no slot ever comes back.
    peer.worker.end("enough")
    wait_until(lambda: "receive-3" not in data_threads(), "the receiving thread ends")
    release.set()


# -- the hand-over between threads -------------------------------------------------------------------------------------


def test_closing_a_handoff_wakes_its_reader_and_drops_what_is_left():
    handoff: Handoff[int] = Handoff()
    errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def read() -> None:
        try:
            handoff.get()
        except ChannelClosedError as error:
            errors.put(error)

    reader = threading.Thread(target=read)
    reader.start()
    handoff.close()
    reader.join(60)
    assert errors.qsize() == 1
    handoff.put(1)
    with pytest.raises(ChannelClosedError):
        handoff.get()
