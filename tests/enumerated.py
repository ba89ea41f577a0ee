"""A model of four tokens of three kinds, and all that it can say: every sequence in every order, by full passes without a cache."""

import itertools

import jax
import numpy as np
from scipy import stats

import random_models
from test_decode import chi_squared

LENGTH, KINDS = 4, 3
SEQUENCES = np.array(list(itertools.product(range(KINDS), repeat=LENGTH)), np.int32)
ORDERS = np.array(list(itertools.permutations(range(LENGTH))), np.int32)


def make():
  """A model and parameters, large enough that the surest position depends on what is known."""
  model, params = random_models.make(LENGTH, KINDS, layers=1, width=8)
  return model, jax.tree.map(lambda x: 1.7 * x, params)


def logits_of(model, params):
  """float64 [24, 81, 4, 3]: by order, sequence and place in the order."""
  orders, sequences = (x.reshape(-1, LENGTH) for x in np.broadcast_arrays(ORDERS[:, None], SEQUENCES))
  logits = jax.jit(model.apply)({"params": params}, sequences, orders)
  return np.asarray(logits, np.float64).reshape(len(ORDERS), len(SEQUENCES), LENGTH, KINDS)


def conditionals(logits):
  """(positions known in their order, their tokens, next position) -> probabilities of the token there, [3]."""
  table = {}
  for order, of_order in zip(ORDERS.tolist(), logits):
    for sequence, of_sequence in zip(SEQUENCES.tolist(), of_order):
      for i, position in enumerate(order):
        table[tuple(order[:i]), tuple(sequence[p] for p in order[:i]), position] = softmax(of_sequence[i])
  return table


def softmax(x):
  p = np.exp(x - x.max())
  return p / p.sum()


def counts(tokens):
  """[81], how often each sequence is among int [N, 4]."""
  return np.bincount(np.ravel_multi_index(np.asarray(tokens).T, (KINDS,) * LENGTH), minlength=len(SEQUENCES))


def one_a_step(logits, filters):
  """[24, 81]: the probability of each sequence when it is drawn token by token in each order."""
  logits = np.asarray(jax.nn.log_softmax(filters(jax.numpy.asarray(logits))), np.float64)
  by_place = SEQUENCES[:, ORDERS].swapaxes(0, 1)  # [24, 81, 4]
  return np.exp(np.take_along_axis(logits, by_place[..., None], axis=-1)[..., 0].sum(axis=-1))


def p_value(tokens, probabilities):
  """Of the chi-squared test of sequences drawn, int [N, 4], against [81]."""
  observed = counts(tokens)
  np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
  assert not observed[probabilities == 0].any()
  statistic, cells = chi_squared(observed, probabilities * len(tokens))
  return stats.chi2.sf(statistic, cells - 1)
