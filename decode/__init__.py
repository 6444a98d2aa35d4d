"""The decoder: draft, verify, count. Imports without accelerate, hydra or datasets."""

from paceline.decode.decoder import Decoder, Emitted, Generation, Held, Stream
from paceline.decode.drift import DRIFT, Drift, drift
from paceline.decode.report import DEFINITIONS, AcceptanceReport
from paceline.decode.sampler import Sampler
from paceline.decode.trace import Round
from paceline.decode.tree import (
    DraftTree,
    DynamicShape,
    Shape,
    StaticShape,
    best_static,
    chain,
    grow,
    shape_of,
    usual_depth,
)
from paceline.decode.verify import VERIFIERS, Verdict, reject, typical, walk

__all__ = [
    "DEFINITIONS",
    "DRIFT",
    "VERIFIERS",
    "AcceptanceReport",
    "Decoder",
    "DraftTree",
    "Drift",
    "DynamicShape",
    "Emitted",
    "Generation",
    "Held",
    "Round",
    "Sampler",
    "Shape",
    "StaticShape",
    "Stream",
    "Verdict",
    "best_static",
    "chain",
    "drift",
    "grow",
    "reject",
    "shape_of",
    "typical",
    "usual_depth",
    "walk",
]
