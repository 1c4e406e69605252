"""``CudagraphKeyDispatcher.decide`` in C++ gives the answers, and the errors, of the Python method."""

import copy
import pickle
import random
from functools import partial
from typing import Any

import pytest

from graphdispatch import CUDAGraphMode as Mode
from graphdispatch.engines import CudagraphKeyDispatcher
from graphdispatch.errors import ConfigError, FallbackError
from graphdispatch.native import EXTENSION

pytestmark = pytest.mark.skipif(EXTENSION is None, reason="the native core is not compiled, or turned off")

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL
MODES: list[Any] = [None, (), [FULL], {PIECEWISE}, frozenset((NONE, FULL)), (NONE, PIECEWISE, FULL), {FULL: 1}, [7]]


def made(**options: Any) -> CudagraphKeyDispatcher:
    """A dispatcher with four variants, uniform query length 2."""
    plan = CudagraphKeyDispatcher(
        capture_sizes=(1, 2, 4, 8, 16), max_num_reqs=16, variants=(None, 1, 4, "a"), **options
    )
    plan.initialize_cudagraph_keys(Mode.FULL_AND_PIECEWISE, 2)
    return plan


def by_python(plan: CudagraphKeyDispatcher, *args: Any, **kwargs: Any) -> Any:
    """What the Python method answers."""
    return CudagraphKeyDispatcher.decide(plan, *args, **kwargs)


def outcome(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The answer, or the type of the error."""
    try:
        return call(*args, **kwargs)
    except (ConfigError, FallbackError, TypeError, ValueError) as error:
        return type(error)


def test_random_questions_get_the_same_answers_twice() -> None:
    """Asked first and again, be the arguments usual or not."""
    plan, numbers = made(), random.Random(5)
    assert type(plan.decide) is EXTENSION.Decide
    for _ in range(4000):
        args = [numbers.choice([0, 1, 2, 3, 5, 8, 9, 16, 17, 40, -1, True, 2**70, 1.5, "x"])]
        if numbers.random() < 0.7:
            args.append(numbers.choice([None, 0, 1, 2, 3, 8, 16, 17, False]))
        kwargs = {
            "query_len": numbers.choice([None, 1, 2, 3, 0]),
            "variant": numbers.choice([None, 0, 1, 3, 4, 5, "a", "b", True, 1.0]),
            "allowed_modes": numbers.choice(MODES),
            "excluded_modes": numbers.choice(MODES),
        }
        kwargs = {name: value for name, value in kwargs.items() if numbers.random() < 0.6}
        expected = outcome(partial(by_python, plan), *args, **kwargs)
        assert outcome(plan.decide, *args, **kwargs) == expected
        assert outcome(plan.decide, *args, **kwargs) == expected


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((1, 1, 1), {}), ((1,), {"num_tokens": 1}), ((1,), {"tokens": 1}), ((1,), {"cost": None})],
)
def test_a_call_that_the_method_refuses_is_refused(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As the signature says."""
    plan = made()
    with pytest.raises(TypeError):
        by_python(plan, *args, **kwargs)
    with pytest.raises(TypeError):
        plan.decide(*args, **kwargs)


def test_a_new_table_is_used_at_once_even_by_a_bound_name() -> None:
    """A caller may keep ``plan.decide``."""
    plan = made()
    decide = plan.decide
    assert decide(3, variant=4).size == 4
    for mode in (FULL, PIECEWISE):
        for key in list(plan.cudagraph_keys[mode]):
            if key.num_tokens == 4:
                plan.remove_cudagraph_key(mode, key)
    assert decide(3, variant=4).size == 8
    assert plan.decide is decide


def test_a_cost_model_is_asked_once_for_each_question() -> None:
    """The second answer is the kept one."""
    asked = []

    def cost(mode: Mode, padded: int, real: int) -> float:
        asked.append((mode, padded, real))
        return float(padded)

    plan = made(cost=cost)
    plan.decide(3)
    first = list(asked)
    plan.decide(3)
    assert asked == first != []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda plan: pickle.loads(pickle.dumps(plan))])
def test_a_copy_decides_by_its_own_table(copied: Any) -> None:
    """A change of the copy leaves the original."""
    plan = made()
    assert plan.decide(3).size == 4
    other = copied(plan)
    other.add_cudagraph_key(PIECEWISE, plan.decide(4).descriptor._replace(num_tokens=3))
    assert (other.decide(3).size, plan.decide(3).size) == (3, 4)
