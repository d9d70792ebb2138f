"""Memory goes back, and what was given back comes again when it is used."""

import re

import numpy as np
import torch

from aserve.models.memory import CODE, TRIM_S, Trimming, give_back


def resident_kib() -> int:
    """Of all code that is mapped."""
    found = 0
    counts = False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            if re.match("[0-9a-f]+-[0-9a-f]+ ", line):
                counts = CODE.match(line) is not None
            elif counts and line.startswith("Rss:"):
                found += int(line.split()[1])
    return found


def test_code_that_nobody_runs_any_more_is_not_resident() -> None:
    ones = torch.ones(300, 300)
    wanted = ones @ ones
    before = resident_kib()
    give_back()
    assert resident_kib() < before
    assert torch.equal(ones @ ones, wanted)
    assert np.linalg.norm(wanted.numpy()) == 300 * 300


def anonymous_kib() -> int:
    with open("/proc/self/status", encoding="utf-8") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon:"))


def test_memory_that_was_freed_among_what_is_in_use_goes_back_every_few_seconds() -> None:
    clock = [0.0]
    trimming = Trimming(now=lambda: clock[0])
    blocks = [np.ones(8 << 10, dtype=np.uint8) for _ in range(4096)]
    del blocks[::2], blocks[1::3]  # what is left keeps each arena from shrinking by itself
    before = anonymous_kib()
    clock[0] = TRIM_S - 0.01
    assert not trimming.now_and_then()
    clock[0] = TRIM_S
    assert trimming.now_and_then()
    assert not trimming.now_and_then()
    assert anonymous_kib() < before - 8 * 1024
    assert all(block.all() for block in blocks)
