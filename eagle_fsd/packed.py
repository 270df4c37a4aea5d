"""Linear layers whose weights were laid out once for products with few rows.

A pass over a tree multiplies a few dozen rows by every weight. PyTorch's kernels for a CPU arrange
the weight anew in each such product, which takes longer than the product; oneDNN multiplies by
weights that were arranged once. The arranged weights are a copy: they take the memory of the linear
layers a second time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16)
# Values of each tensor that are compared to notice a change that PyTorch does not count.
_PROBES = 16


class PackedWeight:
    """x -> x W^T + b with an arranged copy of W. It has no gradient.

    Args:
        weight: [out, in] float32 or bfloat16, on a CPU.
        bias: [out], not copied, or None.

    Raises:
        RuntimeError: PyTorch was built without oneDNN.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)

    def __call__(self, rows: Tensor) -> Tensor:
        """[..., in] -> [..., out] of the weight's dtype."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return product


class PackedLinear(nn.Module):
    """A linear layer computed by its `PackedWeight`.

    Args:
        linear: its parameters are shared, and looked at no more.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._product = PackedWeight(linear.weight, linear.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self._product(rows)


class PackedTwin:
    """The modules of a model again, on its tensors and config, with packed linear layers.

    The model itself stays as it is. `refresh` follows its changes; what cannot be packed (see
    `is_packable`) is the model itself.

    Args:
        model: any module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._source = model
        self._follow()

    @property
    def model(self) -> nn.Module:
        """The twin, or the model itself where it cannot be packed."""
        return self._model

    def refresh(self) -> None:
        """Packs anew if the model's modules, hooks or weights changed since."""
        modules, probes = _modules(self._source), _probes(self._source)
        if modules != self._modules or not _equal(probes, self._probes):
            self._follow()

    def _follow(self) -> None:
        self._modules, self._probes = _modules(self._source), _probes(self._source)
        self._model = self._source
        if is_packable(self._source):
            self._model = twin(self._source, shares_config=True)
            _pack(self._model)


def twin(model: Any, *, shares_config: bool = False) -> Any:
    """The same modules again on the same tensors.

    Args:
        model: a module.
        shares_config: whether a later change of the model's config holds for the twin too.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers()]
    if shares_config and hasattr(model, "config"):
        shared.append(model.config)
    return copy.deepcopy(model, {id(each): each for each in shared})


def is_packable(model: nn.Module) -> bool:
    """Whether a model is plain weights in a CPU's memory, which nothing replaces during a pass.

    Hooks (offloading, tensor parallelism, a user's own), adapters and quantised layers are left as
    they are.
    """
    weights = list(model.parameters())
    are_plain = all(type(weight) is nn.Parameter and may_pack(weight) for weight in weights)
    return bool(weights) and are_plain and not any(map(_is_special, model.modules()))


def may_pack(weight: Tensor) -> bool:
    """Whether a weight is numbers that a CPU's packed product takes."""
    is_there = weight.device.type == "cpu" and weight.dtype in DTYPES
    return is_there and bool(torch._C._has_mkldnn)


def copied_bytes(model: nn.Module) -> int:
    """Memory that the arranged weights of a model take."""
    return sum(linear.weight.nbytes for linear in model.modules() if type(linear) is nn.Linear)


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


def _is_special(module: nn.Module) -> bool:
    """Whether more happens in a module than its class says."""
    is_hooked = "forward" in vars(module) or hasattr(module, "_hf_hook") or _num_hooks(module)
    return bool(is_hooked) or type(module).__module__.split(".")[0] == "peft"


def _num_hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def _modules(model: nn.Module) -> list[tuple[int, int]]:
    return [(id(module), _num_hooks(module)) for module in model.modules()]


def _probes(model: nn.Module) -> list[Tensor]:
    """A few values of each tensor: a merged adapter changes `weight.data`, which is not counted."""
    tensors = [each for each in model.parameters() if each.device.type == "cpu"]
    return [
        each.detach().reshape(-1)[:: max(1, each.numel() // _PROBES)].clone() for each in tensors
    ]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.dtype == other.dtype and torch.equal(one, other)
        for one, other in zip(some, others, strict=True)
    )


def _pack(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, PackedLinear(child))
