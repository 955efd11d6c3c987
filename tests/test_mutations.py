"""The list of mistakes fits the project; `bash scripts/test.sh --mutations` tries them."""

import pytest
from mutations import MUTATIONS, Mutation, attempt, problem


def test_every_mistake_can_be_made():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 80
    assert not list(filter(None, map(problem, MUTATIONS)))


@pytest.mark.parametrize(
    "test, survived",
    [("test_percentile", True), ("test_learning_rate_is_scaled_linearly", False)],
)
def test_a_mistake_that_no_test_sees_survives(test, survived):
    mistake = ("common/schedule.py", [f"test_units.py::{test}"], "/ 256", "/ 128")
    assert (
        attempt(Mutation("twice the learning rate", *mistake))["survived"] is survived
    )
