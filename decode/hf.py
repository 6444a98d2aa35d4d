"""transformers' `generate` with a decoder's loop: model.generate(ids, custom_generate=decoder, ...).

Reads what `generate` has prepared (processors, stopping criteria, generation config) by the names of its classes, and
refuses by name what the loop does not do. Imports nothing of transformers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.decode.sampler import Sampler
from paceline.models.errors import Refusal

if TYPE_CHECKING:
    from paceline.decode.decoder import Decoder

# Processors whose value the sampler has: class -> (their attribute, the sampler's). In sampling, and greedily.
_WARPERS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
_PENALTIES = {
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
    "MinNewTokensLengthLogitsProcessor": ("min_new_tokens", "min_new_tokens"),
}
_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
# Options of `generate` that change what is returned or how tokens are found, and what they have to be.
_FIXED = {
    "num_beams": (None, 1),
    "return_dict_in_generate": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
}


@torch.no_grad()
def generate(
    decoder: "Decoder", model: Any, ids: Tensor, processors: Any, criteria: Any, config: Any, mask: Tensor | None
) -> Tensor:
    """[B, T] prompts, padded where `mask` is 0 -> [B, T + new], the prompts as they came and the answers behind.

    Sampling draws its seed from torch's global generator.

    Raises:
        Refusal: another model than the decoder's target, or something that its loop does not do, by name.
    """
    if model is not decoder.target.model:
        raise Refusal("custom_generate: this decoder's target is another model; make one with Target(model)")
    for name, valid in _FIXED.items():
        if getattr(config, name, None) not in valid:
            raise Refusal(f"{name}: {getattr(config, name)} is not available with this decoder; nearest: {valid[-1]}")
    for criterion in criteria or ():
        if type(criterion).__name__ not in _CRITERIA:
            raise Refusal(f"stopping_criteria: {type(criterion).__name__} is not available; `stream(stop=...)` has it")
    stops = _listed(config.eos_token_id)
    prompts = ids.tolist() if mask is None else [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
    sampler = _sampler(processors or (), bool(config.do_sample), ids.shape[1])
    made = decoder.generate(prompts, config.max_length - ids.shape[1], sampler=sampler, eos=stops)
    width = max(map(len, made.tokens))
    padding = next(iter(_listed(config.pad_token_id) + stops), 0)
    answers = [[*row, *[padding] * (width - len(row))] for row in made.tokens]
    return torch.cat([ids, torch.tensor(answers, dtype=ids.dtype, device=ids.device)], 1)


def _sampler(processors: Sequence[Any], warm: bool, prompt: int) -> Sampler:
    """What the processors that `generate` prepared come to."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": int(torch.randint(2**31, ()))} if warm else {}
    for processor in processors:
        name = type(processor).__name__
        if name == "MinLengthLogitsProcessor":
            options["min_new_tokens"] = max(processor.min_length - prompt, options.get("min_new_tokens", 0))
        elif name in _PENALTIES or (warm and name in _WARPERS):
            theirs, ours = (_PENALTIES | _WARPERS)[name]
            options[ours] = getattr(processor, theirs)
        else:
            raise Refusal(f"logits_processor: {name} is not available with this decoder; leave it out")
    return Sampler(**options)


def _listed(ids: Any) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
