"""Boot plans for the pretend engine."""

import sys
from pathlib import Path
from typing import Any

import yaml

from d3.record import BootPlan, Launch, Message, RequestPlan, sha256

TESTS = Path(__file__).parent
PROMPTS = {p["id"]: p["text"] for p in yaml.safe_load((TESTS / "conf/prompts/fake.yaml").read_text())["items"]}
PHASES = (("C1", 1), ("W1", 1), ("C2", 2), ("W2", 2))


def plan(apc: str = "on", invariant: str = "0", do: str = "", *, transport: str = "server", **changed: Any) -> BootPlan:
    """Four requests per prompt to the fake engine; `do`: ways to misbehave; `changed`: fields of the launch."""
    words = ("--apc", apc, "--invariant", invariant)
    worker = transport == "worker"
    launch: dict[str, Any] = {
        "transport": transport,
        "python": sys.executable,
        "server": ("-S", str(TESTS / "fake_engine.py"), "--host", "{host}", "--port", "{port}"),
        "args": words if worker else (*words, "--do", do),
        "env": {"D3_FAKE_DO": do} if worker else {},
        "model_path": "/nowhere/model",
        "health": "/health",
        "version_path": "/version",
        "metrics_path": "/metrics",
        "salt_field": "cache_salt",
        "reset_path": None,
        "boot_timeout_s": 20.0,
        "request_timeout_s": 20.0,
    }
    return BootPlan(
        registration="0" * 64,
        boot_id=f"000000000000/base__apc-{apc}_invariant-{invariant}__b00-a1",
        cell=f"apc={apc} invariant={invariant}",
        stratum="base",
        factors={"apc": apc, "invariant": invariant},
        boot=0,
        attempt=1,
        position=0,
        protocol="test",
        engine="fake",
        version_asked="1.0",
        backend_asked=None,
        invariant_mode="the fake's mode",
        model="fake-model",
        model_digest="0" * 64,
        warmup=None,
        requests=requests(),
        launch=Launch(**{**launch, **changed}),
    )


def requests(neighbours: int = 0) -> tuple[RequestPlan, ...]:
    pairs = [(prompt, phase, series) for prompt in PROMPTS for phase, series in PHASES]
    return tuple(
        RequestPlan(
            index=index,
            prompt=prompt,
            phase=phase,
            expect="cold" if phase.startswith("C") else "warm",
            salt=sha256(f"{prompt} {series}"),
            messages=(Message(role="user", content=PROMPTS[prompt]),),
            max_tokens=4,
            temperature=0.0,
            neighbours=tuple(Message(role="user", content=f"Number {i}.") for i in range(neighbours)),
        )
        for index, (prompt, phase, series) in enumerate(pairs)
    )


def speaker(folder: Path, dialect: str, do: str = "") -> str:
    """An executable to name as `engine.python`: the fake engine in another engine's dialect.

    It drops what stands before --host: a module or a verb of the real engine.
    """
    path = folder / f"fake-{dialect}"
    words = f'"{sys.executable}" -S "{TESTS}/fake_engine.py" --dialect {dialect} --do "{do}"'
    path.write_text(f'#!/bin/sh\nwhile [ "$1" != --host ]; do shift; done\nexec {words} "$@"\n')
    path.chmod(0o755)
    return str(path)


def wrapper(folder: Path) -> str:
    """An executable to name as `engine.python`: it runs the fake worker, whatever script it is given."""
    path = folder / "fake-python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{TESTS}/fake_worker.py"\n')
    path.chmod(0o755)
    return str(path)
