"""Linear layers of frozen bfloat16 modules on a CPU, their weights laid out once as its matrix kernels want them.

torch's own bfloat16 linear lays the weight out anew in every call, which for the few rows of a decoding pass costs
about as much as the product itself. Knows nn.Linear only. The weights stay where they are too: what is packed takes
its memory twice.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Packed:
    """A bfloat16 weight [out, in] as oneDNN wants it; called like F.linear, without its gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None):
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._laid_out = torch.ops.mkldnn._reorder_linear_weight(self.weight, 16)  # rows of a usual pass, as a hint

    def __deepcopy__(self, memo: dict) -> "Packed":
        return self  # what is packed cannot be copied, and never changes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if x.dtype != torch.bfloat16 or x.requires_grad:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self._laid_out, self.bias, "none", [], "")


def packable(weight: Tensor) -> bool:
    """Whether there is anything to gain, and this machine's torch can do it."""
    return (
        weight.dtype == torch.bfloat16
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack_weights(module: nn.Module) -> None:
    """Let every frozen linear layer in `module` compute with a packed weight. It must not change or move afterwards."""
    for part in module.modules():
        if type(part) is nn.Linear and packable(part.weight) and not part.weight.requires_grad:
            part.forward = Packed(part.weight, part.bias)  # type: ignore[assignment, method-assign]


def unpack_weights(module: nn.Module) -> None:
    """Let the linear layers in `module` compute with their weights again, which may then change."""
    for part in module.modules():
        if isinstance(part.__dict__.get("forward"), Packed):
            del part.forward
