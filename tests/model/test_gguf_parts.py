"""A GGUF cut into parts loads from any of them, or from its folder, as the whole does; parts are held to each other."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from headway.core.errors import ModelFileError
from headway.model.gguf_parts import read_model
from headway.model.load import describe, load
from headway.ops.reference import ReferenceBackend
from tests.model.checkpoints import make, to_gguf


def cut(path: Path, count: int = 3) -> list[Path]:
    """As llama-gguf-split: the first part has the metadata, tensors in turn."""
    reader = gguf.GGUFReader(path)
    parts = []
    for number in range(count):
        part = path.with_name(f"{path.stem}-{number + 1:05}-of-{count:05}.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith("GGUF.") and field.name != "general.architecture":
                kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], kind)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::count]:
            writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    make(tmp_path / "hf", num_hidden_layers=1)
    (tmp_path / "gguf").mkdir()
    to_gguf(tmp_path / "hf", tmp_path / "gguf" / "tiny.gguf", "Q8_0")
    return tmp_path / "gguf" / "tiny.gguf"


def test_any_part_and_the_folder_stand_for_the_whole(whole: Path) -> None:
    expected, (named, *others) = read_model(whole), cut(whole)
    info = describe(whole)
    whole.unlink()
    (whole.parent / "mmproj-tiny.gguf").write_bytes(b"an image encoder")
    for source in (named, *others, whole.parent):
        part = describe(source)
        assert (part.name, part.parameters, part.formats) == (info.name, info.parameters, info.formats)
    tensors = read_model(others[0]).tensors
    assert tensors.keys() == expected.tensors.keys()
    assert all(np.array_equal(tensors[name].data, weight.data) for name, weight in expected.tensors.items())
    assert load(others[1], ReferenceBackend()).info.vocab_size == info.vocab_size


def test_parts_are_held_to_each_other(whole: Path) -> None:
    first, second, third = cut(whole)
    whole.unlink()
    kept = third.read_bytes()
    third.rename(third.with_name(third.name + ".part"))
    with pytest.raises(ModelFileError, match=r"beside it: tiny-00003-of-00003.gguf \(its download was interrupted"):
        read_model(first)
    third.write_bytes(second.read_bytes())
    with pytest.raises(ModelFileError, match="is not part 3 of the same 3"):
        read_model(second)
    third.write_bytes(kept[: len(kept) - 64])
    with pytest.raises(ModelFileError, match=r"tiny-00003-of-00003.gguf: tensor .*truncated"):
        read_model(second)
    third.write_bytes(kept)
    renamed = second.rename(second.with_name("tiny.gguf"))
    with pytest.raises(ModelFileError, match=r"must be called NAME-00001-of-00003.gguf"):
        read_model(renamed)


@pytest.mark.parametrize("count", [[3], "3", 3.0])
def test_a_number_of_parts_is_a_number(tmp_path: Path, count: object) -> None:
    path = tmp_path / "tiny-00001-of-00003.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGUFValueType.get_type(count)
    writer.add_key_value("split.count", count, kind, gguf.GGUFValueType.INT32 if isinstance(count, list) else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelFileError, match=r"split.count: .* is not a number of parts"):
        read_model(path)


def test_a_folder_of_several_models_names_them(whole: Path) -> None:
    (whole.parent / "other.gguf").write_bytes(whole.read_bytes())
    with pytest.raises(ModelFileError, match=r"has several models: other.gguf, tiny.gguf; name one"):
        describe(whole.parent)
