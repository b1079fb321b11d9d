"""Without the compiled module everything still imports, and says in a sentence what is missing."""

from __future__ import annotations

import pytest

from headway.ops import native


@pytest.mark.parametrize(
    ("error", "says"),
    [(ModuleNotFoundError("no _native"), "install a C"), (ImportError("undefined symbol: x"), "undefined symbol: x")],
)
def test_the_reason_is_one_sentence_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: ImportError, says: str
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(native.importlib, "import_module", fail)
    assert not native.available()
    reason = native.why_not()
    assert reason is not None and says in reason and "reinstall Headway" in reason
