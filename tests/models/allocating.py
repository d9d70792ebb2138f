"""A process of its own, under counted_malloc.c: what the stack of a model allocates in a step.

Prints, for each number of rows given, the bytes that one call takes from the allocator.
"""

import ctypes
import sys

import torch

from aserve.models.fused import Whole
from aserve.models.registry import load_model
from aserve.tensor.ops import open_ops
from aserve.tensor.tokens import Seat, Tokens
from tests.models.paged import Paged


def main(folder: str, threads: int, counts: list[int]) -> None:
    counter = ctypes.CDLL(None)
    counter.counted_stop.restype = ctypes.c_long
    model = load_model(folder, ops=open_ops("native", threads, True), dtype="bf16")
    whole = model.through
    assert isinstance(whole, Whole)
    paged = Paged(model)
    for seq, count in enumerate(counts):
        texts = [list(range(10, 10 + count)) for _ in range(3)]
        taken = -1
        for text in texts:  # twice to warm up, then for the count
            ids = torch.tensor(text)
            attend = paged.attend([(seq, text)])
            paged.kv_len[seq] = 0
            x_TH = model.ops.embed(model.head, ids)
            rows = whole.blocks.step(attend, model.rotary.upto(count))
            Tokens(Seat(model.grid, 0), [[count]])
            counter.counted_start()
            out_TH = whole.stack(x_TH, paged.kv, rows)
            taken = counter.counted_stop() - out_TH.nbytes
        sys.stdout.write(f"{taken} ")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), [int(count) for count in sys.argv[3:]])
