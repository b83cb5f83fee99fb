"""Archives from strangers are read only where they are what they say."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path

import pytest

from neural_mp.errors import DataError, ModelLoadError
from neural_mp.io.archives import open_checked_archive


def _archive(members: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> io.BytesIO:
    written = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(written, "w", method) as archive:
        warnings.simplefilter("ignore")  # of duplicates
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return written


def test_members_of_a_sound_archive_are_read(tmp_path: Path) -> None:
    path = tmp_path / "sound.zip"
    path.write_bytes(_archive([("a/b", b"1"), ("c", b"")], zipfile.ZIP_DEFLATED).getvalue())
    with open_checked_archive(path) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {"a/b": b"1", "c": b""}


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../a", "a/../b", "a/./b", "C:/a", "a\\b", "a\nb", "a//b", ".."]
)
def test_names_that_lead_out_are_refused(name: str) -> None:
    with (
        pytest.raises(ModelLoadError, match="leads out"),
        open_checked_archive(_archive([(name, b"")])),
    ):
        pass


def test_a_member_that_is_there_twice_is_refused() -> None:
    twice = _archive([("a", b"1"), ("a", b"2")])
    with pytest.raises(DataError, match="twice"), open_checked_archive(twice, DataError):
        pass


def test_a_bomb_is_refused_before_it_is_unpacked() -> None:
    bomb = _archive([("zeros", bytes(64 * 2**20))], zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelLoadError, match="compression ratio"), open_checked_archive(bomb):
        pass


def test_members_that_share_their_bytes_are_refused() -> None:
    content = bytearray(_archive([("a", bytes(1000)), ("b", bytes(1000))]).getvalue())
    start = content.rindex(b"PK\x01\x02")
    content[start + 42 : start + 46] = (0).to_bytes(4, "little")  # b begins where a does
    with pytest.raises(ModelLoadError), open_checked_archive(io.BytesIO(content)) as archive:
        archive.read("b")


def test_a_damaged_archive_is_one_error(tmp_path: Path) -> None:
    content = bytearray(_archive([("a", b"x" * 1000)]).getvalue())
    content[500] ^= 1
    with (
        pytest.raises(ModelLoadError, match="damaged"),
        open_checked_archive(io.BytesIO(content)) as a,
    ):
        a.read("a")
    with pytest.raises(ModelLoadError, match="not a zip archive"), open_checked_archive(tmp_path):
        pass
    no_archive = io.BytesIO(b"PK")
    with pytest.raises(ModelLoadError, match="not a zip archive"), open_checked_archive(no_archive):
        pass
