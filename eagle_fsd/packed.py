"""Linear layers whose weights were laid out once for products with few rows.

A pass over a tree multiplies a few dozen rows by every weight. PyTorch's kernels for a CPU arrange
the weight anew in each such product, which takes longer than the product; oneDNN multiplies by
weights that were arranged once. The arranged weights are a copy: they take the memory of the linear
layers a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16)
# Values of each weight that are compared to notice what is written through `weight.data`, which
# PyTorch does not count.
_NUM_PROBES = 64


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
        generator = torch.Generator().manual_seed(weight.numel())
        self._places = torch.randint(weight.numel(), (_NUM_PROBES,), generator=generator)
        self._state = _state(weight)
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
        is_same = weight is self._weight and bias is self._bias and _state(weight) == self._state
        return is_same and torch.equal(self._probe(), self._values)

    def _probe(self) -> Tensor:
        return self._weight.detach().reshape(-1)[self._places]


class PackedLinear(nn.Module):
    """A linear layer computed by its `PackedWeight`, on the parameters of the layer itself."""

    def __init__(self, linear: nn.Linear, product: PackedWeight) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._product = product

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows)


class PackedTwin:
    """The modules of a model again, with packed linear layers; the model itself stays as it is.

    Each module of the twin has the attributes, parameters, buffers and hooks of its original, and
    `refresh` follows what was changed since. Linear layers that are not plain weights in a CPU's
    memory, or have hooks, are the originals.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._source = model
        self._seen: list[object] = []
        self._products: dict[nn.Linear, PackedWeight] = {}
        self.refresh()

    @property
    def model(self) -> nn.Module:
        """The twin, or the model itself where nothing of it can be packed."""
        return self._model

    def refresh(self) -> None:
        """Follows the model's modules, attributes, hooks and weights."""
        linears = packable_layers(self._source)
        products = {linear: self._products.get(linear) for linear in linears}
        is_same = self._products.keys() == products.keys()
        for linear, product in products.items():
            if product is None or not product.is_of(linear.weight, linear.bias):
                products[linear] = PackedWeight(linear.weight, linear.bias)
                is_same = False
        seen = list(_bindings(self._source))
        if is_same and _are_the_same(seen, self._seen):
            return
        self._seen = seen
        self._products = {linear: each for linear, each in products.items() if each is not None}
        self._model = _twin(self._source, self._products) if linears else self._source


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
    is_there = weight.device.type == "cpu" and weight.dtype in DTYPES
    return is_there and bool(torch._C._has_mkldnn)


def copied_bytes(model: nn.Module) -> int:
    """Memory that the arranged weights of a model take."""
    return sum(linear.weight.nbytes for linear in packable_layers(model))


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


def _state(weight: Tensor) -> tuple[object, ...]:
    """Differs when a tensor was written to, moved or converted."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version, weight.dtype


def _is_plain(linear: nn.Linear) -> bool:
    """Whether a layer is its weights and nothing more."""
    has_hooks = linear._forward_hooks or linear._forward_pre_hooks
    is_plain = type(linear.weight) is nn.Parameter and may_pack(linear.weight)
    return is_plain and not has_hooks and "forward" not in vars(linear)


def _is_adapter(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def _bindings(model: nn.Module) -> Iterator[object]:
    """What the names of all modules stand for, in order."""
    for module in model.modules():
        yield module
        yield from vars(module)
        yield from vars(module).values()
        yield from module._modules.values()


def _are_the_same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(_is, some, others))


def _is(one: object, other: object) -> bool:
    return one is other or (type(one) is str and one == other)


def _twin(model: nn.Module, products: dict[nn.Linear, PackedWeight]) -> nn.Module:
    """A module for each module, with its very attributes; only children are twins in their turn."""
    twins: dict[nn.Module, nn.Module] = {
        linear: PackedLinear(linear, product) for linear, product in products.items()
    }

    def twin(module: nn.Module) -> nn.Module:
        if module not in twins:
            made: Any = object.__new__(type(module))
            twins[module] = made
            children = {
                name: None if child is None else twin(child)
                for name, child in module._modules.items()
            }
            made.__dict__.update(vars(module) | {"_modules": children})
        return twins[module]

    return twin(model)
