"""Statistics of texts against closed forms."""

import math

import numpy as np
import pytest

from aogpt_jax.evaluation import text_statistics


def statistics(*texts):
  return text_statistics.statistics([np.array(text, np.uint16) for text in texts])


@pytest.mark.parametrize("text, expected", [
    ([7] * 9, 0.0), ([3], 0.0), ([1, 2], math.log(2)), (list(range(50)), math.log(50)),
    ([5, 5, 5, 9], math.log(4) - 0.75 * math.log(3))])
def test_entropy_is_of_the_texts_own_histogram_in_nats(text, expected):
  assert statistics(text).entropy == pytest.approx(expected, abs=1e-12)


def test_entropy_is_the_mean_over_texts_and_not_that_of_all_together():
  s = statistics([1, 1, 1, 1], [2, 2], [3, 4])
  assert s.entropy == pytest.approx(math.log(2) / 3)
  assert s.entropy_stderr == pytest.approx(math.log(2) / 3)  # of 0, 0 and log 2: a deviation of log(2) / sqrt(3), over sqrt(3)


def test_distinct_n_grams_are_those_of_all_texts_together():
  s = statistics([1, 2, 1, 2], [1, 2, 3])
  # 7 tokens; pairs 12 21 12 12 23; triples 121 212 123; quadruples 1212
  assert s.distinct == {1: 3 / 7, 2: 3 / 5, 3: 3 / 3, 4: 1.0}


def test_repetition_is_the_share_of_4_grams_that_occurred_before_in_the_same_text():
  assert statistics([1] * 7).repetition == pytest.approx(3 / 4)  # four 4-grams, all alike
  assert statistics([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]).repetition == 0
  assert statistics([1, 2, 3] * 3, [5, 6, 7, 8]).repetition == pytest.approx((3 / 6 + 0) / 2)


def test_texts_of_one_token_again_and_again_are_counted():
  assert statistics([4, 4, 4], [4], [4, 4, 5], [9, 9]).constant == 2


def test_what_no_text_is_long_enough_for_is_nan():
  s = statistics([1, 2, 3], [])
  assert math.isnan(s.repetition) and math.isnan(s.distinct[4]) and math.isnan(s.entropy_stderr)
  assert s.distinct[3] == 1 and s.entropy == pytest.approx(math.log(3))
  assert math.isnan(statistics().entropy)
