"""TFRecord shards with damaged bytes, and records whose checksums are right but whose content is not."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto.tensor_pb2 import TensorProto

from chaos.report import Report
from fuzz.inputs import AS_STATED, REFUSED, UNCHANGED, Input, Wrong, mutated, try_inputs
from layouts import example_bytes, field, frame, small_example, tensor_bytes, varint
from voxscale.config.data import Data
from voxscale.data.formats import find_cases
from voxscale.data.volumes import RawCase, read_case

_NAMED = r"^(case train_0-0000\d: )?train_0\.tfrecord: found .+, expected .+"
_SOUND = tuple(map(small_example, range(3)))
_DTYPES = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 17: "<u2", 19: "<f2"}
_FIELDS = {1: "float_val", 2: "double_val", 9: "int64_val", 10: "bool_val", 19: "half_val"}
_TENSOR_KINDS = (
    *("type", "edge", "edge", "axes", "order", "length", "values", "values", "not packed", "odd number", "wire type"),
    *("fixed numbers", "shape twice"),
)
_ODD_WHOLE = (0, 1, 2, 3, 5, 59, 61, 2**16 - 1, 2**16, 2**31, 2**63, 2**64 - 1)


def fuzz_records(root: Path, *, inputs: int, seed: int) -> Report:
    return try_inputs("malformed TFRecords", root, _make_record, inputs=inputs, seed=seed)


def _make_record(chance: random.Random, root: Path) -> Input:
    if chance.random() < 0.4:
        kind, shard, must = _damaged_shard(chance)
        contents: list[bytes] = []
    else:
        kind, content, must = chance.choice([_damaged_example, _odd_example, _odd_tensor, _odd_tensor])(chance)
        contents = [*_SOUND[:2], content]
        chance.shuffle(contents)
        shard = b"".join(map(frame, contents))
    (root / "train_0.tfrecord").write_bytes(shard)

    def read() -> str:
        cases = find_cases(Data(source=str(root), format="tfrecord"), root / "scratch").cases
        raws = [read_case(case) for case in cases]
        if not contents and len(raws) != len(_SOUND):
            raise Wrong(f"silently {len(raws)} records of {len(_SOUND)}")
        pairs = zip(raws, contents or _SOUND, strict=True)
        return AS_STATED if AS_STATED in [_compared(raw, content) for raw, content in pairs] else UNCHANGED

    return Input(kind, read, _NAMED, must=must)


def _compared(raw: RawCase, content: bytes) -> str:
    """Whether the record was read as protobuf itself reads it."""
    image, label = _stated(content)
    if raw.label_xyz is None or raw.image_cxyz.size != image.size or raw.label_xyz.size != label.size:
        raise Wrong(f"silently other shapes: {raw.image_cxyz.shape}, where protobuf has {image.shape}")
    images = [image.reshape(raw.image_cxyz.shape)] if image.shape[-3:] == raw.image_cxyz.shape[1:] else []
    images += [np.moveaxis(image, 3, 0)] if image.ndim == 4 else []
    if not any(np.array_equal(each.astype(np.float32), raw.image_cxyz) for each in images):
        raise Wrong("silently other voxels of img than protobuf reads")
    if not np.allclose(label.reshape(raw.label_xyz.shape).astype(np.float64), raw.label_xyz, atol=1e-3):
        raise Wrong("silently other voxels of label than protobuf reads")
    return UNCHANGED if content in _SOUND else AS_STATED


def _stated(content: bytes) -> Iterator[NDArray[Any]]:
    try:
        features = {entry.key: entry.value for entry in _example_class().FromString(content).features.feature}
        for name in (b"img", b"label"):
            tensor = TensorProto.FromString(features[name].bytes_list.value[0])
            shape = [dim.size for dim in tensor.tensor_shape.dim]
            if tensor.tensor_content:
                yield np.frombuffer(tensor.tensor_content, _DTYPES[tensor.dtype]).reshape(shape)
                continue
            values = getattr(tensor, _FIELDS.get(tensor.dtype, "int_val"))
            kind = np.uint16 if tensor.dtype == 19 else np.int64 if "int" in _FIELDS.get(tensor.dtype, "int") else None
            flat = np.array(values, kind)
            yield (flat.view(np.float16) if tensor.dtype == 19 else flat.astype(_DTYPES[tensor.dtype])).reshape(shape)
    except (DecodeError, LookupError, ValueError) as error:
        raise Wrong(f"was read, though protobuf says: {error}") from error


@functools.cache
def _example_class() -> Any:
    """tf.train.Example with lists of bytes alone, and with names that need not be text: others are of no matter."""
    file = descriptor_pb2.FileDescriptorProto(name="fuzz.proto", package="fuzz", syntax="proto3")
    shapes = {
        "BytesList": [("value", 1, "", True)],
        "Feature": [("bytes_list", 1, "BytesList", False)],
        "Entry": [("key", 1, "", False), ("value", 2, "Feature", False)],
        "Features": [("feature", 1, "Entry", True)],
        "Example": [("features", 1, "Features", False)],
    }
    for name, fields in shapes.items():
        _add_fields(file.message_type.add(name=name), fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("fuzz.Example"))


def _add_fields(message: Any, fields: list[tuple[str, int, str, bool]]) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    for name, number, kind, repeated in fields:
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        added = message.field.add(name=name, number=number, label=label, type=kinds.TYPE_BYTES)
        if kind:
            added.type, added.type_name = kinds.TYPE_MESSAGE, f".fuzz.{kind}"


def _damaged_shard(chance: random.Random) -> tuple[str, bytes, str]:
    """Bytes that no longer match their checksums. A shard that ends after a record is whole as far as it can say."""
    frames = [frame(content) for content in _SOUND]
    whole = b"".join(frames)
    kind = chance.choice(
        ["bytes", "bytes", "bytes", "length", "checksum", "text", "nothing but zeros", "rubbish behind"]
    )
    at = chance.randrange(len(frames))
    before, record, after = b"".join(frames[:at]), frames[at], b"".join(frames[at + 1 :])
    match kind:
        case "length":
            record = struct.pack("<Q", chance.choice(_ODD_WHOLE)) + record[8:]
            if chance.random() < 0.5:
                record = record[:8] + _masked(record[:8]) + record[12:]
        case "checksum":
            place = chance.choice([8, len(record) - 4]) + chance.randrange(4)
            record = record[:place] + bytes([record[place] ^ 1 << chance.randrange(8)]) + record[place + 1 :]
        case "text":
            return "shard: text", b"404 Not Found\n" * chance.randint(1, 200), REFUSED
        case "nothing but zeros":
            return f"shard: {kind}", bytes(chance.randint(1, 4000)), REFUSED
        case "rubbish behind":
            return f"shard: {kind}", whole + chance.randbytes(chance.randint(1, 99)), REFUSED
        case _:
            ends = {len(b"".join(frames[:n])) for n in range(len(frames) + 1)}
            what, damaged = mutated(whole, chance)
            while damaged == whole or (whole.startswith(damaged) and len(damaged) in ends):
                what, damaged = mutated(whole, chance)
            return f"shard: {what}", damaged, REFUSED
    return f"shard: {kind}", before + record + after, REFUSED


def _masked(content: bytes) -> bytes:
    return frame(content)[-4:]


def _damaged_example(chance: random.Random) -> tuple[str, bytes, str]:
    kind, content = mutated(_SOUND[2], chance)
    return f"checksum right: {kind}", content, ""


def _odd_example(chance: random.Random) -> tuple[str, bytes, str]:
    """Features that are missing, twice there, of another kind, or nested wrongly."""
    image, label = _tensors(chance)
    img, lab = tensor_bytes(image), tensor_bytes(label)
    feature = field(1, field(1, img))
    whole = example_bytes(img=img, label=lab)
    deep = b""
    for _ in range(3000):
        deep = field(1, deep)
    made: dict[str, tuple[bytes, str]] = {
        "nothing": (b"", REFUSED),
        "no label": (example_bytes(img=img), REFUSED),
        "no image": (example_bytes(label=lab), REFUSED),
        "another name": (example_bytes(image=img, label=lab), REFUSED),
        "image twice": (example_bytes(label=lab) + example_bytes(img=img) + example_bytes(img=img), ""),
        "an image that is text": (example_bytes(img=b"404 Not Found", label=lab), REFUSED),
        "an empty image": (example_bytes(img=b"", label=lab), REFUSED),
        "two tensors": (field(1, field(1, field(1, b"img") + field(2, field(1, field(1, img) * 2)))) + whole, ""),
        "floats": (field(1, field(1, field(1, b"img") + field(2, field(2, field(1, img))))), REFUSED),
        "a number for bytes": (field(1, 7) + whole, REFUSED),
        "a number for a feature": (field(1, field(1, 7)) + whole, REFUSED),
        "a number for a tensor": (
            example_bytes(label=lab) + field(1, field(1, field(1, b"img") + field(2, 5))),
            REFUSED,
        ),
        "unknown fields": (whole + field(9, b"more") + field(8, 12), ""),
        "field 0": (whole + b"\x00\x01", REFUSED),
        "a group": (whole + bytes([9 << 3 | 3, 9 << 3 | 4]), ""),
        "a name that is no text": (whole + field(1, field(1, field(1, b"\xff\xfe") + field(2, feature))), ""),
        "no end": (whole + varint(1 << 3 | 2) + varint(2**40), REFUSED),
        "a number without end": (whole + b"\xff" * 12, REFUSED),
        "many fields": (b"\x10\x00" * 1_200_000, REFUSED),
        "deep": (deep, REFUSED),
    }
    kind = chance.choice(list(made))
    return f"example: {kind}", *made[kind]


def _tensors(chance: random.Random) -> tuple[NDArray[Any], NDArray[Any]]:
    rng = np.random.default_rng(chance.randrange(2**32))
    image = rng.normal(size=(2, 4, 3, 5)).astype(np.float32)
    return image, (image[:1] > 0).astype(np.float32)


def _odd_tensor(chance: random.Random) -> tuple[str, bytes, str]:
    """A tensor whose type, shape and voxels do not go together, or go together in a way that is no case."""
    image, label = _tensors(chance)
    odd_is_label = chance.random() < 0.5
    voxels = label if odd_is_label else image
    number, shape, content = 1, list(voxels.shape), voxels.tobytes()
    body = b""
    kind = chance.choice(_TENSOR_KINDS)
    match kind:
        case "type":
            number = chance.choice([*_DTYPES, 0, 7, 8, 14, 18, 22, 101, 2**40])
        case "edge":
            shape[chance.randrange(4)] = chance.choice(_ODD_WHOLE)
        case "axes":
            shape = chance.choice(
                [[], [1], [voxels.size], [1, *shape], [0, *shape], shape[1:], [1] * 200, shape * 5000]
            )
        case "order":
            chance.shuffle(shape)
        case "length":
            content = content[: chance.randrange(len(content))] if chance.random() < 0.5 else content + bytes(4)
        case "values":
            held = content[: chance.choice([len(content), len(content), len(content) - 4, 4, 3])]
            content, body = b"", field(5, held)
        case "not packed":
            content, body = b"", b"".join(varint(5 << 3 | 5) + each.tobytes() for each in voxels.ravel())
        case "odd number":
            odd = voxels.copy()
            odd.flat[chance.randrange(odd.size)] = chance.choice([np.nan, np.inf, -1, 0.5, 256, 3e38, -np.inf])
            content = odd.tobytes()
        case "wire type":
            body = chance.choice([field(1, b"x"), field(2, 3), field(4, 5)])
        case "fixed numbers":
            content, body = b"", b"".join(varint(5 << 3 | 1) + struct.pack("<d", each) for each in voxels.ravel())
        case _:
            body = field(2, b"".join(field(2, field(1, n)) for n in shape))
    dims = b"".join(field(2, field(1, n)) for n in shape)
    tensor = field(1, number) + field(2, dims) + (field(4, content) if content else b"") + body
    features = {"img": tensor_bytes(image), "label": tensor_bytes(label), "label" if odd_is_label else "img": tensor}
    return f"tensor: {kind}", example_bytes(**features), ""
