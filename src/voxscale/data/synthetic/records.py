"""Write TFRecord shards without TensorFlow: what `voxscale.data.tfrecord` reads."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from voxscale.data.tfrecord import masked_crc

_FLOAT = 1  # TensorFlow's number for 32-bit floats
_BYTES = 2  # protobuf's wire type of a field with a length


def write_records(path: Path, examples: Iterable[Mapping[str, NDArray[np.float32]]]) -> None:
    """One record per example: a `tf.train.Example` with a serialised tensor for each name."""
    with path.open("wb") as stream:
        for example in examples:
            content = _render_example(example)
            length = struct.pack("<Q", len(content))
            stream.writelines((length, masked_crc(length), content, masked_crc(content)))


def _render_example(tensors: Mapping[str, NDArray[np.float32]]) -> bytes:
    features = b"".join(_field(1, _render_feature(name, tensor)) for name, tensor in tensors.items())
    return _field(1, features)


def _render_feature(name: str, tensor: NDArray[np.float32]) -> bytes:
    """An entry of the map of features: the name, and a list with one byte string."""
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, _render_tensor(tensor))))


def _render_tensor(tensor: NDArray[np.float32]) -> bytes:
    """A `TensorProto` with its voxels as `tensor_content`."""
    shape = b"".join(_field(2, _number(1, n)) for n in tensor.shape)
    return _number(1, _FLOAT) + _field(2, shape) + _field(4, tensor.astype("<f4").tobytes())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    """Seven bits to a byte, the lowest first; the eighth bit says that more follow."""
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*octets, value])
