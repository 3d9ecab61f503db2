"""The command line over the rig's engine, as a program: ``python cli_toy.py SECONDS generate ...``.

Every step takes so many seconds, so that somebody has the time to kill it.
"""

from __future__ import annotations

import sys
import time

from batchkit import ChunkedPrefillScheduler, Engine, PagedAllocator, cli
from unit.cli_rig import GEOMETRY, Letters, Runner


def main(step_s: float, argv: list[str]) -> int:
    def make_engine(args):
        allocator = PagedAllocator(GEOMETRY.num_blocks, GEOMETRY.block_size)
        policy = ChunkedPrefillScheduler(allocator, max_num_seqs=args.max_num_seqs)
        return Engine(Runner(lambda out: time.sleep(step_s)), policy, tokenizer=Letters())

    cli.make_engine = make_engine
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
