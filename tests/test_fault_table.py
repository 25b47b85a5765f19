"""docs/faults.md against the tests that it names: every fault has one, and a figure of tests/fault_times.py."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from fault_times import ROOT, rows

ROWS = rows()


def functions(path: Path) -> set[str]:
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_the_page_has_rows_and_all_of_them_are_read() -> None:
    page = (ROOT / "docs" / "faults.md").read_text()
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "|---"))]
    assert len(ROWS) == len(lines) > 50
    assert not [fault for fault, n in Counter(row.fault for row in ROWS).items() if n > 1]


@pytest.mark.parametrize("test", sorted({row.test for row in ROWS}))
def test_every_test_of_the_page_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in functions(ROOT / path)


def test_every_row_has_a_figure() -> None:
    assert not [row.fault for row in ROWS if not re.fullmatch(r"\d+(\.\d+)?", row.seconds)]


@pytest.mark.parametrize("path", ["tests/test_faults.py", "tests/slow/test_faults.py"])
def test_every_injected_fault_is_in_the_page(path: str) -> None:
    tested = {name for name in functions(ROOT / path) if name.startswith("test_")}
    assert tested == {row.test.partition("::")[2] for row in ROWS if row.test.startswith(f"{path}::")}
