"""Gemma 3 270M, Q4_K_M, a base model: described exactly, and greedy as transformers is on the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.cli import main
from headway.core.errors import ModelFileError
from headway.model.load import describe, load
from headway.ops.reference import ReferenceBackend
from headway.text.tokenizer import Tokenizer
from tests.model.paging import Bench
from tests.published import gemma

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, in a small village by the sea,",
    "日本の首都は",
    "Water boils at 100 degrees Celsius. The three states of matter are solid, liquid and",
)
CLOSE_CALL = 1e-4  # of the two best logits: either may win


@pytest.fixture(scope="module")
def path() -> Path:
    return gemma()


def test_it_is_described_from_its_header(path: Path) -> None:
    info = describe(path)
    assert (info.config.layers, info.vocab_size, info.context_length) == (18, 262144, 32768)
    assert info.parameters == 268_098_176
    assert info.formats == {"f32": 109, "q5_0": 81, "q4_k": 27, "q8_0": 10, "q6_k": 9}
    assert info.tokenizer.eos_ids == (1,) and info.tokenizer.add_bos is True and info.tokenizer.chat_template is None


def test_a_base_model_does_not_chat(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["chat", str(path)])
    assert stopped.value.code == 2
    assert "has no chat template; complete texts with `headway generate --prompt`, or name" in capsys.readouterr().err


def greedy(path: Path, count: int, prompts: tuple[str, ...]) -> None:
    """`count` tokens after each prompt, against what transformers likes best at each of these places."""
    backend = ReferenceBackend()
    model = load(path, backend)
    assert model.shape.n_params == model.info.parameters
    tokenizer = Tokenizer(model.info.tokenizer)
    texts = {prompt: tokenizer.encode(prompt) for prompt in prompts}
    bench = Bench(model, backend, blocks=16, block_size=32)
    work = dict(texts)
    for _ in range(count):
        picked = bench.step(work, "last").argmax(axis=1).tolist()
        for (prompt, ids), token in zip(texts.items(), picked, strict=True):
            texts[prompt] = [*ids, token]
        work = {prompt: ids[-1:] for prompt, ids in texts.items()}

    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for prompt, ids in texts.items():
        with torch.no_grad():
            logits = theirs(torch.tensor([ids[:-1]])).logits[0, -count:]
        chosen = logits.gather(1, torch.tensor(ids[-count:])[:, None])[:, 0]
        assert (logits.max(dim=-1).values - chosen).max() < CLOSE_CALL, prompt


def test_it_goes_on_as_found_below(path: Path) -> None:
    """The first tokens of the slow test below, which found them with transformers."""
    backend = ReferenceBackend()
    bench = Bench(load(path, backend), backend, blocks=4, block_size=32)
    work = [2, 818, 5279, 529, 7001, 563]  # "The capital of France is"
    for expected in (506, 5279, 529):  # " the capital of"
        picked = int(bench.step({"a": work}, "last").argmax())
        assert picked == expected
        work = [picked]


@pytest.mark.slow
def test_greedy_continuations_equal_transformers_on_the_same_file(path: Path) -> None:
    greedy(path, 32, PROMPTS)


def test_a_template_of_ones_own(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}model:")
    assert describe(path, chat_template=file).tokenizer.chat_template == file.read_text()
    with pytest.raises(ModelFileError, match=r"none\.jinja: cannot be read"):
        describe(path, chat_template=tmp_path / "none.jinja")
