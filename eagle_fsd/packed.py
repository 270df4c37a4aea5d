"""Linear layers whose weights were laid out once for products with few rows.

A pass over a tree multiplies a few dozen rows by every weight. PyTorch's kernels for a CPU arrange
the weight anew in each such product, which takes longer than the product; oneDNN multiplies by
weights that were arranged once. The arranged weights are a copy: they take the memory of the linear
layers a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16)
# Values of each weight that are compared to notice what is written through `weight.data`, which
# PyTorch does not count.
_NUM_PROBES = 64
_SCATTER = 2_654_435_761  # Knuth's multiplier, near 2^32 over the golden ratio


class PackedWeight:
    """x -> x W^T + b with an arranged copy of W. It has no gradient.

    Args:
        weight: [out, in] float32 or bfloat16, on a CPU; kept, to notice when it is changed.
        bias: [out] or None; read at each product.

    Raises:
        RuntimeError: PyTorch was built without oneDNN.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        # Scattered, so that neither a row nor a column holds all of them.
        self._places = torch.arange(1, _NUM_PROBES + 1) * _SCATTER % weight.numel()
        self._state = tensor_state(weight)
        self._values = self._probe()

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out] of the weight's dtype."""
        if rows.dtype != self._packed.dtype or torch.is_autocast_enabled("cpu"):
            return F.linear(rows, self._weight, self._bias)  # it converts, or says what is wrong
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product

    def is_of(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these are the tensors that it was made of, unchanged as far as can be told.

        What is written through `weight.data` is noticed where it changes one of a few values.
        """
        is_same = weight is self._weight and bias is self._bias
        is_same = is_same and tensor_state(weight) == self._state
        return is_same and torch.equal(self._probe(), self._values)

    def _probe(self) -> Tensor:
        return self._weight.detach().reshape(-1)[self._places]


class PackedLayers:
    """The linear layers of a model with their packed weights, to compute by for a while.

    Args:
        model: any module. Its layers call their packed weights only within `computing`; nothing of
            it is copied or replaced, so that hooks, attributes and other modules stay its own.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._products: dict[nn.Linear, PackedWeight] = {}
        self.refresh()

    @property
    def num_layers(self) -> int:
        """How many layers there are; 0 for a model that is computed as it is."""
        return len(self._products)

    def refresh(self) -> None:
        """Follows layers that were added, removed or replaced, and weights that were changed."""
        linears = packable_layers(self._model)
        kept = {linear: self._products.pop(linear, None) for linear in linears}
        self._products = {}  # what is outdated makes room before anything is packed anew
        for linear in linears:
            product = kept.pop(linear)
            if product is not None and not product.is_of(linear.weight, linear.bias):
                product = None
            self._products[linear] = product or PackedWeight(linear.weight, linear.bias)

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Within it, and without a gradient, the layers multiply by their packed weights.

        As `torch.func.functional_call` does with parameters, it sets each layer's forward for the
        time of a pass and takes it away again.
        """
        if torch.is_grad_enabled():  # packed weights have no gradient
            yield
            return
        for linear, product in self._products.items():
            vars(linear)["forward"] = product
        try:
            yield
        finally:
            for linear in self._products:  # another thread's pass over the model may have done so
                vars(linear).pop("forward", None)


def packable_layers(model: nn.Module) -> list[nn.Linear]:
    """The layers that a packed product can stand for; none in a split or adapted model.

    Offloading and tensor parallelism replace what a module computes with, and peft's adapters merge
    into its weights.
    """
    modules = list(model.modules())
    if any(hasattr(each, "_hf_hook") or _is_adapter(each) for each in modules):
        return []
    return [each for each in modules if type(each) is nn.Linear and _is_plain(each)]


def may_pack(weight: Tensor) -> bool:
    """Whether a weight is numbers that a CPU's packed product takes."""
    is_there = weight.device.type == "cpu" and weight.numel() > 0 and weight.dtype in DTYPES
    # PyTorch does not count what is written to an inference tensor.
    return is_there and not weight.is_inference() and bool(torch._C._has_mkldnn)


def copied_bytes(layers: Sequence[nn.Linear]) -> int:
    """Memory that the arranged weights of layers take."""
    return sum(linear.weight.nbytes for linear in layers)


def packed_product(rows: Tensor, weight: Tensor) -> Callable[[], Tensor] | None:
    """Multiplies by an arranged weight, again and again; None where that cannot be had.

    Args:
        rows: [N, in].
        weight: [out, in].
    """
    if not may_pack(weight):
        return None
    expected = F.linear(rows, weight)
    try:
        packed = PackedWeight(weight)
        is_right = torch.allclose(packed(rows), expected, rtol=2e-2)
    except (AttributeError, RuntimeError):  # a build whose operation is another one
        return None
    return partial(packed, rows) if is_right else None


def tensor_state(tensor: Tensor) -> tuple[object, ...]:
    """Differs when a tensor was written to, moved or converted; not after writes to its `data`."""
    number = 0 if tensor.is_inference() else tensor._version
    try:
        place = tensor.data_ptr()
    except RuntimeError:  # a quantised or sharded kind of tensor without memory of its own
        place = id(tensor)
    return (place, number, tensor.dtype, tensor.device)


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer computes what its class does, with a weight as it is."""
    own = vars(linear).get("forward")
    has_own_forward = own is not None and not isinstance(own, PackedWeight)
    return type(linear.weight) is nn.Parameter and may_pack(linear.weight) and not has_own_forward


def _is_adapter(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"
