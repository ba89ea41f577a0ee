"""Checkpoints of the PyTorch code to workdirs and back: the same numbers, the same tensors, the same next steps; nothing else."""

import argparse
import dataclasses
import json
import os
import pickle
import runpy
import sys

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import golden_weights
from aogpt_jax import build_model
from aogpt_jax import config as config_lib
from aogpt_jax import convert
from aogpt_jax import load_model
from aogpt_jax import objectives
from aogpt_jax import sharding
from aogpt_jax.conversion import names
from aogpt_jax.conversion import settings as settings_lib
from aogpt_jax.training import checkpoints
from aogpt_jax.training import step as step_lib

torch = pytest.importorskip("torch", reason="files of the PyTorch code are read by torch: pip install 'aogpt_jax[torch]'")

ALL = (*golden_weights.NAMES, golden_weights.SIGMA_GPT)
FLOAT32 = {"model.dtype": "float32"}
# The rate of the golden steps, that of orders known to both sides, and few rows.
TRAINED = FLOAT32 | {"optimizer.warmup_steps": 3, "optimizer.final_learning_rate": 1e-3, "orders": "left_to_right"}


def golden_file(name):
  return golden_weights.GOLDEN / f"{name}.pt"


def load(path):
  return torch.load(path, weights_only=True)


def assert_same(a, b, path=""):
  """Equal in all that they hold, tensors bit for bit."""
  assert type(a) is type(b), path
  if isinstance(a, dict):
    assert list(a) == list(b), path
    for key in a:
      assert_same(a[key], b[key], f"{path}/{key}")
  elif isinstance(a, (list, tuple)):
    assert len(a) == len(b), path
    for i, (x, y) in enumerate(zip(a, b)):
      assert_same(x, y, f"{path}/{i}")
  elif isinstance(a, torch.Tensor):
    assert a.dtype == b.dtype and torch.equal(a, b), path
  else:
    assert a == b, path


@pytest.fixture(scope="module")
def workdirs(tmp_path_factory):
  """Each golden file as a workdir, with the state of AdamW where it has one."""
  directory = tmp_path_factory.mktemp("converted")
  for name in ALL:
    overrides = FLOAT32 if name == golden_weights.SIGMA_GPT else TRAINED
    convert.from_published(str(golden_file(name)), str(directory / name), with_optimizer=name in golden_weights.NAMES,
                           overrides=overrides)
  return directory


@pytest.mark.parametrize("name", ALL)
def test_a_published_checkpoint_has_the_nll_of_the_pytorch_code(workdirs, name):
  with np.load(golden_weights.GOLDEN / f"{name}.npz") as f:
    arrays = dict(f)
  tokens, orders = (jnp.asarray(arrays[key], jnp.int32) for key in ("tokens", "orders"))
  nll = jax.jit(objectives.any_order_nll, static_argnums=0)
  for weights, expected in (("ema", "ckpt_ema/random_nll"), ("raw", "ckpt_model/random_nll")):
    model, params = load_model(workdirs / name, weights=weights)
    expected = expected if expected in arrays else "random/nll"  # an untrained file has one set of weights, and one name for it
    np.testing.assert_allclose(nll(model, params, tokens, orders), arrays[expected], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name, is_compiled", [("aogpt_a", False), ("sigmagpt_a", True)])
def test_from_pytorch_and_back_all_tensors_are_identical(workdirs, tmp_path, name, is_compiled):
  original = load(golden_file(name))
  has_optimizer = "optimizer" in original
  convert.to_torch(str(workdirs / name), str(tmp_path / "back.pt"), with_optimizer=has_optimizer, is_compiled=is_compiled)
  back = load(tmp_path / "back.pt")
  assert list(back["model"]) == ["_orig_mod." * is_compiled + key for key in original["model"]]
  assert_same(dict(original["model"]), {key.removeprefix("_orig_mod."): x for key, x in back["model"].items()})
  assert_same(original["ema_model"]["shadow_params"], back["ema_model"]["shadow_params"])
  assert {*original} == {*back} and original["ema_rate"] == back["ema_rate"] == back["ema_model"]["decay"]
  assert original["model_args"] == back["model_args"] and original["iter_num"] == back["iter_num"]
  if has_optimizer:
    for a, b in zip(original["optimizer"]["param_groups"], back["optimizer"]["param_groups"]):
      assert b["lr"] == pytest.approx(a.pop("lr"))
      del b["lr"]
    assert_same(original["optimizer"], back["optimizer"])
  if is_compiled:
    again = convert.from_published(str(tmp_path / "back.pt"), str(tmp_path / "again"))
    assert again.fingerprint == convert._origin(workdirs / name).fingerprint


class PyTorchRun:
  """AdamW and moving average of the PyTorch code from the states of a file; gradients are those of this project's model."""

  def __init__(self, checkpoint, config):
    self.config, self.order = config, [p.name for p in names.parameters(config.model)]
    self.parameters = {name: torch.nn.Parameter(checkpoint["model"][name].clone()) for name in self.order}
    self.ema = dict(zip(self.order, (x.clone() for x in checkpoint["ema_model"]["shadow_params"])))
    self.updates = checkpoint["ema_model"]["num_updates"]
    groups = [[p for p in self.parameters.values() if (p.dim() >= 2) == decays] for decays in (True, False)]
    self.optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in zip(groups, (0.05, 0.0))], lr=1.0, betas=(0.9, 0.95))
    self.optimizer.load_state_dict(checkpoint["optimizer"])

  def tree(self, tensors):
    return names.to_tree(self.config.model, lambda name: tensors[name].detach().numpy())

  def step(self, gradient):
    grads = names.to_state(self.config.model, gradient(self.tree(self.parameters)))
    for name, parameter in self.parameters.items():
      parameter.grad = torch.from_numpy(grads[name].copy())
    torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
    for group in self.optimizer.param_groups:
      group["lr"] = 1e-3
    self.optimizer.step()
    self.updates += 1
    decay = min(0.9999, (1 + self.updates) / (10 + self.updates))
    for name, average in self.ema.items():
      average.sub_((1 - decay) * (average - self.parameters[name].detach()))


def assert_close(ours, theirs):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 + 1e-5 * np.abs(b).max()), ours, theirs)


def test_the_next_steps_are_those_of_the_pytorch_optimiser_here_and_there(workdirs, tmp_path):
  arrays, _ = golden_weights.load("aogpt_a")
  config, state = checkpoints.load_state(workdirs / "aogpt_a", with_optimizer=True)
  config.batch_size = len(arrays["tokens"])
  tokens = jnp.asarray(arrays["tokens"], jnp.int32)
  orders = jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1))
  model = build_model(config)
  gradient = jax.jit(jax.grad(lambda params: objectives.any_order_nll(model, params, tokens, orders).mean()))
  golden = load(golden_file("aogpt_a"))
  theirs = PyTorchRun(golden, config)
  # The file is what the six golden steps led to.
  assert_close(state.params, golden_weights.to_tree(arrays, config, "train/params/"))
  assert_close(state.ema, golden_weights.to_tree(arrays, config, "train/ema/"))
  trainer = step_lib.make_trainer(config, model, sharding.make_mesh(config))
  ours = checkpoints.Checkpoints(workdirs / "aogpt_a", config)
  # As main goes on, batch_size aside: that is not in the file.
  ours._config = checkpoints.load_state(workdirs / "aogpt_a")[0]
  state = ours.restore(trainer.shapes)
  ours.close()
  before = jax.tree.map(np.asarray, state.params)
  for _ in range(3):
    state, metrics = trainer.step(state, tokens)
    theirs.step(gradient)
    assert_close(state.params, theirs.tree(theirs.parameters))
    assert_close(state.ema, theirs.tree(theirs.ema))
    np.testing.assert_allclose(metrics["learning_rate"], 1e-3, rtol=1e-6)
  assert max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(state.params))) > 1e-3
  # And there, from what was trained here.
  saver = checkpoints.Checkpoints(tmp_path / "here", config)
  saver.save(state)
  saver.wait()
  saver.close()
  convert.to_torch(str(tmp_path / "here"), str(tmp_path / "there.pt"), with_optimizer=True)
  theirs = PyTorchRun(load(tmp_path / "there.pt"), config)
  assert theirs.updates == 9
  for _ in range(2):
    state, _ = trainer.step(state, tokens)
    theirs.step(gradient)
  assert_close(state.params, theirs.tree(theirs.parameters))
  assert_close(state.ema, theirs.tree(theirs.ema))


def test_training_does_not_go_on_without_the_state_of_its_optimiser(workdirs):
  config, _ = checkpoints.load_state(workdirs / "sigmagpt_a")
  saver = checkpoints.Checkpoints(workdirs / "sigmagpt_a", config)
  with pytest.raises(config_lib.ConfigError, match="converted without the state of its optimizer; convert it again"):
    saver.restore(None)
  saver.close()
  with pytest.raises(config_lib.ConfigError, match="converted without the state of its optimizer"):
    convert.to_torch(str(workdirs / "sigmagpt_a"), str(workdirs / "back.pt"), with_optimizer=True)
  assert not list(workdirs.glob("back*"))


@pytest.mark.parametrize("name", ALL)
def test_the_config_file_beside_a_checkpoint_opens_it(workdirs, name):
  config = runpy.run_path(str(workdirs / name / "config.py"))["get_config"]()
  inside, _ = checkpoints.load_state(workdirs / name)
  assert config_lib.flat(config) == config_lib.flat(inside)
  _, step = checkpoints.load_params(workdirs / name, config, sharding.make_mesh(config))
  assert step == load(golden_file(name))["iter_num"]


class Harmful:
  """Writes a file when it is unpickled."""

  def __init__(self, path):
    self.path = path

  def __reduce__(self):
    return os.system, (f"touch {self.path}",)


def changed(checkpoint, path, value):
  """The same with another value at a path such as "model/lm_head.bias"; None takes it away."""
  first, _, rest = path.partition("/")
  checkpoint = list(checkpoint) if isinstance(checkpoint, list) else dict(checkpoint)
  first = int(first) if isinstance(checkpoint, list) or first.isdigit() else first
  if rest:
    checkpoint[first] = changed(checkpoint[first], rest, value)
  elif value is None:
    del checkpoint[first]
  else:
    checkpoint[first] = value
  return checkpoint


@pytest.mark.parametrize("path, value, expected", [
    ("model/transformer.h.1.ln_2.weight", None, "transformer.h.1.ln_2.weight is missing"),
    ("model/transformer.h.1.ln_3.weight", torch.ones(32), "transformer.h.1.ln_3.weight is unexpected"),
    ("model/transformer.h.0.attn.c_attn.weight", torch.ones(32, 96), r"is of shape \(32, 96\) where model_args want \(96, 32\)"),
    ("model/transformer.wte.weight", torch.ones(61, 33), r"transformer.wte.weight is of shape \(61, 33\)"),
    ("model/lm_head.bias", torch.ones(61, dtype=torch.float16), "lm_head.bias is of type float16 beside others of float32"),
    ("model/lm_head.bias", "weights", "lm_head.bias is of type str; it must be a dense tensor"),
    ("model/_orig_mod.lm_head.bias", torch.ones(61), "model has both lm_head.bias and _orig_mod.lm_head.bias"),
    ("model", None, "has no 'model'"),
    ("model", {1: torch.ones(1)}, "'model' is of type dict; it must be a dict with strings for keys"),
    ("model_args", None, "has no 'model_args'"),
    ("model_args/n_layer", 3, "n_layer is 3, and its weights are of a model with n_layer = 2"),
    ("model_args/n_layer", 10**12, "n_layer is 1000000000000, and its weights are of a model with n_layer = 2"),
    ("model_args/n_head", 4, "n_head is 4, and its weights are of a model with n_head = 2"),
    ("model_args/n_embd", 64, "n_embd is 64, and its weights are of a model with n_embd = 32"),
    ("model_args/block_size", 17, "block_size is 17, and its weights are of a model with block_size = 16"),
    ("model_args/vocab_size", 64, "vocab_size is 64, and its weights are of a model with vocab_size = 61"),
    ("model_args/bias", False, "bias is False, and its weights are of a model with bias = True"),
    ("model_args/n_head", "2", "n_head is '2'; it must be a number"),
    ("iter_num", "6", "iter_num is '6'; it must be the number of updates done"),
    ("ema_model", None, "has no ema_model.* --weights=raw"),
    ("ema_model/shadow_params/36", None, "ema_model has 36 shadow_params where the model has 37 parameters"),
    ("ema_model/shadow_params/4", torch.ones(33), r"shadow_params\[4\] is of shape \(33,\) where transformer.h.0.ln_1.weight is of"),
    ("optimizer", None, "has no optimizer; leave out --optimizer"),
    ("optimizer/state/0/step", torch.tensor(5.0), "its parameters are not all at one step"),
    ("optimizer/state/3", None, "optimizer has states of 36 parameters where the model has 37"),
    ("optimizer/state/2/exp_avg", torch.ones(3), "exp_avg of transformer.wtpe.weight is float32 \\(3,\\) where the parameter"),
    ("optimizer/state/2/max_exp_avg_sq", torch.ones(3), "the state of transformer.wtpe.weight is not step, exp_avg and exp_avg_sq"),
    ("optimizer/param_groups/0/params", [0], "a group of its parameters is not the 16"),
    ("optimizer/param_groups/1/weight_decay", 0.1, "the second does not decay"),
    ("optimizer/param_groups/0/amsgrad", True, "amsgrad is True and False in its two param_groups"),
    ("config/learning_rate", "high", "learning_rate is 'high'; it must be a number"),
    ("config/warmup_iters", 10**6, "no recipe that can be gone on with: config.optimizer.warmup_steps: 1000000"),
    ("config/grad_clip", 0.0, "grad_clip is 0, and training here clips always"),
])
def test_what_does_not_hold_together_is_one_line_and_writes_nothing(tmp_path, path, value, expected):
  torch.save(changed(load(golden_file("aogpt_a")), path, value), tmp_path / "ckpt.pt")
  with pytest.raises(ValueError, match=expected) as error:
    convert.from_published(str(tmp_path / "ckpt.pt"), str(tmp_path / "out"), with_optimizer=True)
  assert str(tmp_path / "ckpt.pt") in str(error.value) and "\n" not in str(error.value)
  assert os.listdir(tmp_path) == ["ckpt.pt"]


def test_a_head_of_its_own_is_no_sigma_gpt(tmp_path):
  torch.save(changed(load(golden_file("sigmagpt_a")), "model/lm_head.weight", torch.ones(61, 32)), tmp_path / "ckpt.pt")
  with pytest.raises(ValueError, match="lm_head.weight is not the token table"):
    convert.from_published(str(tmp_path / "ckpt.pt"), str(tmp_path / "out"))


@pytest.mark.parametrize("make, expected", [
    (lambda path, mark: torch.save({"config": Harmful(mark)}, path), "holds posix.system, which is no data .* nothing of it was run"),
    (lambda path, mark: torch.save({"config": argparse.Namespace(lr=1)}, path), "holds argparse.Namespace, which is no data"),
    (lambda path, mark: path.write_bytes(pickle.dumps(Harmful(mark))), "is not a file that torch.save wrote"),
    (lambda path, mark: torch.save({"model": Harmful(mark)}, path, _use_new_zipfile_serialization=False), "is not a file that"),
    (lambda path, mark: path.write_bytes(golden_file("aogpt_a").read_bytes()[:-1000]), "is damaged or cut off"),
    (lambda path, mark: path.write_bytes(b""), "is not a file that torch.save wrote"),
    (lambda path, mark: torch.save([1, 2], path), "holds a list; it must be a dict"),
    (lambda path, mark: path.mkdir(), "config.json: can't be read"),
    (lambda path, mark: None, "there is no such file"),
])
def test_nothing_that_a_file_holds_is_run(tmp_path, make, expected):
  path, mark = tmp_path / "ckpt.pt", tmp_path / "mark"
  make(path, mark)
  with pytest.raises((ValueError, OSError), match=expected) as error:
    convert.from_published(str(path), str(tmp_path / "out"))
  assert "\n" not in str(error.value) and {*os.listdir(tmp_path)} <= {"ckpt.pt"}


def test_the_harmful_file_of_these_tests_does_harm_where_it_is_trusted(tmp_path):
  torch.save({"config": Harmful(tmp_path / "mark")}, tmp_path / "ckpt.pt")
  torch.load(tmp_path / "ckpt.pt", weights_only=False)
  assert (tmp_path / "mark").exists()


def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch):
  def interrupt(*_):
    assert os.listdir(tmp_path)
    raise KeyboardInterrupt

  monkeypatch.setattr(convert.fingerprint, "describe", interrupt)
  with pytest.raises(KeyboardInterrupt):
    convert.from_published(str(golden_file("sigmagpt_a")), str(tmp_path / "out"))
  assert not os.listdir(tmp_path)


def test_a_safetensors_directory_has_the_same_weights_and_says_where_they_are_from(workdirs, tmp_path):
  safetensors = pytest.importorskip("safetensors.torch", reason="weights in its format: pip install 'aogpt_jax[hf]'")
  step = 6
  likelihood = {"nats_per_token": 4.25, "perplexity": 70.1, "bits_per_byte": None, "stderr_sequences": 0.1}
  record = {"step": step, "split": "test", "source": "files:texts", "weights": "ema", "left_to_right": likelihood}
  (workdirs / "aogpt_a" / "eval_test.json").write_text(json.dumps(record))
  (workdirs / "aogpt_a" / "eval_other.json").write_text(json.dumps(record | {"step": 5, "split": "other"}))
  score = likelihood | {"model": "aogpt_a", "weights": "ema", "order": "any_order", "contexts": 8, "dataset": "PTB", "recipe_hash": "ab"}
  scores = [score, score | {"model": "gpt2", "dataset": "other"}, score | {"weights": "raw", "dataset": "other"}]
  (workdirs / "aogpt_a" / "zero_shot.json").write_text(json.dumps({"step": step, "scores": scores}))
  said = convert.to_safetensors(str(workdirs / "aogpt_a"), str(tmp_path / "model"))
  original = load(golden_file("aogpt_a"))
  tensors = safetensors.load_file(tmp_path / "model" / "model.safetensors")
  shadow = dict(zip(original["model"], original["ema_model"]["shadow_params"]))
  assert_same(shadow, {name: tensors[name] for name in shadow})
  assert {*tensors} == {*shadow}
  card = (tmp_path / "model" / "README.md").read_text(encoding="utf-8")
  for line in ("converted from `aogpt_a.pt`", "ema: the moving average", "6 updates", f"| Fingerprint | {said}",
               "| PTB (recipe ab) | any order, 8 contexts | 4.2500 | 70.10 |  |", "| files:texts, test | left to right | 4.2500 | 70.10 |  |"):
    assert line in card
  assert "other" not in card.split("## Evaluation")[1]
  origin = convert.from_published(str(tmp_path / "model"), str(tmp_path / "back"))
  assert origin.fingerprint == said and origin.weights == ("ema",)
  for weights in ("ema", "raw"):  # there is one
    _, params = load_model(tmp_path / "back", weights=weights)
    state = names.to_state(checkpoints.load_state(tmp_path / "back")[0].model, params)
    assert all(np.array_equal(state[name], shadow[name]) for name in shadow)
  with pytest.raises(ValueError, match="it has the ema weights alone; give --weights=ema"):
    convert.to_safetensors(str(tmp_path / "back"), str(tmp_path / "raw"), weights="raw")
  (tmp_path / "model" / "config.json").write_text(
      json.dumps(json.loads((tmp_path / "model" / "config.json").read_text()) | {"n_layer": 3}))
  with pytest.raises(ValueError, match="n_layer is 3, and its weights are of a model with n_layer = 2"):
    convert.from_published(str(tmp_path / "model"), str(tmp_path / "wrong"))


def test_bfloat16_weights_stay_as_they_are(tmp_path):
  checkpoint = load(golden_file("sigmagpt_a"))
  half = {name: x.bfloat16() for name, x in checkpoint["model"].items()}
  torch.save(checkpoint | {"model": half}, tmp_path / "ckpt.pt")
  with pytest.raises(ValueError, match="shadow_params of transformer.wte.weight is of type float32 beside others of bfloat16"):
    convert.from_published(str(tmp_path / "ckpt.pt"), str(tmp_path / "run"))
  convert.from_published(str(tmp_path / "ckpt.pt"), str(tmp_path / "run"), weights="raw")
  convert.to_torch(str(tmp_path / "run"), str(tmp_path / "back.pt"))
  assert_same(half, load(tmp_path / "back.pt")["model"])


@pytest.mark.parametrize("kind, bias", [("AO-GPT", True), ("sigma-GPT", True), ("sigma-GPT", False)])
def test_each_parameter_of_a_model_is_one_of_the_pytorch_code(kind, bias):
  config = config_lib.default_config()
  config.model.update(layers=2, width=8, heads=2, block_size=4, vocab_size=10, **names.KINDS[kind] | {"bias": bias})
  shapes = nn.unbox(jax.eval_shape(lambda: step_lib.init_params(build_model(config), 0)))
  tree = names.to_tree(config.model, {p.name: np.zeros(p.shape, np.float32) for p in names.parameters(config.model)}.__getitem__)
  assert jax.tree.map(lambda x: x.shape, tree) == jax.tree.map(lambda x: x.shape, shapes)


@pytest.mark.parametrize("model_args, published, expected", [
    (dict(n_layer=24, n_embd=1024, n_head=16), {}, {
        "model.layers": 24, "optimizer.learning_rate": 3e-4, "steps": 460_000, "orders": "mix(0.1)", "batch_size": 1024}),
    (dict(n_layer=12, n_embd=768, n_head=12), dict(
        learning_rate=1e-3, min_lr=1e-4, weight_decay=0.03, batch_size=16, gradient_accumulation_steps=64, max_iters=500_000,
        train_mode="Random_CL", random_ratio=0.9, warmup_iters=100, lr_decay_iters=5e5, ema_rate=1 - 1e-4, out_dir="out"), {
            "optimizer.learning_rate": 1e-3, "optimizer.final_learning_rate": 1e-4, "optimizer.weight_decay": 0.03,
            "batch_size": 1024, "steps": 500_000, "orders": "mix(0.1)", "optimizer.warmup_steps": 100,
            "optimizer.decay_steps": 500_000, "optimizer.ema_decay": 0.9999}),
    (dict(n_layer=2, n_embd=768, n_head=12), dict(decay_lr=False, train_mode="AR"), {
        "optimizer.final_learning_rate": 6e-4, "optimizer.warmup_steps": 0, "orders": "left_to_right"}),
])
def test_a_config_is_what_the_file_says_and_else_the_released_recipe(model_args, published, expected):
  model_args = dict(block_size=1024, vocab_size=50304, bias=True) | model_args
  config = settings_lib.to_config("AO-GPT", model_args, published, step=10)
  flat = config_lib.flat(config)
  assert {path: flat[path] for path in expected} == expected
  kind, back_args, back = settings_lib.from_config(config)
  assert kind == "AO-GPT" and {name: back_args[name] for name in model_args} == model_args
  assert config_lib.flat(settings_lib.to_config(kind, back_args, back, 10)) == flat


@pytest.mark.parametrize("fields, expected", [
    (dict(architecture="encoder"), "architecture = encoder: the PyTorch code has no such model"),
    (dict(target="layer_shared"), "target = layer_shared: the PyTorch code has no such model"),
    (dict(qk_norm=False, cond_width=64), "no such AO-GPT: qk_norm = False where it has True, cond_width = 64 where it has 128"),
])
def test_a_model_that_the_pytorch_code_does_not_have_is_refused(fields, expected):
  config = config_lib.default_config()
  config.model.update(fields)
  with pytest.raises(ValueError, match=expected):
    settings_lib.from_config(config)


@pytest.mark.parametrize("arguments, expected", [
    ([], "give what to read and what to write"),
    (["--torch_checkpoint=a.pt"], "give what to read and what to write"),
    (["--checkpoint=a", "--torch_output=b.pt", "--weights=raw"], "--weights: has no effect with --checkpoint and --torch_output"),
    (["--safetensors=a", "--output=b", "--optimizer"], "--optimizer: has no effect with --output and --safetensors"),
    (["--torch_checkpoint=a.pt", "--output=b", "--weights=best"], "best"),
    (["--torch_checkpoint=a.pt", "--output=b", "--config.model.with=3"], "did you mean config.model.width"),
    (["--torch_checkpoint=a.pt", "--output=."], "--output=.: is there already; give another path"),
    (["--checkpoint=a", "--torch_output=b.pt"], "there is no checkpoint"),
    (["--torch_checkpoint=hf:me", "--output=b"], "hf:me: is no name on the Hugging Face hub"),
    (["--torch_checkpoint=FILE", "--output=b", "--config.model.layers=3"], "config.model.layers: is 2 by the weights"),
])
def test_a_mistake_on_the_command_line_is_one_line(tmp_path, monkeypatch, arguments, expected):
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as stopped:
    convert.main(["convert", *(a.replace("FILE", str(golden_file("aogpt_a"))) for a in arguments)])
  assert stopped.value.code.startswith("error: ") and expected in stopped.value.code and "\n" not in stopped.value.code
  assert not os.listdir(tmp_path)


def test_a_name_on_the_hub_without_a_network_is_one_line(tmp_path, monkeypatch):
  constants = pytest.importorskip("huggingface_hub.constants", reason="names are those of its hub: pip install 'aogpt_jax[hf]'")
  monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
  monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
  for source in ("hf:me/model/350M/ckpt.pt", "hf:me/model"):
    with pytest.raises(ConnectionError, match=f"{source}: can't be downloaded .* give its path") as error:
      convert.from_published(source, str(tmp_path / "out"))
    assert "\n" not in str(error.value)


def test_a_library_that_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "torch", None)
  with pytest.raises(ImportError, match=r"torch, which is not installed; pip install 'aogpt_jax\[torch\]'"):
    convert.from_published(str(golden_file("aogpt_a")), str(tmp_path / "out"))


def test_the_fingerprint_tells_weights_apart(workdirs):
  origins = [convert._origin(workdirs / name) for name in ALL]
  assert len({origin.fingerprint for origin in origins}) == len(ALL)
  assert dataclasses.asdict(origins[0])["source"] == "aogpt_a.pt"
