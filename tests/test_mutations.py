"""The list of mistakes fits the project; `bash scripts/test.sh --mutations` tries them."""

import pytest
from mutations import MUTATIONS, Mutation, attempt, problem


def test_every_mistake_can_be_made():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 80
    assert not list(filter(None, map(problem, MUTATIONS)))


@pytest.mark.full
def test_a_mistake_that_no_test_sees_survives(capsys):
    tests = ["test_units.py::test_defaults_are_those_of_the_recipe"]
    line = "torch.rand(()) < 0.5"
    mistake = Mutation("no mirroring", "common/images.py", tests, line, "False")
    assert attempt(mistake)["survived"]
    assert capsys.readouterr().out == "SURVIVED no mirroring\n"
