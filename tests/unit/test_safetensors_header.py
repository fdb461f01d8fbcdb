"""The header of a safetensors file: any bytes give a checked header or a named refusal."""

import json
import os
import struct
import tempfile
from pathlib import Path

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_replicas.contract.errors import CheckpointError
from headrace_replicas.engine.safetensors_header import (
    DTYPE_BYTES,
    HEADER_LIMIT_BYTES,
    ShardHeader,
    check_coverage,
    misaligned_count,
    parse_header,
    read_header,
)
from tests.support.tiny_shards import Spec, data_bytes, file_of, header_of, write_shard

PATH = Path("model.safetensors")

names = st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__")
specs = st.tuples(
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
)
tensor_sets = st.dictionaries(names, specs, max_size=5)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(sorted(DTYPE_BYTES)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


def read(raw: bytes) -> ShardHeader:
    """Read a header through a real file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(raw)
        return read_header(path)


def read_or_refuse(raw: bytes) -> None:
    """Check the laws of what is accepted; no other error than a refusal may come."""
    try:
        shard = read(raw)
    except CheckpointError:
        return
    assert_laws(shard)


def assert_laws(shard: ShardHeader) -> None:
    """What every accepted header keeps to."""
    reached = shard.data_start
    for entry in sorted(shard.tensors.values(), key=lambda entry: (entry.start, entry.end)):
        size = DTYPE_BYTES[entry.dtype]
        for dimension in entry.shape:
            assert type(dimension) is int
            assert dimension >= 0
            size *= dimension
        assert entry.size_bytes == size
        assert shard.data_start <= entry.start <= entry.end <= shard.file_bytes
        if size:
            assert entry.start >= reached
            reached = entry.end


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_give_a_header_or_a_refusal(raw: bytes) -> None:
    """Any file content gives a header that keeps the laws, or a CheckpointError."""
    read_or_refuse(raw)


@given(json_values | st.dictionaries(names, json_values, max_size=3), st.integers(0, 64))
@settings(deadline=None)
def test_any_json_gives_a_header_or_a_refusal(header: object, size: int) -> None:
    """Any JSON as header gives a header that keeps the laws, or a CheckpointError."""
    read_or_refuse(file_of(header, bytes(size)))


@given(tensor_sets)
@settings(deadline=None)
def test_a_sound_file_is_read_as_written(tensors: dict[str, Spec]) -> None:
    """Names, types, shapes and places come back as they were written."""
    shard = read(file_of(header_of(tensors), bytes(data_bytes(tensors))))
    assert {name: (e.dtype, e.shape) for name, e in shard.tensors.items()} == tensors
    assert_laws(shard)
    check_coverage(shard)


@st.composite
def changed_files(draw: st.DrawFn) -> bytes:
    """A sound file in which at most one value of the header, and the file's length, are wrong."""
    tensors = draw(tensor_sets)
    header = header_of(tensors)
    body = bytes(max(0, data_bytes(tensors) + draw(st.sampled_from([0, 0, 0, 1, -1]))))
    if header:
        entry = header[draw(st.sampled_from(sorted(header)))]
        assert isinstance(entry, dict)
        match draw(st.sampled_from(["nothing", "dtype", "shape", "data_offsets", "drop"])):
            case "dtype":
                entry["dtype"] = draw(st.sampled_from(sorted(DTYPE_BYTES)))
            case "drop":
                header.popitem()
            case "shape" | "data_offsets" as key:
                entry[key] = draw(st.lists(st.integers(-1, 40), max_size=3))
            case _:
                pass
    return file_of(header, body)


def test_an_empty_tensor_may_lie_between_two_others_and_not_inside_one() -> None:
    def file_with_empty_at(offset: int) -> bytes:
        whole = {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]}
        empty = {"dtype": "BF16", "shape": [0], "data_offsets": [offset, offset]}
        return file_of({"whole": whole, "empty": empty}, bytes(2))

    assert [accepted_here(file_with_empty_at(offset)) for offset in (0, 1, 2)] == [
        True,
        False,
        True,
    ]


@given(changed_files())
@settings(deadline=None)
def test_the_verdict_on_a_changed_header_is_the_format_librarys_own(raw: bytes) -> None:
    """A file with one value changed is accepted exactly when the format's library accepts it."""
    assert accepted_here(raw) == accepted_by_the_library(raw)


def accepted_here(raw: bytes) -> bool:
    try:
        check_coverage(read(raw))
    except CheckpointError:
        return False
    return True


def accepted_by_the_library(raw: bytes) -> bool:
    try:
        safetensors.deserialize(raw)  # type: ignore[no-untyped-call] # a compiled function
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty (0 bytes)"),
        (b"\x00" * 5, "too few for a safetensors file"),
        (struct.pack("<Q", 1 << 60) + b"{}", f"claims a header of {1 << 60} bytes"),
        (struct.pack("<Q", 3) + b"{}", "claims a header of 3 bytes"),
        (file_of(b"[]", b""), "not an object"),
        (file_of(b"\xff\xfe", b""), "not valid JSON"),
        (file_of(b'{"a": 1', b""), "not valid JSON"),
        (file_of(b'{"a": {}, "a": {}}', b""), "'a' appears twice"),
        (file_of(b'{"__metadata__": {"a": 1}}', b""), "`__metadata__`"),
        (file_of({"w": 7}, b""), "'w' is not described by an object"),
        (file_of(b"[" * 100_000 + b"]" * 100_000, b""), "not valid JSON"),
        (file_of(b'{"w": ' + b"9" * 5000 + b"}", b""), "not valid JSON"),
    ],
)
def test_a_file_that_is_no_safetensors_file_is_refused(raw: bytes, words: str) -> None:
    """The refusal says what is wrong with the file."""
    with pytest.raises(CheckpointError) as caught:
        read(raw)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "F64"}, "dtype 'F64', which MLX cannot load"),
        ({"dtype": ["F32"]}, "MLX cannot load"),
        ({"shape": [-2, -2]}, "impossible shape"),
        ({"shape": [True, 4]}, "impossible shape"),
        ({"shape": [2.0, 2]}, "impossible shape"),
        ({"shape": None}, "impossible shape"),
        ({"shape": [2**31, 0]}, "impossible shape"),
        ({"shape": [1] * 17}, "impossible shape"),
        ({"shape": [2**31 - 1] * 16}, "claims 16 bytes of data"),
        ({"shape": [5]}, "claims 16 bytes of data, but F32 of shape [5] needs 20"),
        ({"data_offsets": [0, 4]}, "claims 4 bytes of data"),
        ({"data_offsets": [-4, 12]}, "impossible data_offsets"),
        ({"data_offsets": [16, 0]}, "impossible data_offsets"),
        ({"data_offsets": [False, 16]}, "impossible data_offsets"),
        ({"data_offsets": [0, 10**30]}, "impossible data_offsets"),
        ({"data_offsets": [4, 20]}, "the file has only"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(change: dict[str, object], words: str) -> None:
    """The refusal names the file and the tensor."""
    entry = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **change}
    with pytest.raises(CheckpointError) as caught:
        read(file_of({"layers.0.w": entry}, bytes(16)))
    assert "tensor 'layers.0.w'" in caught.value.message
    assert words in caught.value.message


def test_tensors_that_share_bytes_are_refused() -> None:
    """Both tensors are named."""
    header = header_of({"a": ("F32", (4,)), "b": ("F32", (4,))})
    header["b"] = {"dtype": "F32", "shape": [4], "data_offsets": [12, 28]}
    with pytest.raises(CheckpointError, match="tensors 'a' and 'b' share the same bytes"):
        read(file_of(header, bytes(28)))


def test_bytes_that_belong_to_no_tensor_are_refused() -> None:
    """A hole and a tail are each refused, with their neighbours named."""
    header = header_of({"a": ("U8", (4,)), "b": ("U8", (4,)), "c": ("U8", (4,))})
    tail = read(file_of(header, bytes(13)))
    with pytest.raises(CheckpointError, match="1 bytes after 'c' belong to no tensor"):
        check_coverage(tail)
    del header["b"]
    with pytest.raises(CheckpointError, match="between 'a' and 'c' belong to no tensor"):
        check_coverage(read(file_of(header, bytes(12))))


def test_the_header_length_is_bounded_before_anything_is_read() -> None:
    """A sparse file of any size cannot make a header of more than the format's limit."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(struct.pack("<Q", HEADER_LIMIT_BYTES + 1))
        os.truncate(path, 1 << 33)
        with pytest.raises(CheckpointError, match=f"can have {HEADER_LIMIT_BYTES} at most"):
            read_header(path)


def test_a_folder_or_nothing_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    """Neither raises anything but a CheckpointError."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)
    with pytest.raises(CheckpointError, match="is missing"):
        read_header(tmp_path / "model.safetensors")


def test_a_name_of_any_length_makes_a_short_message() -> None:
    """A hostile name neither floods the log nor hides behind control characters."""
    with pytest.raises(CheckpointError) as caught:
        read(file_of({"\x1b[31m" * 10_000: 1}, b""))
    assert len(caught.value.message) < 1000
    assert "\x1b" not in caught.value.message


def test_misaligned_tensors_are_counted_by_their_place_in_the_file(tmp_path: Path) -> None:
    """What counts is the address in the file, not the offset in the data block."""
    tensors = {"a": ("U8", (3,)), "b": ("F32", (1,)), "c": ("BF16", (2,))}
    write_shard(tmp_path / "x", tensors)
    assert misaligned_count(read_header(tmp_path / "x")) == 2
    text = json.dumps(header_of({"a": ("F32", (1,))})).encode()
    odd = text + b" " * (1 - len(text) % 4)
    shard = parse_header(odd, file_bytes=8 + len(odd) + 4, path=PATH)
    assert misaligned_count(shard) == (1 if (8 + len(odd)) % 4 else 0) == 1
