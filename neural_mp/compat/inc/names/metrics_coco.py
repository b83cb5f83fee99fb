"""The classes of COCO."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = """
    person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light,
    fire hydrant, stop sign, parking meter, bench, bird, cat, dog, horse, sheep, cow, elephant,
    bear, zebra, giraffe, backpack, umbrella, handbag, tie, suitcase, frisbee, skis, snowboard,
    sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket, bottle,
    wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot,
    hot dog, pizza, donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop,
    mouse, remote, keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock,
    vase, scissors, teddy bear, hair drier, toothbrush
"""
#: Ids that COCO planned for and did not use in the detection data of 2017.
_UNUSED = {12, 26, 29, 30, 45, 66, 68, 69, 71, 83}
#: Id of a class of COCO → name. Source: `annotations/instances_val2017.json` of cocodataset.org.
CATEGORIES: Mapping[int, str] = dict(
    zip(
        (number for number in range(1, 91) if number not in _UNUSED),
        (name.strip() for name in _NAMES.split(",")),
        strict=True,
    )
)
