"""transformers' `generate` with a decoder's loop: model.generate(ids, custom_generate=decoder, ...).

Reads what `generate` has prepared (processors, stopping criteria, generation config) by the names of its classes and
their values, and refuses by name what the loop does not do. Imports nothing of transformers.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.decode.sampler import Sampler
from paceline.models.errors import Refusal

if TYPE_CHECKING:
    from paceline.decode.decoder import Decoder

# What may stand in `logits_processor`, in the order in which the sampler does the same, as transformers' own come:
# class -> (its attribute, the sampler's), or None where it becomes `min_new_tokens`. Then those of sampling alone.
_PENALTIES: dict[str, tuple[str, str] | None] = {
    "RepetitionPenaltyLogitsProcessor": ("penalty", "repetition_penalty"),
    "MinLengthLogitsProcessor": None,
    "MinNewTokensLengthLogitsProcessor": None,
}
_WARPERS: dict[str, tuple[str, str] | None] = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
    "MinPLogitsWarper": ("min_p", "min_p"),
}
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
    longest, stops = _ends(criteria or (), config)
    prompts = ids.tolist() if mask is None else [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
    sampler = _sampler(processors or (), bool(config.do_sample), ids, mask, stops)
    # transformers looks whether a text has ended when a token has been said
    made = decoder.generate(prompts, max(longest - ids.shape[1], 1), sampler=sampler, eos=stops)
    width = max(map(len, made.tokens))
    padding = next(iter(_listed(config.pad_token_id) + _listed(config.eos_token_id) + stops), 0)
    answers = [[*row, *[padding] * (width - len(row))] for row in made.tokens]
    return torch.cat([ids, torch.tensor(answers, dtype=ids.dtype, device=ids.device)], 1)


def _ends(criteria: Sequence[Any], config: Any) -> tuple[int, list[int]]:
    """The longest that a text with its padded prompt may be, and the ids that end it.

    Of the criteria, among which `generate` puts what the config says unless one like it is given; where none of a kind
    is there, the config's.
    """
    lengths: list[int] = []
    stops: list[int] = []
    for criterion in criteria:
        name = type(criterion).__name__
        if name == "MaxLengthCriteria":
            lengths.append(criterion.max_length)
        elif name == "EosTokenCriteria":
            stops += _listed(criterion.eos_token_id)
        else:
            raise Refusal(f"stopping_criteria: {name} is not available; `stream(stop=...)` has it")
    return min(lengths, default=config.max_length), stops or _listed(config.eos_token_id)


def _sampler(processors: Sequence[Any], warm: bool, ids: Tensor, mask: Tensor | None, stops: list[int]) -> Sampler:
    """What the processors that `generate` prepared come to."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": int(torch.randint(2**31, ()))} if warm else {}
    known = _PENALTIES | _WARPERS if warm else _PENALTIES
    order, before = list(known), ""
    for processor in processors:
        name = type(processor).__name__
        if name not in known:
            raise Refusal(f"logits_processor: {name} is not available with this decoder; leave it out")
        if before and order.index(name) <= order.index(before):
            raise Refusal(
                f"logits_processor: {name} behind {before} is another distribution than this decoder's; nearest: "
                "give it as an option of `generate`, which orders them"
            )
        _check_values(processor, ids, mask, stops)
        value, before = known[name], name
        if value is not None:
            options[value[1]] = getattr(processor, value[0])
        else:
            least = getattr(processor, "min_length", None)  # of the whole text; the other kind says what to skip
            if least is None:
                least = processor.prompt_length_to_skip + processor.min_new_tokens
            options["min_new_tokens"] = max(least - ids.shape[1], options.get("min_new_tokens", 0))
    return Sampler(**options)


def _check_values(processor: Any, ids: Tensor, mask: Tensor | None, stops: list[int]) -> None:
    """Raises Refusal where a processor of a known class has, beside its own, a value that the sampler does not know."""
    padding = [0] * len(ids) if mask is None else (mask != 0).int().argmax(1).tolist()
    ignored = _listed(getattr(processor, "prompt_ignore_length", padding)) or [0]
    values = (
        ("filter_value", getattr(processor, "filter_value", -math.inf), -math.inf),
        ("min_tokens_to_keep", getattr(processor, "min_tokens_to_keep", 1), 1),
        # the decoder reads no padding; all else of a prompt counts as said
        ("prompt_ignore_length", ignored * len(ids) if len(ignored) == 1 else ignored, padding),
        ("eos_token_id", sorted(set(_listed(getattr(processor, "eos_token_id", stops)))), sorted(set(stops))),
    )
    for name, theirs, ours in values:
        if theirs != ours:
            raise Refusal(
                f"logits_processor: {type(processor).__name__} with {name}={theirs} is not available with this "
                f"decoder; nearest: {ours}"
            )


def _listed(ids: Any) -> list[int]:
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
