"""Burst sampling of sigma-GPT: the distribution of its algorithm, simulated step by step, which is not the model's."""

import jax
import numpy as np
from scipy import stats

import enumerated
from aogpt_jax.sampling import burst
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan


def simulate(table, checks, rng):
  """One sequence and its order, from the conditionals of all contexts."""
  order, tokens = (), ()
  while len(order) < 4:
    still = [p for p in range(4) if p not in order]
    draft = {p: int(rng.choice(3, p=table[order, tokens, p])) for p in still}
    checked = []
    for _ in range(checks):
      longer = order, tokens
      for p in rng.permutation(still).tolist():
        if longer[0] != order and rng.random() >= table[*longer, p][draft[p]] / table[order, tokens, p][draft[p]]:
          break
        longer = longer[0] + (p,), longer[1] + (draft[p],)
      checked.append(longer)
    order, tokens = max(checked, key=lambda found: len(found[0]))
  return [token for _, token in sorted(zip(order, tokens))]


def test_its_samples_have_the_distribution_of_the_algorithm_and_not_that_of_one_token_a_step():
  model, params = enumerated.make()
  logits, kept, batch, rng = enumerated.logits_of(model, params), filters.Filters(3), 20_000, np.random.default_rng(0)
  made = plan.make_plan(np.tile(np.arange(4), (batch, 1)), np.zeros((batch, 4), bool), 4)
  out = burst.sample(model, params, made, np.zeros((batch, 4)), jax.random.split(jax.random.key(0), batch), kept, checks=3)
  table = enumerated.conditionals(logits)
  simulated = enumerated.counts([simulate(table, 3, rng) for _ in range(4_000)])
  drawn = enumerated.counts(out.tokens)
  often = simulated + drawn > 30
  pair = np.stack([np.append(x[often], x[~often].sum()) for x in (drawn, simulated)])
  assert stats.chi2_contingency(pair[:, pair.sum(axis=0) > 0]).pvalue > 0.001
  # The same chi-squared test that the speculative sampler passes.
  exact = enumerated.one_a_step(logits, kept).mean(axis=0)
  assert enumerated.p_value(out.tokens, exact) < 1e-9
  assert 0.05 < np.abs(drawn / batch - exact).sum() / 2 < 0.5  # in total variation
  assert set(out.evaluations_each) <= {2, 3, 4, 5, 6, 7} and len({tuple(order) for order in out.orders}) == 24
