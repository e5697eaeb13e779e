"""The protobuf messages of the SDK's public protocol, as far as the service reads or writes them.

One table has the fields with their numbers, as in the SDK's `tinker_public.proto`. Readers skip others. A map is a list of
entries on the wire, and is declared as one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_KINDS = {
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}

_MESSAGES = {
    "TopkLogprobs": "token_ids:1:bytes logprobs:2:bytes k:3:int32 length:4:int32",
    "SampledSequence": "stop_reason:1:int32 tokens:2:bytes logprobs:3:bytes topk_sampled_logprobs:4:TopkLogprobs",
    "SampleResponse": "sequences:1:SampledSequence* prompt_logprobs:2:bytes topk_prompt_logprobs:3:TopkLogprobs "
    "prompt_cache_hit_tokens:4:int32 target_prompt_logprobs:5:Tensor prompt_alt_tokens:6:PromptAltTokens",
    "PromptAltTokens": "tokens:1:Tensor logprobs:2:Tensor",
    "SparseCsr": "values:1:bytes crow_indices:2:bytes col_indices:3:bytes",
    "Tensor": "dense:1:bytes sparse_csr:2:SparseCsr dtype:3:int32 shape:4:int64*",
    "BatchedTensor": "data:1:bytes offsets:2:bytes dtype:3:int32 trailing_shape:4:int64*",
    "TensorEntry": "key:1:string value:2:BatchedTensor",
    "ArrayRecord": "type_tag:1:string fields:2:TensorEntry* num_datums:3:int64",
    "MetricEntry": "key:1:string value:2:double",
    "ForwardBackwardOutput": "loss_fn_output_type:1:string loss_fn_outputs:2:ArrayRecord* metrics:3:MetricEntry*",
    "LossConfigValue": "number:1:double text:2:string",
    "LossConfigEntry": "key:1:string value:2:LossConfigValue",
    "EncodedTextChunk": "tokens:1:bytes",
    "OtherChunk": "",
    "Chunk": "encoded_text:1:EncodedTextChunk image:2:OtherChunk dmel:3:OtherChunk",
    "InputEntry": "key:1:string value:2:Tensor",
    "ProvenanceRun": "sequence_id:1:string offset:2:int64 length:3:int64",
    "ProvenanceSpan": "prompt_tokens:1:ProvenanceRun sampled_tokens:2:ProvenanceRun",
    "Datum": "model_input:1:Chunk* loss_fn_inputs:2:InputEntry* model_input_spans:3:ProvenanceSpan*",
    "ForwardBackwardRequest": "model_id:1:string seq_id:2:int32 data:3:Datum* loss_fn:4:string loss_fn_config:5:MetricEntry* "
    "forward_only:6:bool loss_fn_config_v2:7:LossConfigEntry*",
}

FLOAT32, INT64, INT32 = 1, 2, 3
"""The protocol's numbers of dtypes."""

STOP, LENGTH = 0, 1
"""The protocol's numbers of reasons to stop."""


def _made() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="counterpoint/tinker.proto", package="counterpoint.tinker", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for each in fields.split():
            field, number, kind = each.split(":")
            added = message.field.add(name=field, number=int(number))
            added.label = added.LABEL_REPEATED if kind.endswith("*") else added.LABEL_OPTIONAL
            kind = kind.removesuffix("*")
            if kind in _KINDS:
                added.type = _KINDS[kind]
            else:
                added.type, added.type_name = added.TYPE_MESSAGE, f".counterpoint.tinker.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"counterpoint.tinker.{name}"))
        for name in _MESSAGES
    }


MESSAGES = _made()
"""The classes of the messages by their names."""

_PACKED: dict[int, Any] = {}
"""In the place of the parts of a list of numbers: each byte may be one."""


def _parts() -> dict[str, dict[int, Any]]:
    found: dict[str, dict[int, Any]] = {name: {} for name in _MESSAGES}
    for name, fields in _MESSAGES.items():
        for each in fields.split():
            _, number, kind = each.split(":")
            if kind.removesuffix("*") in _MESSAGES:
                found[name][int(number)] = found[kind.removesuffix("*")]
            elif kind == "int64*":
                found[name][int(number)] = _PACKED
    return found


_PARTS = _parts()
"""By message, the fields that make more objects than one: messages, and lists of numbers."""


_FIXED = {1: 8, 5: 4}
"""The bytes of the kinds of fields with a fixed size."""


def check_fields(data: bytes, name: str, most: int) -> int:
    """Returns a message's number of fields, including its parts' and the numbers of its lists, before any is made.

    It stops beyond `most`. Raises `DecodeError` if it is no message.
    """
    count, left = 0, [(0, len(data), _PARTS[name])]
    try:
        while left:
            at, end, parts = left.pop()
            while at < end:
                count += 1
                if count > most:
                    return count
                tag, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
                kind = tag & 7
                if kind == 2:
                    size, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
                    inner = parts.get(tag >> 3)
                    if inner is _PACKED:
                        count += size
                    elif inner is not None and size:
                        left.append((at, min(at + size, end), inner))
                    at += size
                elif kind == 0:
                    at = at + 1 if data[at] < 128 else _varint(data, at)[1]
                elif kind in _FIXED:
                    at += _FIXED[kind]
                else:
                    raise DecodeError(f"a field of the kind {kind}")
            if at > end:
                raise DecodeError("it ends within a field")
    except IndexError:
        raise DecodeError("it ends within a field") from None
    return count


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a number of variable length, and the position of its end."""
    value = data[at]
    if value < 128:
        return value, at + 1
    value, shift = value & 127, 7
    while (byte := data[at := at + 1]) >= 128:
        value |= (byte & 127) << shift
        shift += 7
        if shift > 63:
            raise DecodeError("a number is too long")
    return value | byte << shift, at + 1
