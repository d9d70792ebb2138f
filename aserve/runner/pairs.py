"""The rows of a step that stay, as tensors for a drafter with KV of its own."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from aserve.models.decoder import Ends
from aserve.runner.drafter import Kept
from aserve.runner.growing import Ints
from aserve.runner.inputs import PageTables
from aserve.tensor.ops import Attend


class Pairs:
    """A row that stays and the token after it, for each row of `kept`, one sequence after another.

    `next_T` (int64) are those tokens; KV stands at the row's position. `table_NP` has a column for
    the page behind the last one that is used.
    """

    __slots__ = ("_rows", "_starts", "attend", "kv_len_N", "next_T", "table_NP")

    def __init__(self, kept: Sequence[Kept], tables: PageTables) -> None:
        size = tables.page_size
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        kv_lens: list[int] = []
        for one in kept:
            path, first, start = one.path, one.first_row, one.view.start
            pages, kv_len = one.view.state.pages, start + len(path)
            assert len(one.tokens) == len(path), one.view.rows.seq
            tokens += one.tokens
            rows += [first + row for row in path]
            positions += range(start, kv_len)
            slots += [pages[at // size] * size + at % size for at in range(start, kv_len)]
            kv_lens.append(kv_len)
        self._rows = rows
        self._starts = list(accumulate((len(one.path) for one in kept), initial=0))
        self.next_T = torch.tensor(tokens)
        lines = [tables.update(one.view.rows.seq, one.view.state.pages) for one in kept]
        self.kv_len_N, lines_N = np.array([kv_lens, lines], dtype=np.int32)
        self.table_NP: Ints = tables.gather(lines_N, max(kv_lens) // size + 1)
        slots_T, positions_T = np.array([slots, positions], dtype=np.int32)
        self.attend = Attend(
            slots_T=torch.from_numpy(slots_T),
            positions_T=torch.from_numpy(positions_T),
            page_table_NP=torch.from_numpy(self.table_NP),
            row_start_M=torch.tensor(self._starts, dtype=torch.int32),
            kv_len_N=torch.from_numpy(self.kv_len_N),
        )

    def of_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """[T, all columns side by side] of what is there for all rows of the group in the step."""
        rows = self._rows
        if rows != list(range(len(parts[0]))):
            taken = np.array(rows)
            parts = [torch.from_numpy(part.numpy()[taken]) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)

    def ends(self, wanted: Sequence[int]) -> Ends | None:
        """The last rows of these sequences; None: they are all rows."""
        attend = self.attend
        if len(wanted) == self._starts[-1]:
            return None
        rows = np.array([self._starts[n + 1] - 1 for n in wanted], dtype=np.int64)
        counts = np.zeros(len(self.kv_len_N) + 1, dtype=np.int32)
        counts[1:][list(wanted)] = 1
        return Ends(
            torch.from_numpy(rows),
            Attend(
                slots_T=torch.from_numpy(attend.slots_T.numpy()[rows]),
                positions_T=torch.from_numpy(attend.positions_T.numpy()[rows]),
                page_table_NP=attend.page_table_NP,
                row_start_M=torch.from_numpy(counts.cumsum(dtype=np.int32)),
                kv_len_N=attend.kv_len_N,
            ),
        )
