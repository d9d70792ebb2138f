"""Memory for outputs: large ones are taken again, and never while a tensor lies in them."""

import torch

from aserve.tensor.outputs import LARGE, Outputs


def test_large_memory_is_the_same_again_once_nobody_holds_it() -> None:
    outputs = Outputs()
    first = outputs.empty((2, LARGE))
    address = first.data_ptr()
    del first
    fewer = outputs.empty((LARGE,))
    assert fewer.data_ptr() == address
    assert fewer.shape == (LARGE,)


def test_memory_in_which_a_tensor_lies_is_not_given_again() -> None:
    outputs = Outputs()
    row = outputs.empty((2, LARGE))[1]
    row.fill_(7)
    outputs.empty((2, LARGE)).fill_(8)
    assert row.eq(7).all(), "a view keeps it too"


def test_more_than_there_is_is_new_memory() -> None:
    outputs = Outputs()
    outputs.empty((LARGE,)).fill_(1)
    more = outputs.empty((3, LARGE))
    assert more.shape == (3, LARGE)
    assert more.is_contiguous()


def test_small_outputs_and_other_types_are_their_own() -> None:
    outputs = Outputs()
    tensors = [outputs.empty((3, 4)), outputs.empty((3, 4), torch.int8), outputs.empty((0, 4))]
    assert [tensor.shape for tensor in tensors] == [(3, 4), (3, 4), (0, 4)]
    assert [tensor.dtype for tensor in tensors] == [torch.float32, torch.int8, torch.float32]
