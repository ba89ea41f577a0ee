"""The encoder: what its logits depend on, what they are never, and the parameters that it shares with the decoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import random_models
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax.training import step as step_lib

TOKENS = np.array([[2, 6, 0, 4, 6], [6, 1, 1, 6, 3]], np.int32)  # 6 is the mask


@pytest.fixture(scope="module", params=["ao", "score_entropy"])
def encoder(request):
  model, params = random_models.make(5, 8, request.param, num_tokens=6)
  return model, params, jax.jit(lambda *args: model.apply({"params": params}, *args))


def test_ids_that_are_no_tokens_are_never_predicted(encoder):
  _, _, apply = encoder
  logits = apply(TOKENS)
  assert logits.shape == (2, 5, 8) and logits.dtype == jnp.float32
  assert np.isneginf(logits[..., 6:]).all() and np.isfinite(logits[..., :6]).all()


def test_every_position_sees_every_token_before_and_after_it(encoder):
  _, _, apply = encoder
  tokens = np.where(TOKENS == 6, 5, TOKENS)
  logits = np.asarray(apply(tokens))[..., :6]
  for position in range(5):
    changed = tokens.copy()
    changed[:, position] = (changed[:, position] + 1) % 6
    assert (np.abs(np.asarray(apply(changed))[..., :6] - logits).max(axis=(0, 2)) > 1e-4).all()


def test_the_logits_asked_for_are_those_of_the_positions(encoder):
  _, _, apply = encoder
  asked = np.array([[4, 1], [0, 0]])
  expected = np.take_along_axis(np.asarray(apply(TOKENS)), asked[..., None], axis=1)
  np.testing.assert_allclose(apply(TOKENS, asked)[..., :6], expected[..., :6], rtol=0, atol=1e-5)


def test_a_text_shorter_than_the_block_is_followed_by_masks(encoder):
  model, _, apply = encoder
  followed = np.pad(TOKENS[:, :3], ((0, 0), (0, 2)), constant_values=model.mask_id)
  np.testing.assert_array_equal(apply(TOKENS[:, :3]), apply(followed)[:, :3])


def test_only_the_model_of_score_entropy_is_told_the_noise_level_which_is_the_share_of_masks_unless_given(encoder):
  model, _, apply = encoder
  level = jnp.array([0.4, 0.4])
  np.testing.assert_allclose(apply(TOKENS, None, level)[..., :6], apply(TOKENS)[..., :6], rtol=0, atol=1e-5)
  effect = np.abs(apply(TOKENS, None, 2 * level)[..., :6] - apply(TOKENS)[..., :6]).max()
  assert effect > 1e-2 if model.tell_noise else effect == 0


def test_layers_that_are_scanned_and_unrolled_are_the_same_function_of_the_same_parameters(encoder):
  model, params, apply = encoder
  unrolled = model.clone(scan_layers=not model.scan_layers, remat="full")
  np.testing.assert_allclose(unrolled.apply({"params": params}, TOKENS)[..., :6], apply(TOKENS)[..., :6], rtol=0, atol=1e-5)


@pytest.mark.parametrize("objective, more", [("ao", 0), ("score_entropy", 2 * (128 * 128 + 128))])
def test_it_has_the_decoders_parameters_but_for_the_start(objective, more):
  config = config_lib.default_config()
  size = lambda: sum(x.size for x in jax.tree.leaves(jax.eval_shape(lambda: step_lib.init_params(build_model(config), 0))))
  decoder = size()
  config.objective, config.model.architecture = objective, "encoder"
  assert size() == decoder - 2 * 768 + more  # the start embedding, and its row of the position table


def test_an_encoder_of_a_tokenizer_in_a_file_needs_the_number_of_its_tokens():
  config = config_lib.default_config()
  config.objective, config.model.architecture, config.data.tokenizer = "ao", "encoder", "mine.tiktoken"
  with pytest.raises(config_lib.ConfigError, match="config.model.num_tokens: is 0; .* = mine.tiktoken"):
    build_model(config)
  config.model.num_tokens = 1000
  assert build_model(config).mask_id == 1000


def test_a_text_that_does_not_fit_is_named(encoder):
  _, _, apply = encoder
  with pytest.raises(ValueError, match="block_size = 5"):
    apply(np.zeros((2, 6), int))
  with pytest.raises(ValueError, match="asked .3, 1. does not fit tokens .2, 5."):
    apply(TOKENS, np.zeros((3, 1), int))
