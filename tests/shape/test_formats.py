"""The table of number formats, held against the packages that define them."""

from __future__ import annotations

import gguf
import pytest

from headway.core.errors import BadInput
from headway.ops.weight import READABLE
from headway.shape.formats import BY_GGUF_TYPE, FORMATS, find_format, known_format, nominal_bytes


@pytest.mark.parametrize("number", BY_GGUF_TYPE.keys() - {9})  # the package has Q8_1 with the 32-bit scales it once had
def test_blocks_are_ggmls(number: int) -> None:
    format, kind = BY_GGUF_TYPE[number], gguf.GGMLQuantizationType(number)
    assert (format.name, (format.numbers, format.bytes)) == (kind.name.lower(), gguf.GGML_QUANT_SIZES[kind])


@pytest.mark.parametrize(("name", "width"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_config_dtypes_are_known(name: str, width: float) -> None:
    format = known_format(name)
    assert format is not None and format.width == width


def test_names_and_aliases_are_each_of_one_format() -> None:
    names = [name for format in FORMATS.values() for name in (format.name, *format.aliases)]
    assert len(names) == len(set(names))


def test_scales_are_the_difference_between_stored_and_nominal() -> None:
    assert FORMATS["int4"].width - nominal_bytes("gptq") == 2.5 / 128
    assert FORMATS["nvfp4"].width - nominal_bytes("nvfp4") == 1 / 16
    assert all(format.width >= format.nominal for format in FORMATS.values())


def test_our_kernels_multiply_blocks_in_integers() -> None:
    assert [FORMATS[name].multiplied_on_cpu for name in READABLE] == ["fp32", "bf16", "bf16"] + ["int8"] * 13


def test_what_is_no_precision_is_refused_by_name() -> None:
    assert find_format("FP16").name == "f16"
    with pytest.raises(BadInput, match="--kv: 'q4_0' has no nominal width; accepted: f32, bf16, f16, fp8"):
        nominal_bytes("q4_0", "--kv")
    with pytest.raises(BadInput, match="--precision: 'int3' is not a number format; accepted: f32"):
        find_format("int3")
