"""aserve beside other engines on the same weights: interleaved rounds, medians, bars.

On a shared machine times vary by two; in a round every engine does the same load in turn, one at a
time. `--json` prints {name: {decode_1, ..., prefill_512, ..., ttft_128, rss_mb}}. With `--merge
FILE` every turn is kept: a run cut short goes on where it stopped, and peers may be run one by one.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import sys
import time

from aserve.models import fetch
from aserve.models.registry import load_spec
from bench import machine, processes, record, tables
from bench.engines import EngineError
from bench.install import InstallError
from bench.loads import REPEATS, RSS, WARM_UP, Row, rows_of
from bench.record import Record
from bench.starts import OURS, PEERS, Setting, Started, Variant, variants

# Threads that wait for more work by spinning take the next engine's cores: such are stopped.
IDLE_CORES_MAX = 0.02
IDLE_S = 0.5


class Comparison:
    """The engines of one run, and the record their turns go to."""

    def __init__(self, found: Record, rows: list[Row], rounds: int, file: pathlib.Path | None):
        self.found, self.rows, self.rounds, self.file = found, rows, rounds, file
        self.started: dict[str, Started] = {}

    def save(self) -> None:
        if self.file is not None:
            record.save(self.file, self.found)

    def start(
        self, stack: contextlib.ExitStack, variant: Variant, setting: Setting, again: bool
    ) -> None:
        """Start a variant that has rows to measure; one that cannot be had is noted and left."""
        name = variant.name
        entry = record.open_engine(self.found, name, variant.peer, again=again)
        if not record.missing(self.found, name, self.rows, self.rounds):
            say(f"{name}: nothing left to measure")
            return
        say(f"starting {name}")
        started_s = time.perf_counter()
        try:
            ready = stack.enter_context(variant.open(setting))
            ready.engine.measure(WARM_UP)
            idle = processes.idle_cores(ready.engine.pid, IDLE_S)
        except (InstallError, EngineError, OSError) as error:
            entry["failed"] = str(error)
            say(f"{name} takes no part: {error}")
            self.save()
            return
        self.started[name] = ready
        is_paused = idle > IDLE_CORES_MAX
        entry |= {
            "failed": None,
            "version": ready.version,
            "command": list(ready.command),
            "machine": machine.line(),
            "start_s": round(time.perf_counter() - started_s, 1),
            "idle_cores": round(idle, 3),
            "is_paused": is_paused,
        }
        if is_paused:
            processes.pause(ready.engine.pid)

    def run(self) -> None:
        """Round by round, row by row, engine by engine; a row that has its samples is passed by."""
        for number in range(1, self.rounds + 1):
            began_s = time.perf_counter()
            for row in self.rows:
                for name in list(self.started):
                    if row in record.missing(self.found, name, self.rows, number):
                        self.turn(name, row, number)
            say(f"round {number} of {self.rounds} took {time.perf_counter() - began_s:.0f} s")

    def turn(self, name: str, row: Row, number: int) -> None:
        """One engine, one row; what fails is noted and takes no more turns."""
        if row.kind == "rss":  # read with the decode row of most streams
            return
        engine = self.started[name].engine
        entry = self.found["engines"][name]
        samples = entry["samples"]
        if entry["is_paused"]:
            processes.resume(engine.pid)
        try:
            engine.measure(WARM_UP)
            seen = [row.value(engine.measure(row.load)) for _ in range(REPEATS[row.kind])]
        except (EngineError, OSError) as error:
            entry["failed"] = f"in {row.name}: {error}"
            say(f"{name} takes no more part: {entry['failed']}")
            del self.started[name]
            self.save()
            return
        value = statistics.median(seen)
        samples.setdefault(row.name, []).append(round(value, 3))
        if row == self.fullest():
            resident = round(processes.resident_bytes(engine.pid) / 1e6, 1)
            samples.setdefault(RSS, []).append(resident)
        if entry["is_paused"]:
            processes.pause(engine.pid)
        say(f"round {number}: {row.name}: {name} {value:.1f} {row.unit}")
        self.save()

    def fullest(self) -> Row:
        return max(
            (row for row in self.rows if row.kind == "decode"), key=lambda row: row.load.streams
        )


def main(given: argparse.Namespace) -> tuple[Record, list[Row]]:
    path = fetch.resolve(given.model)
    if given.rounds < 1:
        raise record.RecordError("--rounds is at least 1")
    threads = given.threads or len(os.sched_getaffinity(0))
    setting = Setting(path, threads, load_spec(path).vocab, tuple(given.weights), say)
    rows = rows_of(given.streams, given.scale)
    about = {"model": given.model, "threads": threads, "scale": given.scale}
    found = record.load(given.merge, about) if given.merge else record.new(about)
    wanted = variants(given.peers, setting)
    if given.without_aserve:
        wanted = [one for one in wanted if one.peer != OURS]
    comparison = Comparison(found, rows, given.rounds, given.merge)
    with contextlib.ExitStack() as stack:
        for variant in wanted:
            comparison.start(stack, variant, setting, given.again)
        comparison.run()
        say("stopping the engines")
    comparison.save()
    return found, rows


def end_on_terminate() -> None:
    """A terminated comparison ends the engines that it started, as an interrupted one does: trio
    knows how to be interrupted wherever it is."""
    signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def names(text: str) -> list[str]:
    """Of `a,b`; empty of nothing."""
    return [name for name in text.split(",") if name]


def peer_names(text: str) -> list[str]:
    found = names(text)
    if unknown := [name for name in found if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: know {', '.join(PEERS)}")
    return found


def stream_counts(text: str) -> list[int]:
    try:
        counts = [int(name) for name in names(text)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: give counts like 1,8,32") from error
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give counts of at least 1")
    return counts


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("python -m bench.peers", description=__doc__)
    made.add_argument("--model", default="smollm2", help="a GGUF file, or a name (%(default)s)")
    made.add_argument("--peers", type=peer_names, default=list(PEERS), help=",".join(PEERS))
    made.add_argument("--streams", type=stream_counts, default=[1, 8, 32], help="1,8,32")
    made.add_argument(
        "--weights", type=names, default=[], help="aserve once with each: keep,bf16,int8,q4"
    )
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--threads", type=int, help="default: every core")
    made.add_argument("--scale", type=float, default=1.0, help="of lengths; below 1 to try it out")
    made.add_argument("--merge", type=pathlib.Path, metavar="FILE", help="go on with this record")
    made.add_argument("--again", action="store_true", help="forget what FILE has of these engines")
    made.add_argument("--without-aserve", action="store_true")
    made.add_argument("--json", action="store_true")
    return made


if __name__ == "__main__":
    asked = parser().parse_args()
    end_on_terminate()
    try:
        result, measured = main(asked)
    except record.RecordError as error:
        sys.exit(str(error))
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if isinstance(error, BaseExceptionGroup) and error.split(KeyboardInterrupt)[1]:
            raise  # something else went wrong, too
        sys.exit("interrupted; what was measured is in the file of --merge, if there is one")
    if asked.json:
        print(json.dumps(record.summary(result, measured), indent=2))
    else:
        print(f"{machine.line()}\n\n{tables.whole(result, measured)}")
