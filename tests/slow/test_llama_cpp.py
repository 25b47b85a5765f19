"""llama.cpp's own server, really: one boot of it does all that its YAML says. Only where it was built."""

import json

import pytest
from omegaconf import OmegaConf

from d3.engine_check import main
from d3.errors import D3Error
from d3.install import engine_python
from d3.store import root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_left")]


def test_a_boot_is_made_cold_by_the_reset_and_warm_by_one_token_less_than_the_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = OmegaConf.load(root() / "conf/engine/llama_cpp.yaml")
    try:
        engine_python(engine.name, engine.lock, None, engine.executable)
    except D3Error as error:
        pytest.skip(f"{error} (11 minutes of processor time)")
    assert main(["check", "llama_cpp", "max_tokens=4", "--json"]) == 0
    found = {c["name"]: c for c in json.loads(capsys.readouterr().out)["capabilities"]}
    assert {name for name, c in found.items() if not c["has"]} == {"prompt ids", "invariant mode"}
    assert found["cached tokens"]["evidence"] == "of 257 prompt tokens: C1 0, W1 256, W2 256, C2 0"
