"""Four-list auto mixed precision: lists of op types, and graph painting by these lists."""

from neural_mp.amp.canonical import KINDS, Kind, canonical_lists
from neural_mp.amp.lists import EDIT_OPTIONS, AmpList, FourLists, ListEdit, check_known
from neural_mp.amp.options import (
    FORCE_ALL,
    INFER_AS_DENY,
    LEVEL,
    OPTIONS,
    PREFIXES,
    SWITCH,
    AmpDataType,
    AmpSettings,
    AutoMixedPrecisionOptions,
    known_edits,
    requested,
    settle,
)
from neural_mp.amp.painting import Colour, Paint, Painting, graph_of, paint

__all__ = [
    "EDIT_OPTIONS",
    "FORCE_ALL",
    "INFER_AS_DENY",
    "KINDS",
    "LEVEL",
    "OPTIONS",
    "PREFIXES",
    "SWITCH",
    "AmpDataType",
    "AmpList",
    "AmpSettings",
    "AutoMixedPrecisionOptions",
    "Colour",
    "FourLists",
    "Kind",
    "ListEdit",
    "Paint",
    "Painting",
    "canonical_lists",
    "check_known",
    "graph_of",
    "known_edits",
    "paint",
    "requested",
    "settle",
]
