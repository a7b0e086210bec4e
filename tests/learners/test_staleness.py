import numpy as np
import pytest

from core.errors import RunBroken
from learners.packing import step_tokens
from learners.staleness import check_staleness

pytestmark = pytest.mark.fast


def tokens_of(make_group, version):
    return step_tokens([make_group([len(version)], version=np.array(version, np.int32))], [np.zeros(1)])


def test_ages_are_reported_in_weight_updates(make_group):
    assert check_staleness(4, tokens_of(make_group, [3, 3, 4, 4]), 4, 1) == {
        "staleness_mean": 0.5,
        "staleness_max": 1.0,
    }


@pytest.mark.parametrize("version", [[2, 4], [4, 5]])  # two updates old; from the future
def test_a_token_outside_the_bound_breaks_the_run_and_names_its_group(make_group, version):
    with pytest.raises(RunBroken, match=r"max_staleness=1 weight updates old.*step 4, weights version 4.*0:p0:0"):
        check_staleness(4, tokens_of(make_group, version), 4, 1)
