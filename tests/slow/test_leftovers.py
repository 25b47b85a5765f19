"""Fifty boots of the pretend engine, by every way to start: nothing of any stays, and D3 holds no more than before."""

from pathlib import Path

import pytest

from d3.leftovers import repeat
from planned import plan, wrapper

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_left")]


def test_fifty_boots_leave_nothing(tmp_path: Path) -> None:
    asked = plan("on", "0", "", transport="worker", python=wrapper(tmp_path))
    found = repeat(asked, 50, ["plain", "standby", "fork"], tmp_path / "boots")
    assert (found.left, found.unlike) == ((), ())
    assert found.boots == {"plain": 17, "standby": 17, "fork": 16}
    assert found.last_files <= found.first_files
    assert found.last_mib - found.first_mib < 20
