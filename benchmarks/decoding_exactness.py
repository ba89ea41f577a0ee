"""Do samplers draw from the model's distribution? Chi-squared tests against all sequences of a small model, enumerated.

    python benchmarks/decoding_exactness.py [--samples=200000] [--model random trained]

A model of four tokens of three kinds, with random weights and trained for a minute, is sampled speculatively with windows of 1, 2 and 4
at temperature 1 and 0.7 and with top-p 0.9, in one order, against the distribution of one token a step in it; and in bursts, against
the mean of that over all orders.
"""

import argparse
import itertools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy import stats

from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import objectives
from aogpt_jax.sampling import burst
from aogpt_jax.sampling import filters
from aogpt_jax.sampling import plan
from aogpt_jax.sampling import speculative
from aogpt_jax.training import step as step_lib

SEQUENCES = np.array(list(itertools.product(range(3), repeat=4)), np.int32)
ORDERS = np.array(list(itertools.permutations(range(4))), np.int32)


def make_model(name):
  """A model and its parameters, "random" or "trained"."""
  config = config_lib.default_config()
  config.model.update(layers=1, width=8, heads=2, block_size=4, vocab_size=3, cond_width=8, gate_init=1.0, dtype="float32")
  model = build_model(config)
  initial = nn.unbox(step_lib.init_params(model, 0))
  rng = np.random.default_rng(0)
  if name == "random":
    return model, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape, scale=0.3), jnp.float32), initial)
  probabilities = rng.dirichlet(np.full(len(SEQUENCES), 0.3))
  optimizer = optax.adam(3e-3)

  @jax.jit
  def update(params, state, tokens, orders):
    loss = lambda p: objectives.any_order_nll(model, p, tokens, orders).mean()
    gradients = jax.grad(loss)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state

  params, state = initial, optimizer.init(initial)
  for _ in range(2000):
    tokens = SEQUENCES[rng.choice(len(SEQUENCES), 128, p=probabilities)]
    params, state = update(params, state, tokens, ORDERS[rng.integers(0, 24, 128)])
  return model, params


def expected(model, params, orders, kept):
  """[N, 81]: the probability of each sequence, token by token in each of N orders."""
  pairs = [x.reshape(-1, 4) for x in np.broadcast_arrays(orders[:, None], SEQUENCES)]
  log_probs = jax.nn.log_softmax(kept(jax.jit(model.apply)({"params": params}, pairs[1], pairs[0])))
  tokens = np.take_along_axis(pairs[1], pairs[0], axis=1)
  by_place = np.take_along_axis(np.asarray(log_probs, np.float64), tokens[..., None], axis=-1)
  return np.exp(by_place.sum(axis=(1, 2))).reshape(len(orders), len(SEQUENCES))


def main():
  parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
  parser.add_argument("--samples", type=int, default=200_000)
  parser.add_argument("--model", choices=("random", "trained"), nargs="*", default=("random", "trained"))
  args = parser.parse_args()
  batch = args.samples
  order = np.array([2, 0, 3, 1], np.int32)
  made = plan.make_plan(np.tile(order, (batch, 1)), np.zeros((batch, 4), bool), 4)
  keys = jax.random.split(jax.random.key(0), batch)
  for name in args.model:
    model, params = make_model(name)
    for options in (dict(), dict(temperature=0.7), dict(top_p=0.9)):
      kept = filters.Filters(3, **options)
      in_order, in_any = expected(model, params, order[None], kept)[0], expected(model, params, ORDERS, kept).mean(axis=0)
      arguments = model, params, made, np.zeros((batch, 4), np.int32), keys, kept
      runs = [(f"speculative, window {w}", in_order, lambda w=w: speculative.sample(*arguments, window=w)) for w in (1, 2, 4)]
      runs.append(("burst, 4 checks", in_any, lambda: burst.sample(*arguments, checks=4)))
      for sampler, probabilities, draw in runs:
        out = draw()
        counts = np.bincount(np.ravel_multi_index(out.tokens.T, (3,) * 4), minlength=len(SEQUENCES))
        often = probabilities * batch >= 5
        cells = [np.append(x[often], x[~often].sum()) for x in (counts, probabilities * batch)]
        observed, wanted = (x if cells[1][-1] >= 5 else x[:-1] for x in cells)
        statistic = ((observed - wanted) ** 2 / wanted).sum()
        off = np.abs(counts / batch - probabilities).sum() / 2
        print(f"{name:8} {sampler:24} {str(options):22} chi2 {statistic:10.1f} of {len(wanted) - 1} degrees, p "
              f"{stats.chi2.sf(statistic, len(wanted) - 1):.3g}, total variation {off:.4f}, evaluations "
              f"{out.evaluations_each.mean():.3f} of 4, at most {out.evaluations_each.max()}", flush=True)


if __name__ == "__main__":
  main()
