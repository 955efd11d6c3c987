"""The list of mistakes fits the project; `bash scripts/test.sh --mutations` tries them."""

import pytest
from mutations import MUTATIONS, Mutation, attempt, problem


def test_every_mistake_can_be_made():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 80
    assert not list(filter(None, map(problem, MUTATIONS)))


@pytest.mark.parametrize(
    "test, survived",
    [
        ("test_auto_is_nvimgcodec_where_it_is_installed", True),
        ("test_half_of_the_images_are_mirrored", False),
    ],
)
def test_a_mistake_that_no_test_sees_survives(test, survived):
    tests, line = [f"test_images.py::{test}"], "random.random() < 0.5"
    mistake = Mutation("no mirroring", "common/images.py", tests, line, "False")
    assert attempt(mistake)["survived"] is survived
