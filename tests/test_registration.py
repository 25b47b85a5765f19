"""Registration: its id stands for every value in it, and its order is a fair permutation."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import build
from d3.record import Message, canonical_json
from d3.registration import Prompt, Registration, block_order, differences, prompt_order, stratum_name

STUDY = build.registration(boots=2)
PLAIN = STUDY.model_dump(mode="json")


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() for leaf in leaves(v, (*path, k))]
    if isinstance(value, list):
        return [leaf for i, v in enumerate(value) for leaf in leaves(v, (*path, i))]
    return [path]


def changed(path: tuple[Any, ...]) -> dict[str, Any]:
    copy: Any = Registration.model_validate(PLAIN).model_dump(mode="json")
    place = copy
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    place[path[-1]] = (
        ("warm" if old == "cold" else "cold")
        if path[-1] == "expect"
        else not old
        if isinstance(old, bool)
        else f"{old}x"
        if isinstance(old, str)
        else old + 1
    )
    return dict(copy)


@given(st.sampled_from(leaves(PLAIN)))
@settings(max_examples=150, deadline=None)
def test_any_changed_value_changes_the_id_and_is_named(path: tuple[Any, ...]) -> None:
    other = Registration.model_validate(changed(path))
    assert other.id() != STUDY.id()
    assert len(found := differences(STUDY, other)) == 1
    assert found[0].startswith(str(path[0]))


def test_the_id_survives_the_way_through_json() -> None:
    assert Registration.model_validate_json(canonical_json(STUDY)).id() == STUDY.id()
    assert differences(STUDY, Registration.model_validate_json(canonical_json(STUDY))) == []
    assert len(STUDY.id()) == 64


CELLS = st.lists(st.tuples(st.sampled_from("st"), st.text("abc=01 ", min_size=1)), min_size=1, max_size=8, unique=True)


@given(CELLS, st.integers(1, 6), st.integers())
def test_the_order_is_a_permutation_in_blocks_that_hold_each_cell_once(cells: Any, boots: int, seed: int) -> None:
    order = block_order(cells, boots, seed)
    assert len(order) == boots * len(cells)
    for boot in range(boots):
        block = order[boot * len(cells) : (boot + 1) * len(cells)]
        assert {s.boot for s in block} == {boot}
        assert sorted((s.stratum, s.cell) for s in block) == sorted(cells)


@given(CELLS, st.integers(1, 4), st.integers(), st.randoms())
def test_the_order_hangs_on_the_seed_alone_not_on_how_the_sweep_was_written(
    cells: Any, boots: int, seed: int, random: Any
) -> None:
    shuffled = list(cells)
    random.shuffle(shuffled)
    assert block_order(cells, boots, seed) == block_order(shuffled, boots, seed)


def test_another_seed_gives_another_order_and_blocks_differ() -> None:
    cells = [("base", f"cell {i}") for i in range(6)]
    orders = {block_order(cells, 3, seed) for seed in range(20)}
    assert len(orders) == 20
    blocks = {tuple(s.cell for s in block_order(cells, 3, 1)[i : i + 6]) for i in (0, 6, 12)}
    assert len(blocks) == 3


@given(st.integers(1, 8), st.integers(0, 50), st.integers())
def test_prompts_are_permuted_per_boot_the_same_in_every_cell(count: int, boot: int, seed: int) -> None:
    prompts = [Prompt(id=f"p{i}", messages=(Message(role="user", content="x"),)) for i in range(count)]
    order = prompt_order(prompts, boot, seed)
    assert sorted(p.id for p in order) == sorted(p.id for p in prompts)
    assert order == prompt_order(prompts, boot, seed)


def test_no_prompt_is_always_the_first_after_boot() -> None:
    prompts = [Prompt(id=f"p{i}", messages=(Message(role="user", content="x"),)) for i in range(3)]
    assert {prompt_order(prompts, boot, 1)[0].id for boot in range(12)} == {"p0", "p1", "p2"}


def test_cells_are_found_by_name_and_strata_are_named_by_all_else() -> None:
    assert STUDY.cell("base", "apc=on invariant=1").factors == {"apc": "on", "invariant": "1"}
    with pytest.raises(KeyError):
        STUDY.cell("base", "apc=on invariant=2")
    assert stratum_name({"apc": "on", "invariant": "0", "dtype": "bf16", "attention": "A"}) == "attention=A dtype=bf16"
