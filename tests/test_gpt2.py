"""GPT-2: the logits of the reference implementation from its files, and one clear line for files that are not of this network."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aogpt_jax.models import gpt2
import random_gpt2

safetensors = pytest.importorskip("safetensors.numpy", reason="weights are in safetensors: pip install 'aogpt_jax[hf]'")


def logits(loaded, tokens):
  model, params = loaded
  return np.asarray(model.apply({"params": params}, jnp.asarray(tokens)))


@pytest.mark.parametrize("epsilon", [1e-5, 1e-1])
def test_logits_are_those_of_the_reference_from_its_own_files(tmp_path, epsilon):
  theirs = random_gpt2.reference(tmp_path, layer_norm_epsilon=epsilon)
  import torch

  tokens = np.random.default_rng(0).integers(67, size=(3, 16))
  with torch.no_grad():
    expected = theirs(torch.asarray(tokens)).logits.numpy()
  assert np.std(expected) > 1  # a tolerance of 2e-4 means something
  np.testing.assert_allclose(logits(gpt2.load(str(tmp_path)), tokens), expected, atol=2e-4)


def test_files_with_and_without_the_prefix_in_several_parts_with_buffers_and_a_tied_head_are_one_model(tmp_path):
  tensors = random_gpt2.tensors()
  plain = gpt2.load(random_gpt2.write(tmp_path / "plain", tensors))
  buffers = {f"h.{layer}.attn.{name}": np.ones((1, 1, 8, 8), bool) for layer in (0, 1) for name in ("bias", "masked_bias")}
  named = {f"transformer.{name}": x for name, x in (tensors | buffers).items()} | {"lm_head.weight": tensors["wte.weight"]}
  directory = random_gpt2.write(tmp_path / "parts", dict(list(named.items())[::2]))
  safetensors.save_file(dict(list(named.items())[1::2]), tmp_path / "parts" / "more.safetensors")
  tokens = np.arange(8)[None]
  np.testing.assert_array_equal(logits(plain, tokens), logits(gpt2.load(directory), tokens))
  assert gpt2.fingerprint(*plain) == gpt2.fingerprint(*gpt2.load(directory))


def test_a_fingerprint_is_of_the_weights(tmp_path):
  tensors = random_gpt2.tensors()
  before = gpt2.fingerprint(*gpt2.load(random_gpt2.write(tmp_path, tensors)))
  tensors["h.1.mlp.c_proj.bias"][3] += 1e-3
  assert gpt2.fingerprint(*gpt2.load(random_gpt2.write(tmp_path, tensors))) != before


def test_half_precision_files_are_widened(tmp_path):
  tensors = {name: x.astype(jnp.bfloat16) for name, x in random_gpt2.tensors().items()}
  widened = {name: x.astype(np.float32) for name, x in tensors.items()}
  loaded = [gpt2.load(random_gpt2.write(tmp_path / str(i), t)) for i, t in enumerate((tensors, widened))]
  assert gpt2.fingerprint(*loaded[0]) == gpt2.fingerprint(*loaded[1])


def test_bfloat16_matmuls_round_and_give_float32_logits(tmp_path):
  directory, tokens = random_gpt2.write(tmp_path), np.arange(8)[None]
  exact, rounded = (logits(gpt2.load(directory, dtype), tokens) for dtype in ("float32", "bfloat16"))
  assert rounded.dtype == np.float32 and 1e-4 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


def test_more_tokens_than_the_window_are_refused(tmp_path):
  model, params = gpt2.load(random_gpt2.write(tmp_path))
  with pytest.raises(ValueError, match="9 tokens do not fit the model's block_size = 8"):
    model.apply({"params": params}, jnp.zeros((1, 9), int))


@pytest.mark.parametrize("fields, expected", [
    (dict(activation_function="gelu"), "activation_function is 'gelu'; this GPT-2 has 'gelu_new' alone"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    (dict(model_type="gpt_neo"), "model_type is 'gpt_neo'"),
    (dict(n_inner=16), "n_inner is 16; this GPT-2 has 4 \\* n_embd = 32"),
    (dict(n_head=3), "n_head = 3 does not divide n_embd = 8"),
    (dict(n_layer=None), "n_layer is None; it must be a number"),
    (dict(n_layer=3), r"h\.2\.\S+ is missing.* and 8 more"),
    (dict(n_layer=1), r"h\.1\.\S+ is unexpected.* and 8 more"),
    (dict(n_positions=9), r"wpe.weight is of shape \(8, 8\) where config.json wants \(9, 8\)"),
])
def test_a_config_of_another_network_is_refused(tmp_path, fields, expected):
  with pytest.raises(ValueError, match=expected) as error:
    gpt2.load(random_gpt2.write(tmp_path, random_gpt2.tensors(), **fields))
  assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def changed(tensors, **changes):
  return {name: x for name, x in (tensors | changes).items() if x is not None}


@pytest.mark.parametrize("changes, expected", [
    ({"ln_f.bias": None}, "ln_f.bias is missing"),
    ({"h.0.attn.c_proj.weight": np.zeros((8, 9), np.float32)}, r"h.0.attn.c_proj.weight is of shape \(8, 9\)"),
    ({"score.weight": np.zeros(2, np.float32)}, "score.weight is unexpected"),
    ({"lm_head.weight": np.zeros((320, 8), np.float32)}, "lm_head.weight is not the token table"),
])
def test_tensors_of_another_network_are_refused(tmp_path, changes, expected):
  directory = random_gpt2.write(tmp_path, changed(random_gpt2.tensors(), **changes))
  with pytest.raises(ValueError, match=expected):
    gpt2.load(directory)


@pytest.mark.parametrize("spoil, expected", [
    (lambda d: (d / "model.safetensors").write_bytes(b"version https://git-lfs.github.com"), "is not a safetensors file"),
    (lambda d: (d / "model.safetensors").unlink(), r"has no \*.safetensors"),
    (lambda d: (d / "config.json").unlink(), "config.json: can't be read"),
    (lambda d: (d / "config.json").write_text("{"), "config.json: is not JSON"),
    (lambda d: (d / "more.safetensors").write_bytes((d / "model.safetensors").read_bytes()), "which another file of the dire"),
])
def test_damaged_directories_are_one_clear_line(tmp_path, spoil, expected):
  directory = random_gpt2.write(tmp_path)
  spoil(tmp_path)
  with pytest.raises((ValueError, OSError), match=expected) as error:
    gpt2.load(directory)
  assert "\n" not in str(error.value)


def test_a_path_that_is_not_there_is_no_name_on_the_hub():
  with pytest.raises(FileNotFoundError, match="there is no such directory"):
    gpt2.load("some/where/gpt2")


def test_a_name_without_a_network_is_one_clear_line(tmp_path, monkeypatch):
  hub = pytest.importorskip("huggingface_hub", reason="names are those of its hub: pip install 'aogpt_jax[hf]'")
  monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
  with pytest.raises(ConnectionError, match="gpt2-large: is no directory, and can't be .* give the directory") as error:
    gpt2.load("gpt2-large")
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("module, expected", [
    ("huggingface_hub", "huggingface_hub, which would download it, is not installed; pip install"),
    ("safetensors", "kept by safetensors, which is not installed; pip install")])
def test_a_library_that_is_not_installed_is_named_with_the_command(monkeypatch, module, expected):
  monkeypatch.setitem(sys.modules, module, None)
  with pytest.raises(ImportError, match=expected):
    gpt2.load("gpt2-large")


def test_the_released_sizes_have_their_numbers_of_parameters():
  for layers, width, heads, expected in ((12, 768, 12, 124_439_808), (36, 1280, 20, 774_030_080)):
    model = gpt2.GPT2(layers, width, heads, block_size=1024, vocab_size=50257)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), int))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == expected
