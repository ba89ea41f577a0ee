"""The simple sampler: exact distribution, any order, nothing impossible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden_weights
from aogpt_jax import build_model
from aogpt_jax.sampling import generate


@pytest.fixture(scope="module")
def golden():
  arrays, config = golden_weights.load("aogpt_a")
  return arrays, build_model(config), jax.tree.map(jnp.asarray, golden_weights.to_tree(arrays, config))


def test_temperature_0_takes_the_most_probable_token_given_all_before_it(golden):
  arrays, model, params = golden
  orders = jnp.asarray(arrays["orders"], jnp.int32)
  tokens = generate.generate(model, params, jax.random.key(0), orders, temperature=0.0, vocab_size=61)
  logits = model.apply({"params": params}, tokens, orders)  # one pass over the result, without a cache
  np.testing.assert_array_equal(jnp.take_along_axis(tokens, orders, axis=1), logits.argmax(-1))


def test_drawn_tokens_have_the_probabilities_of_the_model(golden):
  _, model, params = golden
  batch, vocab_size = 4000, 5  # three tokens of five: 125 sequences, whose probabilities are enumerated
  order = jnp.asarray([2, 0, 1], jnp.int32)
  tokens = generate.generate(model, params, jax.random.key(1), jnp.tile(order, (batch, 1)), temperature=0.7,
                             vocab_size=vocab_size)
  every = jnp.stack(jnp.meshgrid(*[jnp.arange(vocab_size)] * 3, indexing="ij"), -1).reshape(-1, 3)
  orders = jnp.tile(order, (len(every), 1))
  logits = model.apply({"params": params}, every, orders)[..., :vocab_size] / 0.7
  chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.take_along_axis(every, orders, 1)[..., None], -1)
  probabilities = np.exp(chosen[..., 0].sum(1))
  np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-5)
  counts = np.bincount(np.ravel_multi_index(np.asarray(tokens).T, (vocab_size,) * 3), minlength=vocab_size**3)
  chi2 = ((counts - batch * probabilities) ** 2 / (batch * probabilities)).sum()
  # 124 degrees of freedom: mean 124, standard deviation 15.7.
  assert chi2 < 124 + 4 * 15.7


def test_padding_ids_are_never_drawn_even_if_the_model_prefers_them(golden):
  _, model, params = golden
  params = params | {"head": params["head"] | {"bias": params["head"]["bias"].at[50:].set(100.0)}}
  orders = jnp.tile(jnp.arange(16, dtype=jnp.int32), (8, 1))
  tokens = generate.generate(model, params, jax.random.key(2), orders, temperature=5.0, vocab_size=50)
  assert tokens.max() < 50 and tokens.min() >= 0
