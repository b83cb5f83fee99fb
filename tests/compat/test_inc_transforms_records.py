"""Decoding what TensorFlow's record files hold."""

import io

import numpy as np
import pytest

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.components.transforms.image_transform import TensorImage
from neural_mp.errors import DataError

tf = pytest.importorskip("tensorflow")
PIL = pytest.importorskip("PIL.Image")
PHOTO = np.random.default_rng(0).integers(0, 256, (16, 24, 3)).astype(np.uint8)


def encoded(pixels, form):
    stream = io.BytesIO()
    PIL.fromarray(pixels).save(stream, format=form)
    return stream.getvalue()


def record(**features):
    kinds = {
        bytes: lambda values: {"bytes_list": tf.train.BytesList(value=values)},
        int: lambda values: {"int64_list": tf.train.Int64List(value=values)},
        float: lambda values: {"float_list": tf.train.FloatList(value=values)},
    }
    entries = {
        key.replace("__", "/"): tf.train.Feature(**kinds[type(values[0])](values))
        for key, values in features.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=entries)).SerializeToString()


def applied(name, sample):
    return load_vocabulary("tensorflow").transforms.build(name)(sample)


def test_an_imagenet_record_is_decoded_by_the_fast_rules():
    jpeg = encoded(PHOTO, "JPEG")
    sample = record(image__encoded=[jpeg], image__class__label=[7])
    expected = tf.io.decode_jpeg(jpeg, 3, fancy_upscaling=False, dct_method="INTEGER_FAST").numpy()
    for serialized in (sample, tf.constant(sample)):
        image, label = applied("ParseDecodeImagenet", serialized)
        assert isinstance(image, TensorImage)
        assert (image == expected).all()
        assert label.tolist() == [7]
        assert label.dtype == np.int32


def test_a_coco_record_gives_boxes_from_the_top_left():
    sample = record(
        image__encoded=[encoded(PHOTO, "PNG")],
        image__object__class__text=[b"cat", b"dog"],
        image__object__class__label=[17, 18],
        image__source_id=[b"42"],
        image__object__bbox__xmin=[0.1, 0.2],
        image__object__bbox__ymin=[0.3, 0.4],
        image__object__bbox__xmax=[0.5, 0.6],
        image__object__bbox__ymax=[0.7, 0.8],
    )
    image, (boxes, names, classes, identity) = applied("ParseDecodeCoco", sample)
    assert (image == PHOTO).all()
    assert boxes == pytest.approx(np.array([[0.3, 0.1, 0.7, 0.5], [0.4, 0.2, 0.8, 0.6]]))
    assert names.tolist() == [b"cat", b"dog"]
    assert classes.tolist() == [17, 18]
    assert identity == b"42"


def test_a_voc_record_gives_a_class_for_each_pixel():
    classes = (PHOTO[..., 0] % 21).astype(np.uint8)
    sample = record(
        image__encoded=[encoded(PHOTO, "PNG")],
        image__segmentation__class__encoded=[encoded(classes, "PNG")],
    )
    image, label = applied("ParseDecodeVoc", sample)
    assert (image == PHOTO).all()
    assert (label == classes[..., None]).all()


def test_a_sample_that_is_decoded_already_stays_as_it_is():
    image, label = applied("ParseDecodeCoco", (PHOTO, 3))
    assert image is PHOTO
    assert label == 3


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (b"\xff\xff\xff", "tf.train.Example"),
        (record(image__class__label=[1]), "feature 'image/encoded' must hold an image"),
        (record(image__encoded=[b"no image"]), "cannot be decoded as an image"),
        (5, "must be a record"),
    ],
)
def test_a_broken_record_is_refused_with_what_is_wrong(sample, message):
    with pytest.raises(DataError, match=message):
        applied("ParseDecodeImagenet", sample)
