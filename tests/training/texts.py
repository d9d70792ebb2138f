"""A tiny target's head, random but real, and texts that it foresees now and then."""

import pathlib

import numpy as np
import torch
from torch import Tensor

from aserve.models.eagle_loading import load_head, shared_with
from aserve.models.eagle_spec import DraftHead
from aserve.models.registry import load_model
from aserve.tensor.reference import ReferenceOps
from aserve.training.files import ANSWER, GIVEN, Conversation
from aserve.training.target import Seen
from tests.models import heads
from tests.models.families import VOCAB, saved

OPS = ReferenceOps()
PROMPT_LEN = 4


class Oracle:
    """The head by `tests.models.heads`: every forward over the whole sequence, from nothing."""

    def __init__(self, method: str) -> None:
        self.config, self.w = heads.eagle(bias=False) if method == "eagle" else heads.eagle3()
        model = saved("llama")[1]
        self.table, self.target_head = model.model.embed_tokens.weight, model.lm_head.weight
        self.method = method
        self.ids = torch.arange(VOCAB) if method == "eagle" else self.w["t2d"].nonzero()[:, 0]

    def load(self, folder: pathlib.Path) -> DraftHead:
        shared = shared_with(load_model(saved("llama")[0], ops=OPS))
        return load_head(heads.write(folder, self.config, self.w), shared, OPS)

    @torch.no_grad()
    def after(self, ids: list[int], features: Tensor, drafted: tuple[int, ...]) -> Tensor:
        """Log-probabilities of the target's tokens after `ids` and a drafted chain; the target has
        been at all of `ids` but the last."""
        n_pairs = len(ids) - 1
        hidden = features[:n_pairs]
        if self.method == "eagle3":
            hidden = hidden @ self.w["fc.weight"].T
        rows = heads.eagle_rows if self.method == "eagle" else heads.eagle3_rows
        for length in range(len(drafted) + 1):
            tokens = torch.tensor([*ids[1:], *drafted[:length]])
            n_rows = len(tokens)
            where = (torch.arange(n_rows), torch.ones(n_rows, n_rows, dtype=torch.bool).tril())
            out = rows(self.w, self.table[tokens], hidden, where)
            hidden = torch.cat((hidden, out[-1:]))
        return self._spread(out[-1])

    def _spread(self, hidden: Tensor) -> Tensor:
        if self.method == "eagle":
            return (self.target_head @ hidden).log_softmax(-1)
        logits = self.w["lm_head.weight"] @ heads.rms(hidden, self.w["norm.weight"])
        return torch.full((VOCAB,), -torch.inf).index_put((self.ids,), logits.log_softmax(-1))

    def feature_len(self) -> int:
        return heads.HIDDEN * (1 if self.method == "eagle" else 3)

    def text(self, seed: int, length: int) -> tuple[Conversation, Seen]:
        """An answer that takes the head's first choice mostly, and its second or third at times."""
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(length, self.feature_len(), generator=generator).bfloat16()
        ids = torch.randint(3, VOCAB, (PROMPT_LEN,), generator=generator).tolist()
        while len(ids) < length:
            rank = [0, 0, 1, 0, 2, 0, 0, 30][int(torch.randint(8, (1,), generator=generator))]
            spread = self.after(ids, features.float(), ())
            ids.append(int(spread.argsort(descending=True)[rank]))
        writers = np.full(length, ANSWER, dtype=np.uint8)
        writers[:PROMPT_LEN] = GIVEN
        seen = Seen(features, features[:, : heads.HIDDEN], torch.zeros(length, dtype=torch.int32))
        return Conversation(np.array(ids, dtype=np.int32), writers), seen
