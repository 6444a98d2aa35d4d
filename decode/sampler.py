"""How a token is chosen: what penalties, temperature, top-k, top-p and min-p make of logits, and the noise that draws.

Knows neither trees nor models. All randomness of decoding goes through `Sampler.pick`, `Sampler.draw` and
`Sampler.accepts`, keyed by (seed, row, absolute position, draw), so that a test can enumerate every outcome.

    Legend: R rows, V ids, B rows of a batch, N nodes.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from paceline.models.kernels import kernels

Place = tuple[int, int]  # (row key, absolute position of the token being chosen)


@dataclass
class Sampler:
    """The distribution a token is chosen from, and the noise that chooses it.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off; min_p leaves out what is less likely than that share
    of the likeliest. repetition_penalty (1: off; Keskar et al. 2019) divides positive logits of tokens that the text
    has said, the prompt included, and multiplies negative ones. presence_penalty (0: off) is taken from the logits of
    tokens that the answer has said. No stop token is chosen before the answer has min_new_tokens. A token's noise
    depends on (seed, row, position) alone: a row says the same in any batch, and `walk` on a deterministic tree gives
    token for token what plain decoding gives.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    min_new_tokens: int = 0

    @classmethod
    def of(cls, options: Any) -> "Sampler":
        """From whatever has a sampler's fields by name, as the `decode` options have."""
        return cls(**{field.name: getattr(options, field.name) for field in fields(cls)})

    @property
    def greedy(self) -> bool:
        # below 1e-4 a logit gap of 1e-2 already decides with odds of e^100
        return self.temperature < 1e-4

    @property
    def looks_back(self) -> bool:
        """Whether the choice depends on the tokens before it, so that logits need `adjusted`."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.min_new_tokens > 0

    def adjusted(
        self,
        logits: Tensor,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        stops: Iterable[int],
        tokens: Tensor | None = None,
        ancestors: Tensor | None = None,
    ) -> Tensor:
        """[B, N, V] logits at N nodes -> what the penalties make of them, float32, as if each node's path were text.

        Args:
            texts: (prompt, answer so far) of each row; the answer's last token is the root.
            stops: ids that may not be chosen before min_new_tokens.
            tokens: [B, N] of the nodes, root first, and their `ancestors` [B, N, N]; None for the text itself, N = 1.
        """
        rows, nodes, size = logits.shape
        said = torch.zeros(2, rows, 1, size, dtype=torch.bool, device=logits.device)  # anywhere; in the answer
        for row, (prompt, answer) in enumerate(texts):
            said[0, row, 0, list(prompt)] = True
            said[:, row, 0, list(answer)] = True
        count = torch.tensor([[len(answer)] for _, answer in texts], device=logits.device)
        if tokens is not None and ancestors is not None:
            path = logits.new_zeros(rows, nodes, size, dtype=torch.float32)
            for node in range(1, nodes):
                path.scatter_add_(
                    2, tokens[:, node, None, None].expand(-1, nodes, 1), ancestors[:, :, node, None].float()
                )
            said = said | (path > 0)
            count = count + ancestors.sum(-1) - 1
        logits = logits.float()
        scaled = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        logits = torch.where(said[0], scaled, logits) - self.presence_penalty * said[1]
        ends = torch.zeros(size, dtype=torch.bool, device=logits.device)
        ends[list(stops)] = True
        return logits.masked_fill(ends & (count < self.min_new_tokens)[..., None], -torch.inf)

    def probs(self, logits: Tensor) -> Tensor:
        """[..., V] logits -> the float32 (float64 if given so) distribution after temperature and all that cuts off."""
        scaled = logits if logits.dtype == torch.float64 else logits.float()
        if self.greedy:
            return torch.zeros_like(scaled).scatter(-1, scaled.argmax(-1, keepdim=True), 1.0)
        scaled = scaled / self.temperature
        if self.top_k and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -torch.inf)
        probs = scaled.softmax(-1)
        if self.top_p < 1.0:
            probs = _nucleus(probs, self.top_p)
        if self.min_p > 0.0:
            probs = probs.masked_fill(probs < self.min_p * probs.amax(-1, keepdim=True), 0.0)
            probs = probs / probs.sum(-1, keepdim=True)
        return probs

    def choose(self, logits: Tensor, places: Sequence[Place]) -> list[int]:
        """[R, V] logits -> the token each of R rows chooses; the target's own choice, in plain decoding too."""
        if self.greedy:
            return likeliest(logits).tolist()
        return self.pick(self.probs(logits), places)

    def pick(self, probs: Tensor, places: Sequence[Place], draw: int = 0) -> list[int]:
        """[R, V] distributions, not necessarily normalised -> a token each: the first to arrive of V independent races.

        A token with probability p arrives after E / p, E from an exponential of its own (Gumbel's maximum, in other
        words). Probabilities that differ in their last bits, as passes of other widths give them, choose another token
        only where two arrive at the same moment. The inverse of the cumulative sum would choose one at every border
        between two of the many tokens of the tail.
        """
        if not places:
            return []
        return self._arrivals(probs, places, [draw] * len(places)).max(-1).indices.tolist()

    def draw(self, probs: Tensor, places: Sequence[Place], many: int, draws: Sequence[int]) -> Tensor:
        """[R, V] distributions -> `many` distinct tokens of each [R, many], one drawn after the other, each from what
        is left, renormalised: the first to arrive of the same races. Where fewer are possible, impossible ones follow.
        """
        return self._arrivals(probs, places, draws).topk(many, dim=-1).indices

    def _arrivals(self, probs: Tensor, places: Sequence[Place], draws: Sequence[int]) -> Tensor:
        """[R, V], the earlier a token arrives the larger."""
        return probs / self.exponentials(places, draws, probs.shape[-1], probs.device)

    def accepts(self, chance: float, place: Place, draw: int) -> bool:
        """One coin with probability `chance` of heads."""
        return self.uniform(place, draw) < chance

    def uniform(self, place: Place, draw: int = 0) -> float:
        """A number in [0, 1) that depends on seed, place and draw alone."""
        return (self._key(place, draw) >> 11) / (1 << 53)

    def exponentials(self, places: Sequence[Place], draws: Sequence[int], many: int, device: Any = "cpu") -> Tensor:
        """[R, many] float32 draws above 0 from the exponential distribution; a row depends on seed, place and draw.

        Made where they are used, all rows at once: token i's is the i-th number of the row's own SplitMix64 (Steele et
        al. 2014), so that a device without a serial generator says the same as one that has it.
        """
        keys = [_signed(self._key(place, draw)) for place, draw in zip(places, draws, strict=True)]
        mixed = torch.arange(1, many + 1, device=device) * _GOLDEN + torch.tensor(keys, device=device)[:, None]
        for shift, factor in _MIXING:
            mixed = (mixed ^ _shifted(mixed, shift)) * factor
        mixed = mixed ^ _shifted(mixed, 31)
        # the middles of 2^53 equal parts of (0, 1): neither end, so that no token wins without a chance
        return (_shifted(mixed, 11).double() + 0.5).mul_(2.0**-53).log_().neg_().float()

    def _key(self, place: Place, draw: int) -> int:
        """64 bits."""
        digest = hashlib.blake2b(f"{self.seed}/{place[0]}/{place[1]}/{draw}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _signed(bits: int) -> int:
    """64 bits as the int64 that has them; its products wrap around, as those of unsigned numbers do."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIXING = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def _shifted(bits: Tensor, by: int) -> Tensor:
    """int64 bits to the right, zeros in from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def likeliest(logits: Tensor) -> Tensor:
    """[..., V] -> [...], the first of the largest: what argmax gives, which takes thirty times as long on a CPU."""
    quick = kernels() if logits.dtype == torch.bfloat16 and logits.device.type == "cpu" else None
    if quick is None:
        return logits.max(-1).indices
    rows = logits.flatten(0, -2) if logits.ndim > 1 else logits[None]
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(len(rows), dtype=torch.long)
    quick.largest(out.data_ptr(), rows.data_ptr(), *rows.shape, rows.stride(0), torch.get_num_threads())
    return out.view(logits.shape[:-1])


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """Keep the likeliest tokens until they hold `top_p`, renormalised. The token that crosses the border is kept."""
    shape = probs.shape
    flat = probs.reshape(-1, shape[-1])
    width = min(256, shape[-1])
    kept = torch.zeros_like(flat)
    top, ids = flat.topk(width, dim=-1)
    proven = top.sum(-1) >= top_p  # a partial sort that does not prove it covers top_p is no answer
    kept[proven] = _cut(kept[proven], top[proven], ids[proven], top_p)
    if not bool(proven.all()):
        rest = ~proven
        kept[rest] = _cut(kept[rest], *flat[rest].sort(dim=-1, descending=True, stable=True), top_p)
    return (kept / kept.sum(-1, keepdim=True)).reshape(shape)


def _cut(zeros: Tensor, top: Tensor, ids: Tensor, top_p: float) -> Tensor:
    """Scatter the first of the descending `top` [R, W] that together reach top_p into `zeros` [R, V]; one at least."""
    past = top.cumsum(-1) - top >= top_p
    past[..., 0] = False  # a top_p of 0 too
    return zeros.scatter(-1, ids, top.masked_fill(past, 0.0))
