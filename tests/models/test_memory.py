"""Memory goes back, and what was given back comes again when it is used."""

import re

import numpy as np
import torch

from aserve.models.memory import CODE, give_back


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
