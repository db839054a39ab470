"""The command line. Answers go to stdout, everything else to stderr; an error is one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

from shardline.cluster.errors import ShardlineError
from shardline.kernels import KernelsError
from shardline.scheduler import InvalidParameterError, SchedulerError
from shardline.stage import StageError

USAGE, FAILED = 2, 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: What comes after the program's name; None takes the process's own.

    Returns:
        The exit code: 0; 2 for wrong usage; 130 after Ctrl-C; 1 for any other failure. With SHARDLINE_DEBUG=1 failures
        show a traceback too.
    """
    from shardline.cluster.cli.app import app

    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        # Wrong usage, Ctrl-C and a reader that has gone are told and turned into exit codes in there.
        app(args=arguments, prog_name="shardline")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else FAILED
    except (ShardlineError, StageError, SchedulerError, KernelsError) as error:
        _debug()
        _say(_one_line(str(error)))
        return USAGE if isinstance(error, InvalidParameterError) else FAILED
    except MemoryError as error:
        _debug()
        _say(f"out of memory: {_one_line(str(error))}. Ask for less at once: fewer sequences, a shorter context")
        return FAILED
    except Exception as error:
        _debug()
        _say(
            f"a fault of shardline: {type(error).__name__}: {_one_line(str(error))}. "
            "Set SHARDLINE_DEBUG=1 to see where, and please report it"
        )
        return FAILED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> None:
    # As with Ctrl-C, whatever was started is stopped on the way out.
    raise SystemExit(128 + number)


def _one_line(text: str) -> str:
    """The first and the last line: what failed, and the end of the traceback or output that came with it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ... ".join(dict.fromkeys((lines[0], lines[-1]))) if lines else "no reason was given"


def _debug() -> None:
    if os.environ.get("SHARDLINE_DEBUG", "") not in ("", "0"):
        traceback.print_exc()


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"shardline: {text}\n")
