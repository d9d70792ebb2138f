"""What planning costs while many wait, counted in tokens compared: no clock, so no luck."""

from collections.abc import Iterator

from aserve.core.sequence import Sequence
from tests.core.deployment import VOCAB, Deployment


class Counted(list[int]):
    """Tokens that count how many of them were read."""

    n_read = 0

    def __getitem__(self, at):  # type: ignore[no-untyped-def]
        part = super().__getitem__(at)
        Counted.n_read += len(part) if isinstance(at, slice) else 1
        return part

    def __iter__(self) -> Iterator[int]:
        Counted.n_read += len(self)
        return super().__iter__()


def prompt(start: int, prompt_len: int) -> list[int]:
    return [(start + at) % VOCAB for at in range(prompt_len)]


def count_waiting(deployment: Deployment) -> list[Sequence]:
    waiting = list(deployment.planner._composer.queue)
    for sequence in waiting:
        sequence.tokens = Counted(sequence.tokens)
    Counted.n_read = 0
    return waiting


def test_a_queue_head_that_waits_for_memory_is_not_matched_again_and_again() -> None:
    deployment = Deployment(page_size=4, pages_total=260, step_tokens=512, context_len=2000)
    deployment.ask(0, prompt(0, 800), max_tokens=1)
    deployment.pump()  # 200 pages of the cache
    deployment.ask(1, prompt(3, 200), max_tokens=40)
    deployment.step()
    for seq in (2, 3):
        deployment.ask(seq, prompt(0, 800), max_tokens=200)
    waiting = count_waiting(deployment)
    deployment.step()
    assert Counted.n_read <= 810
    Counted.n_read = 0
    for _ in range(20):
        deployment.step()
    assert deployment.planner.statistics().waiting == 2
    assert Counted.n_read <= 20 * 4 * 2, "a page or two a step, to see whether more is cached"
    for sequence in waiting:
        sequence.tokens = list(sequence.tokens)
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_those_who_share_a_prefix_compare_it_once_each() -> None:
    deployment = Deployment(
        page_size=4, pages_total=1000, step_tokens=400, running_max=32, context_len=2000
    )
    deployment.ask(0, prompt(0, 400), max_tokens=1)
    deployment.pump()
    for seq in range(1, 17):  # each with a tail of its own, which it promises to the cache
        deployment.ask(seq, [*prompt(0, 400), *prompt(seq, 8)], max_tokens=2)
    count_waiting(deployment)
    deployment.step()
    assert deployment.planner.statistics().running == 16
    # Matched, admitted, folded into the digest and planned: some four times each, not 16.
    assert Counted.n_read <= 16 * 408 * 4
    deployment.pump()
    deployment.check_texts()
    deployment.check_idle()


def test_what_running_sequences_need_is_counted_once_a_step() -> None:
    deployment = Deployment(page_size=4, pages_total=1000, step_tokens=400, running_max=32)
    ratio = deployment.planner._composer.ratio
    count, n_counted = ratio.pages_future, 0

    def counting(group, sequence):  # type: ignore[no-untyped-def]
        nonlocal n_counted
        n_counted += 1
        return count(group, sequence)

    ratio.pages_future = counting  # type: ignore[method-assign]
    for seq in range(32):
        deployment.ask(seq, prompt(seq, 8))
    deployment.step()
    assert deployment.planner.statistics().running == 32
    assert n_counted <= 32 * 4, "not once for each pair"
