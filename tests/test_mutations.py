"""The list of mistakes fits the project; `bash scripts/test.sh --mutations` tries them."""

from mutations import MUTATIONS, problem


def test_every_mistake_can_be_made():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 80
    assert not list(filter(None, map(problem, MUTATIONS)))
