"""A prefix cache for drafters whose KV of a token depends on the next: pages go by both."""

import pytest

from aserve.core.pages import PagePool
from aserve.core.radix import RadixTree
from tests.core.deployment import Deployment, oracle


def deployed(**more: int | bool) -> Deployment:
    return Deployment(
        **{"draft_max": 3, "bigrams": True, "page_size": 4, "pages_total": 40, **more}
    )


def hit_len(deployment: Deployment, seq: int) -> int:
    return deployment.ends[seq].cached_len


def test_a_page_is_found_by_who_goes_on_with_the_same_token() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool, 2, bigrams=True)
    root = tree.root("")
    tree.lock(root)
    node, duplicates = tree.extend(root, [1, 2, 3, 4, 5], [pool.take(), pool.take()])
    assert not duplicates
    tree.unlock(node)

    def depth(*tokens: int) -> int:
        found = tree.match("", tokens, len(tokens) - 1)
        assert found is not None
        return found.depth

    assert depth(1, 2, 3, 4, 5) == 2
    assert depth(1, 2, 3, 4, 6) == 1  # the second page's last token goes on otherwise
    assert depth(1, 2, 4, 4, 5) == 0
    assert depth(1, 2, 3) == 1
    assert tree.has(root, [1, 2, 3])
    assert not tree.has(root, [1, 2, 4])
    tree.audit()
    tree.flush()
    assert pool.n_free == 8


def test_storing_needs_the_token_after_the_last_page() -> None:
    pool = PagePool(8)
    tree = RadixTree(pool, 2, bigrams=True)
    root = tree.root("")
    tree.lock(root)
    with pytest.raises(AssertionError):
        tree.extend(root, [1, 2], [pool.take()])


@pytest.mark.parametrize(("bigrams", "expected"), [(True, 4), (False, 8)])
def test_a_prompt_that_parts_at_a_border_of_pages_hits_one_page_less(
    bigrams: bool, expected: int
) -> None:
    deployment = deployed(bigrams=bigrams)
    deployment.ask(0, range(12), max_tokens=4)
    deployment.pump()
    deployment.ask(1, [*range(8), 30, 31, 32], max_tokens=4)
    deployment.ask(2, [*range(9), 31, 32], max_tokens=4)
    deployment.pump()
    assert hit_len(deployment, 1) == expected
    assert hit_len(deployment, 2) == 8
    deployment.check_texts()
    deployment.check_idle()


def test_a_conversation_goes_on_from_all_that_was_said() -> None:
    deployment = deployed()
    deployment.ask(0, range(7), max_tokens=10)
    deployment.pump()
    text = [*range(7), *deployment.texts[0]]
    deployment.ask(1, [*text, 1, 2], max_tokens=4)
    deployment.pump()
    assert hit_len(deployment, 1) == 16  # of 17, the last of which never got KV
    deployment.check_texts()
    deployment.check_idle()


def test_a_page_that_ends_with_the_prompt_goes_by_the_first_token_drawn() -> None:
    deployment = deployed(draft_max=0)
    deployment.ask(0, range(8), max_tokens=9)
    first = oracle(deployment.requests[0])[0]
    deployment.step()
    assert deployment.planner.statistics().kv_pages_used == 2
    assert deployment.planner._groups[0].tree.n_pages == 2
    other = (first + 1) % 40
    deployment.ask(1, [*range(8), first, 3], max_tokens=2)
    deployment.ask(2, [*range(8), other, 3], max_tokens=2)
    deployment.pump()
    assert [hit_len(deployment, seq) for seq in (1, 2)] == [8, 4]
    deployment.check_texts()
    deployment.check_idle()


def test_a_full_page_whose_next_token_nobody_knows_is_given_back() -> None:
    deployment = deployed()
    deployment.ask(0, range(8), max_tokens=9)
    deployment.plan_one()
    deployment.finish(0)  # while the prompt is computed: what it draws is nobody's
    deployment.report_one()
    assert deployment.planner.statistics().kv_pages_cached == 1
    deployment.pump()
    deployment.check_idle()


def test_who_would_go_on_otherwise_does_not_wait_for_the_page() -> None:
    deployment = deployed(step_tokens=8)
    deployment.ask(0, range(12), max_tokens=4)
    deployment.plan_one()
    deployment.ask(1, [*range(4), 30, 31], max_tokens=4)  # another page, in pairs
    deployment.ask(2, [*range(5), 31], max_tokens=4)
    deployment.report_one()
    deployment.plan_one()
    waiting = {sequence.seq for sequence in deployment.planner._composer.queue}
    assert 1 not in waiting
    deployment.pump()
    assert [hit_len(deployment, seq) for seq in (1, 2)] == [0, 4]
    deployment.check_texts()
    deployment.check_idle()


def test_what_was_retracted_comes_back_with_its_pages() -> None:
    deployment = deployed(page_size=2, pages_total=16)
    deployment.planner._composer.ratio.value = 1 << 16
    for seq in range(4):
        deployment.ask(seq, [seq, 9, 8, 7], max_tokens=18)
    deployment.pump()
    statistics = deployment.planner.statistics()
    assert statistics.retractions > 0
    assert statistics.prefix_hit_tokens > 0
    deployment.check_texts()
    deployment.check_idle()
