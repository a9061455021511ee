"""No README quotes a measured number without a record."""

from __future__ import annotations

import pytest

from tests.bench.tables import DOCUMENTS, ROOT, render


@pytest.mark.parametrize("document", DOCUMENTS)
def test_tables_are_those_of_the_records(document: str) -> None:
    text = (ROOT / document).read_text()
    assert "<!-- record:" in text
    assert render(text) == text, "run python -m tests.bench.tables"
