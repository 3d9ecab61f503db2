"""A file of 100,000 lines that never exists: what is held of it at any time."""

from __future__ import annotations

import json

import pytest

from batchkit import ChunkedPrefillScheduler, Engine, KVGeometry, PagedAllocator, SimulatedRunner
from batchkit.cli.job import Job
from batchkit.cli.lines import Lines
from batchkit.cli.progress import Progress
from batchkit.cli.records import Records, Writer
from batchkit.cli.rows import RowReader, Rows

WINDOW = 64


class Source:
    """Lines made as they are read."""

    def __init__(self, count):
        self.count = count
        self.num_read = 0

    def readline(self):
        if self.num_read == self.count:
            return b""
        self.num_read += 1
        num_tokens = 1 if self.num_read % 10 else 3
        return b'{"id": "%d", "prompt": [1, 2], "params": {"max_tokens": %d}}\n' % (
            self.num_read,
            num_tokens,
        )


class Sink:
    """Counts the records that are written, in their order, and the most that was read and not yet written."""

    def __init__(self, source):
        self.source = source
        self.num_written = self.most_held = 0

    def write(self, data):
        for line in data.splitlines():
            self.num_written += 1
            assert json.loads(line)["id"] == str(self.num_written)
        self.most_held = max(self.most_held, self.source.num_read - self.num_written)

    def flush(self):
        pass


@pytest.mark.slow
def test_a_long_file_is_held_a_window_at_a_time():
    source = Source(100_000)
    sink = Sink(source)
    geometry = KVGeometry(num_blocks=128, block_size=4, max_model_len=16, vocab_size=10)
    live = []
    policy = ChunkedPrefillScheduler(PagedAllocator(128, 4), max_num_seqs=64)
    engine = Engine(
        SimulatedRunner(geometry, check_kv=False),
        policy,
        on_step=lambda report: live.append(report.num_waiting + report.num_running),
    )
    reader = RowReader(keep={}, defaults={"ignore_eos": True, "detokenize": False})
    job = Job(
        engine,
        Rows(Lines(source), reader),
        Records(model="toy", decode=str),
        Writer(sink, keep_order=True),
        window=WINDOW,
        progress=Progress(shown=False),
    )
    sizes = []

    def sized(put=job.writer.put):
        def counting(position, record):
            put(position, record)
            if position % 10_000 == 9_999:
                sizes.append((len(job._live), job.writer.num_held))

        return counting

    job.writer.put = sized()
    job.run()
    assert sink.num_written == job.num_done == 100_000
    assert job.faults.num == 0
    assert max(live) <= WINDOW
    assert sink.most_held <= 3 * WINDOW  # an answer takes at most three steps, so that few wait for an earlier one
    assert len(sizes) == 10
    assert all(num_live <= WINDOW and num_held <= 2 * WINDOW for num_live, num_held in sizes)
