"""One token for each of many rows, each with a temperature and top-p of its own and one number of noise.

`Sampler` races all V ids of a row against each other, which makes its choice the same however a pass rounds; this one
looks up a point of the cumulative sum, for a hundred rows at once in a tenth of the time. Knows no model.

    Legend: R rows, V ids.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 256  # ids summed together, or sorted at first
TOGETHER = 16  # rows at a time: on a CPU what is computed of them stays in its caches


def drawn(logits: Tensor, temperature: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """[R, V] logits -> [R] int64, what each row chooses; distributed as `Sampler.probs` of its temperature and top_p.

    Args:
        temperature: [R]; below 1e-4 the row is greedy. top_p: [R], 1 is off.
        noise: [R] float64 in [0, 1): the point of the row's cumulative sum.
    """
    greedy = temperature < 1e-4
    cut = ~greedy & (top_p < 1)
    out = torch.empty(len(logits), dtype=torch.long, device=logits.device)
    for rows, choose in ((greedy, _first), (cut, _of_nucleus), (~greedy & ~cut, _of_all)):
        for which in rows.nonzero().flatten().split(TOGETHER):
            out[which] = choose(logits[which], temperature[which, None], top_p[which, None], noise[which, None])
    return out


def _first(logits: Tensor, *_: Tensor) -> Tensor:
    return logits.max(-1).indices


def _of_all(logits: Tensor, temperature: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """Two steps down the cumulative sum, to a block of ids and to an id of it: nothing is sorted."""
    most = logits.amax(-1, keepdim=True).float()
    weights = logits.float().sub_(most).div_(temperature).exp_()
    blocks = F.pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    point = noise * sums.sum(-1, keepdim=True)
    block = _found(sums, point)
    point = point - (sums.cumsum(-1) - sums).gather(-1, block)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].double()
    return (block * BLOCK + _found(inside, point)).flatten()


def _of_nucleus(logits: Tensor, temperature: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    """The likeliest ids that together hold top_p, the one that crosses the border among them: one at least.

    A few are sorted; where they do not prove that they hold top_p, more are, and at last all.
    """
    scaled = logits.float() / temperature
    total = scaled.logsumexp(-1, keepdim=True)
    out = torch.empty(len(scaled), dtype=torch.long, device=scaled.device)
    open_rows = torch.arange(len(scaled), device=scaled.device)
    for width in (BLOCK, 16 * BLOCK, scaled.shape[-1]):
        top, ids = scaled[open_rows].topk(min(width, scaled.shape[-1]), -1)
        p = (top - total[open_rows]).double().exp_()
        proven = (p.sum(-1) >= top_p[open_rows, 0]) | (width >= scaled.shape[-1])
        done = open_rows[proven]
        p = p[proven]
        past = p.cumsum(-1) - p >= top_p[done]
        past[:, 0] = False  # the likeliest stays, with a top_p of 0 too
        p = p.masked_fill(past, 0.0)
        out[done] = ids[proven].gather(-1, _found(p, noise[done] * p.sum(-1, keepdim=True))).flatten()
        open_rows = open_rows[~proven]
        if not len(open_rows):
            break
    return out


def _found(weights: Tensor, point: Tensor) -> Tensor:
    """[R, W] weights, [R, 1] a point below their sum -> [R, 1], where it lies: never on a weight of 0."""
    sums = weights.cumsum(-1)
    return torch.searchsorted(sums, torch.minimum(point, sums[..., -1:].nextafter(point.new_zeros(()))), right=True)
