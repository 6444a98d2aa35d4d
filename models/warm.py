"""Where training may begin: with the weights and the draft vocabulary of a drafter that there is already.

What it is made of follows that drafter, how it is trained the options. Knows exports and foreign checkpoints.
"""

import json

from paceline.models.drafter import Drafter, Options, build, options
from paceline.models.errors import Refusal
from paceline.models.export import describe, load_export
from paceline.models.formats import hf, reader
from paceline.models.target import Target

INIT = "method.init_from"


def warm_start(asked: Options, target: Target) -> tuple[Drafter, float | None]:
    """A float32 drafter that begins as `asked.init_from`, to be trained as `asked` says.

    Returns it with the share of supervised tokens that its vocabulary held where it was trained, None if not known.

    Raises:
        Refusal: an option contradicts what it is made of, or the reasons of load_export and of `load` in formats/.
    """
    assert asked.init_from is not None
    coverage, chosen = None, set(asked.TRAINING)
    theirs = reader(asked.init_from)
    if theirs is not None:
        known = theirs.load(asked.init_from, target, INIT)
        chosen |= {name for name in asked.CONVENTIONS if getattr(asked, name) is not None}
    else:
        known, about = load_export(asked.init_from, target, "float32", INIT)
        coverage = about.get("vocabulary_coverage")
    if asked.name == known.options.name:
        known.options = known.options.model_copy(update={name: getattr(asked, name) for name in chosen})
    _check_made_alike(asked, known.options)
    known.options.check_settled()
    drafter = build(known.options, known.shape, known.vocab_map)
    drafter.load_state_dict(known.state_dict())
    return drafter, coverage


def check_start(asked: Options) -> None:
    """Raises Refusal where what `asked.init_from` names is no drafter, or not made as `asked` says.

    Needs no target: what has to be held against one is left to `warm_start`.
    """
    if asked.init_from is None:
        return
    theirs = reader(asked.init_from)
    if theirs is hf:
        raise Refusal(f"{INIT}={asked.init_from}: an ordinary model; nearest: method.model={asked.init_from}")
    if theirs is None:
        about = describe(asked.init_from, INIT)
        if about.get("trunk") is not None:
            raise Refusal(f"{INIT}={asked.init_from}: its target was trained with it, this one was not; nearest: null")
        _check_made_alike(asked, options(about["method"]["name"]).model_validate(about["method"]), settled=False)


def _check_made_alike(asked: Options, known: Options, settled: bool = True) -> None:
    """settled: a draft vocabulary of None is all of the target's; else it is not known yet how large that is."""
    theirs, ours = known.made_of(), asked.made_of()
    for name, value in ours.items():
        there, vocabulary = theirs.get(name), name == "draft_vocab"
        if value == there or (value is None and not (vocabulary and settled)):
            continue
        if vocabulary and not settled and there is None:
            continue
        asks, has = (json.dumps(v).strip('"') for v in (value, there))
        nearest = f"method={has}" if name == "name" else f"method.{name}={has}"
        raise Refusal(f"method.{name}: {asks}, but {INIT}={asked.init_from} has {has}; nearest: {nearest}")
