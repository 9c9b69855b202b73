"""TFRecord shards of images and labels, read without TensorFlow.

A shard is a row of records: length (8 bytes), its masked CRC-32C (4), the content, its masked CRC-32C (4). A record's
content is a protobuf `tf.train.Example` whose features `img` and `label` each hold one serialised `TensorProto`.
Nothing is believed before it is checked: a length that reaches beyond what is there allocates nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from voxscale.errors import DataError

MAX_RECORD_BYTES = 2**34
_FIX = "copy the shard again, or make it anew"
_HEADER, _FOOTER = 12, 4
_MAX_FIELDS = 2**20  # of one message; tensors are packed, so real ones have a handful
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# TensorFlow's number for a type: how voxels lie in tensor_content, and which repeated field may hold them instead
_DTYPES: dict[int, tuple[str, int]] = {
    1: ("<f4", 5),
    2: ("<f8", 6),
    3: ("<i4", 7),
    4: ("u1", 7),
    5: ("<i2", 7),
    6: ("i1", 7),
    9: ("<i8", 10),
    10: ("?", 11),
    17: ("<u2", 7),
    19: ("<f2", 13),
}

Message = dict[int, list[Any]]


def scan_records(path: Path) -> list[tuple[int, int]]:
    """(offset, length) of every record in a shard. Reads headers only, so it costs no more than their number."""
    records: list[tuple[int, int]] = []
    try:
        with path.open("rb") as stream:
            size, offset = path.stat().st_size, 0
            while offset < size:
                length = _read_length(stream, offset, size)
                records.append((offset, length))
                offset += _HEADER + length + _FOOTER
    except ValueError as error:
        raise DataError(f"{path.name}: record {len(records)}: {error}", fix=_FIX) from None
    except OSError as error:
        raise DataError(f"{path.name}: cannot be read: {error.strerror}", fix=_FIX) from None
    return records


def read_record(path: Path, offset: int) -> tuple[NDArray[np.float32], NDArray[Any]]:
    """Return (image_cxyz, label_xyz) of the record at a byte offset, with both its checksums verified."""
    try:
        with path.open("rb") as stream:
            length = _read_length(stream, offset, path.stat().st_size)
            content = stream.read(length)
            stored = stream.read(_FOOTER)
        if len(content) < length or stored != masked_crc(content):
            raise ValueError("its checksum does not match: the content is damaged")
        image, label = _parse_example(memoryview(content))
        image_cxyz, label_xyz = _spatial(image, label)
        return np.array(image_cxyz, dtype=np.float32, order="C"), np.array(label_xyz, order="C")
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path.name}: record at byte {offset}: {error}", fix=_FIX) from None
    except OSError as error:
        raise DataError(f"{path.name}: cannot be read: {error.strerror}", fix=_FIX) from None


def _read_length(stream: BinaryIO, offset: int, size: int) -> int:
    if not 0 <= offset < size:
        raise ValueError(f"found no record at byte {offset} of {size}")
    stream.seek(offset)
    header = stream.read(_HEADER)
    if len(header) < _HEADER:
        raise ValueError("cut off within its header")
    if header[8:] != masked_crc(header[:8]):
        raise ValueError("the checksum of its length does not match: not a record")
    length = int(struct.unpack("<Q", header[:8])[0])
    if length > MAX_RECORD_BYTES:
        raise ValueError(f"its length is {length} bytes, expected at most {MAX_RECORD_BYTES}")
    if offset + _HEADER + length + _FOOTER > size:
        raise ValueError(f"cut off: {size - offset - _HEADER} bytes are left, expected {length + _FOOTER}")
    return length


def masked_crc(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _parse_example(content: memoryview) -> tuple[NDArray[Any], NDArray[Any]]:
    features: dict[bytes, memoryview] = {}
    for block in _parse(content).get(1, []):
        for item in _parse(_as_bytes(block)).get(1, []):
            entry = _parse(_as_bytes(item))
            features[bytes(_last(entry, 1))] = _last(entry, 2)
    absent = [name for name in (b"img", b"label") if name not in features]
    if absent:
        names = ", ".join(repr(name[:40].decode(errors="replace")) for name in sorted(features)[:8]) or "none"
        raise ValueError(f"found features {names}, expected 'img' and 'label'")
    image, label = (_parse_tensor(features[name], name.decode()) for name in (b"img", b"label"))
    return image, label


def _parse_tensor(feature: memoryview, name: str) -> NDArray[Any]:
    """The one tensor that a feature of bytes holds."""
    values = [item for block in _parse(feature).get(1, []) for item in _parse(_as_bytes(block)).get(1, [])]
    if len(values) != 1:
        raise ValueError(f"{name}: found {len(values)} byte strings, expected one serialised tensor")
    tensor = _parse(_as_bytes(values[0]))
    number = _last_number(tensor, 1)
    if number not in _DTYPES:
        raise ValueError(f"{name}: found voxels of TensorFlow's type {number}, expected float or integer")
    dtype, field = _DTYPES[number]
    shape = _parse_shape(tensor.get(2, []), name)
    count = int(np.prod(shape, dtype=object))
    content = _last(tensor, 4)
    flat = np.frombuffer(content, dtype) if len(content) == count * np.dtype(dtype).itemsize else None
    if flat is None and not len(content):
        flat = _parse_values(tensor.get(field, []), dtype, count)
    if flat is None or len(flat) != count:
        raise ValueError(f"{name}: its voxels do not fill its shape {shape}")
    return flat.reshape(shape)


def _parse_shape(blocks: list[Any], name: str) -> tuple[int, ...]:
    """Of several blocks all count, as in protobuf."""
    dims = [dim for block in blocks for dim in _parse(_as_bytes(block)).get(2, [])]
    shape = tuple(_last_number(_parse(_as_bytes(dim)), 1) for dim in dims)
    if len(shape) not in (3, 4) or not all(0 < n < 2**16 for n in shape):
        raise ValueError(f"{name}: found shape {shape[:8]}, expected three or four dimensions of 1 to {2**16 - 1}")
    return shape


def _parse_values(blocks: list[Any], dtype: str, count: int) -> NDArray[Any]:
    """Voxels of a repeated field: packed blocks, or one by one as older writers have it."""
    kind = np.dtype(dtype)
    if sum(len(block) if isinstance(block, memoryview) else 1 for block in blocks) > count * 10:
        raise ValueError("found more voxels than its shape holds")
    if kind.kind == "f" and kind.itemsize > 2:
        if any(isinstance(block, int) and block >> 8 * kind.itemsize for block in blocks):
            raise ValueError(f"found a number of more than {kind.itemsize} bytes, expected voxels of type {kind}")
        parts = [
            block if isinstance(block, memoryview) else block.to_bytes(kind.itemsize, "little") for block in blocks
        ]
        return np.frombuffer(b"".join(parts), dtype)
    integers = [
        _unpack_varints(block) if isinstance(block, memoryview) else np.array([block], np.uint64) for block in blocks
    ]
    joined = np.concatenate([np.empty(0, np.uint64), *integers])
    return joined.astype(np.uint16).view(dtype) if kind.kind == "f" else joined.view(np.int64).astype(dtype)


def _unpack_varints(content: memoryview) -> NDArray[np.uint64]:
    octets = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(octets < 0x80)
    if len(octets) and (not len(ends) or ends[-1] != len(octets) - 1):
        raise ValueError("a number is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    widths = ends - starts + 1
    if len(widths) and widths.max() > 10:
        raise ValueError("a number is longer than ten bytes")
    numbers = np.zeros(len(ends), np.uint64)
    for place in range(int(widths.max(initial=0))):
        there = widths > place
        numbers[there] |= (octets[starts[there] + place] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
    return numbers


def _spatial(image: NDArray[Any], label: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Bring channels to the front, and take away the label's single one; the shapes say where they are."""
    images = [image[None]] if image.ndim == 3 else [image, np.moveaxis(image, 3, 0)]
    labels = (
        [label] if label.ndim == 3 else [np.moveaxis(label, axis, 0)[0] for axis in (0, 3) if label.shape[axis] == 1]
    )
    for image_cxyz in images:
        for label_xyz in labels:
            if image_cxyz.shape[1:] == label_xyz.shape:
                return image_cxyz, label_xyz
    raise ValueError(
        f"found img of shape {image.shape} and label of shape {label.shape}, expected one grid, e.g. "
        "(4, 240, 240, 152) and (240, 240, 152)"
    )


def _parse(content: memoryview) -> Message:
    """The fields of a protobuf message: number → values, as integers or as views of the bytes."""
    fields: Message = {}
    for count, (number, value) in enumerate(_fields(content), start=1):
        fields.setdefault(number, []).append(value)
        if count > _MAX_FIELDS:
            raise ValueError(f"a message has more than {_MAX_FIELDS} fields")
    return fields


def _fields(content: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(content):
        key, at = _read_varint(content, at)
        number, kind = key >> 3, key & 7
        if number == 0 or kind not in (_VARINT, _FIXED64, _BYTES, _FIXED32):
            raise ValueError("its content is no protobuf message")
        if kind == _VARINT:
            value, at = _read_varint(content, at)
            yield number, value
            continue
        width = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if width is None:
            width, at = _read_varint(content, at)
        if width > len(content) - at:
            raise ValueError(f"a field reaches {width - (len(content) - at)} bytes beyond its message")
        field = content[at : at + width]
        yield number, field if kind == _BYTES else int.from_bytes(field, "little")
        at += width


def _read_varint(content: memoryview, at: int) -> tuple[int, int]:
    value = 0
    for place, octet in enumerate(content[at : at + 10]):
        value |= (octet & 0x7F) << (7 * place)
        if octet < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, at + place + 1
    raise ValueError("a number is cut off or longer than ten bytes")


def _as_bytes(value: object) -> memoryview:
    if not isinstance(value, memoryview):
        raise ValueError("its content is no tf.train.Example: found a number, expected bytes")
    return value


def _last_number(message: Message, number: int) -> int:
    value = message.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError("its content is no TensorProto: found bytes, expected a number")
    return value


def _last(message: Message, number: int) -> memoryview:
    """A field of bytes; of several the last counts, as in protobuf."""
    return _as_bytes(message[number][-1]) if number in message else memoryview(b"")
