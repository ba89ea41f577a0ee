"""The config: what is wrong is said in one line each, it survives JSON, and every file in configs/ is right."""

import importlib.util
import json
import math
import pathlib
import re

from ml_collections import config_dict
import pytest

import golden_weights
from aogpt_jax import config as config_lib
from aogpt_jax import models
from aogpt_jax import objectives

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "configs").glob("*.py"))
ABSURD_BUT_ALLOWED = {"model.gate_init"}  # a bias may be any number
ENCODER = {"model.architecture": "encoder", "objective": "ao"}
EXAMPLES = {"data.prompt_field": "q", "data.source": "files:a.jsonl"}
INFINITE_BUT_ALLOWED = {"optimizer.clip_norm"}  # no clipping


def flat(config, prefix=""):
  for name, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      yield from flat(value, f"{prefix}{name}.")
    else:
      yield prefix + name, value


def fields_of(*types):
  return [name for name, value in flat(config_lib.default_config()) if type(value) in types]


def changed(changes):
  """The default config with fields set to anything, as a config file could."""
  config = config_lib.default_config()
  for field, value in changes.items():
    *groups, name = field.split(".")
    group = config
    for part in groups:
      group = group[part]
    with group.ignore_type():
      group[name] = value
  return config


def problems(changes):
  """The lines that `check` raises."""
  with pytest.raises(config_lib.ConfigError) as error:
    config_lib.check(changed(changes))
  return str(error.value).split("\n")


def test_the_default_config_passes():
  config_lib.check(config_lib.default_config())


@pytest.mark.parametrize("misspelt, right", [
    ("stesp", "steps"),
    ("batchsize", "batch_size"),
    ("model.widht", "model.width"),
    ("optimizer.lerning_rate", "optimizer.learning_rate"),
    ("eval.every_step", "eval.every_steps"),
    ("modle", "model"),
])
def test_a_misspelt_field_is_answered_by_the_right_one(misspelt, right):
  line, = problems({misspelt: 1})
  assert line.startswith(f"config.{misspelt}: ") and f"did you mean config.{right}?" in line


def test_a_missing_field_is_named():
  config = config_lib.default_config()
  del config.optimizer["beta2"]
  with pytest.raises(config_lib.ConfigError, match=r"^config\.optimizer\.beta2: is missing; .*$"):
    config_lib.check(config)


@pytest.mark.parametrize("field, value, wanted", [
    ("steps", 1e5, "int"),
    ("steps", "many", "int"),
    ("batch_size", True, "int"),
    ("model.remat", True, "str"),
    ("model.dtype", 16, "str"),
    ("optimizer.learning_rate", "6e-4", "float"),
    ("sample.orders", "uniform", "tuple"),
    ("data.source", None, "str"),
    ("model", 3, "layers"),
])
def test_a_wrong_type_is_named_with_the_right_one(field, value, wanted):
  line, = problems({field: value})
  assert line.startswith(f"config.{field}: ") and repr(value) in line and wanted in line


def test_a_whole_number_is_taken_for_a_fraction():
  config_lib.check(changed({"optimizer.learning_rate": 1, "sample.temperature": 0}))


@pytest.mark.parametrize("field", sorted(set(fields_of(int, float)) - ABSURD_BUT_ALLOWED))
def test_a_negative_number_is_refused_in_every_numeric_field(field):
  negative = type(dict(flat(config_lib.default_config()))[field])(-7)
  assert any(line.startswith(f"config.{field}: ") and "-7" in line for line in problems({field: negative}))


@pytest.mark.parametrize("field", fields_of(float))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_finite_number_is_refused_in_every_fractional_field(field, value):
  if value == math.inf and field in INFINITE_BUT_ALLOWED:
    config_lib.check(changed({field: value}))
  else:
    assert any(line.startswith(f"config.{field}: ") for line in problems({field: value}))


@pytest.mark.parametrize("field, value, fix", [
    ("batch_size", 0, "at least 1"),
    ("optimizer.clip_norm", 0.0, "above 0"),
    ("optimizer.beta2", 1.0, "below 1"),
    ("optimizer.ema_decay", 1.0, "below 1"),
    ("seed", 2**32, r"below 2\*\*32"),
    ("mesh.data", 0, "at least 1"),
    ("mesh.fsdp", 0, "at least 1"),
    ("mesh.preset", "zero", "dp, fsdp, tp, fsdp_tp"),
    ("model.dtype", "float16", "float32, bfloat16"),
    ("model.remat", "all", "none, dots, full"),
    ("model.target", "adalm", "adaln, input, layer_shared, layer_distinct"),
    ("model.architecture", "encodr", "decoder, encoder"),
    ("model.norm", "group", "rms, layer"),
    ("model.weight_init", "uniform", "truncated_normal, normal"),
    ("model.activation", "relu", "gelu, gelu_tanh"),
    ("init_weights", "both", "ema, raw"),
    ("init_optimizer", "keep", "reset, kept"),
    ("objective", "elbo", "any_order, context_average, ao, lambda_dce, score_entropy"),
    ("eval.split", "valid", "train, validation, test"),
    ("eval.ensemble", 0, "at least 1"),
    ("eval.gap", 1, "0 \\(no gap\\) or at least 2"),
    ("eval.distributions", (), "at least one"),
    ("sample.num_samples", 0, "at least 1"),
    ("sample.contexts", 0, "at least 1"),
    ("sample.sampler", "beam", "plan, speculative, burst, adaptive"),
    ("sample.criterion", "mode", "probability, margin, entropy"),
    ("sample.top_p_rule", "strict", "standard, reference"),
    ("sample.orders", (), "at least one"),
    ("orders", "mix(2)", "from 0 to 1"),
    ("orders", "explicit((1, 0))", "of 2 tokens, and the text has 1024"),
    ("orders", "unifrom", "did you mean uniform"),
    ("orders", "schedule(uniform, mix(0.1), linear, 9, 8)", "must end after it"),
    ("data.source", "", "files:GLOB or tfds:NAME"),
])
def test_a_value_out_of_range_is_named_with_what_is_allowed(field, value, fix):
  line, = problems({field: value})
  assert line.startswith(f"config.{field}: ") and re.search(fix, line)


@pytest.mark.parametrize("field, value", [
    ("sharding_rules", ("embed", "fsdp")),
    ("sharding_rules", (("embed", 1),)),
    ("optimizer.weight_decay_rules", (".*", True)),
    ("optimizer.weight_decay_rules", (("(", True),)),
    ("optimizer.weight_decay_rules", ((".*", "no"),)),
])
def test_a_malformed_rule_is_refused(field, value):
  line, = problems({field: value})
  assert line.startswith(f"config.{field}: ")


def test_a_bad_order_among_several_is_named_by_its_place():
  line, = problems({"sample.orders": ("uniform", "block_wise(0)")})
  assert line.startswith("config.sample.orders[1]: ") and "at least 1" in line


def test_so_is_an_order_of_another_length_that_texts_are_to_be_scored_in():
  line, = problems({"eval.distributions": ("explicit((1, 0))",)})
  assert line.startswith("config.eval.distributions[0]: ") and "of 2 tokens, and the text has 1024" in line


@pytest.mark.parametrize("field", ["eval.distributions", "sample.orders"])
def test_what_changes_over_training_is_refused_where_there_is_no_training(field):
  scheduled = "schedule(left_to_right, uniform, step, 5)"
  config_lib.check(changed({"orders": scheduled}))
  line, = problems({field: (scheduled,)})
  assert line.startswith(f"config.{field}[0]: ") and "changes over training" in line


@pytest.mark.parametrize("changes, named", [
    ({"model.gate_init": 1.0, "model.target": "input"}, ("model.gate_init", "1.0", "model.target = input", "set it to 0.0")),
    ({"model.gate_init": 1.0, "model.bias": False}, ("model.gate_init", "1.0", "model.bias", "set it to 0.0")),
    ({"model.heads": 7}, ("model.heads", "7", "model.width", "768")),
    ({"mesh.fsdp": -1}, ("mesh", "data=-1 x fsdp=-1", "more than one axis")),
    ({"mesh.preset": "fsdp", "mesh.tensor": 2}, ("mesh.tensor", "2", "mesh.preset = fsdp")),
    ({"mesh.preset": "dp", "mesh.data": 8}, ("mesh.data", "8", "mesh.preset = dp")),
    ({"mesh.preset": "fsdp_tp", "mesh.tensor": -1}, ("mesh.tensor", "-1", "mesh.preset = fsdp_tp")),
    ({"micro_batches": 3}, ("micro_batches", "3", "batch_size", "1024")),
    ({"micro_batches": 2048}, ("micro_batches", "2048", "batch_size", "1024")),
    ({"optimizer.warmup_steps": 500_000}, ("optimizer.warmup_steps", "500000", "optimizer.decay_steps")),
    ({"optimizer.final_learning_rate": 1e-3},
     ("optimizer.final_learning_rate", "0.001", "optimizer.learning_rate", "0.0006")),
    ({"data.validation_fraction": 0.5, "data.test_fraction": 0.5}, ("data.validation_fraction", "test_fraction")),
    ({"model.vocab_size": 50256}, ("model.vocab_size", "50256", "50257", "data.tokenizer", "50304")),
    ({"model.vocab_size": 256, "data.tokenizer": "bytes"}, ("model.vocab_size", "256", "257", "data.tokenizer", "320")),
    ({"sample.prompt": "a [[2]]", "sample.prompt_file": "b.txt"}, ("sample.prompt", "a [[2]]", "sample.prompt_file", "b.txt")),
    ({"eval.targets": 1025}, ("eval.targets", "1025", "model.block_size", "1024")),
    ({"sample.length": 1025}, ("sample.length", "1025", "model.block_size", "1024")),
    ({"objective": "ao"}, ("objective", "ao", "model.architecture = decoder", "any_order")),
    ({"model.architecture": "encoder"}, ("objective", "any_order", "model.architecture = encoder", "ao or lambda_dce")),
    ({"model.num_tokens": 50257}, ("model.num_tokens", "50257", "model.architecture = decoder", "set it to 0")),
    (ENCODER | {"model.num_tokens": 257}, ("model.num_tokens", "257", "data.tokenizer = gpt2", "50257")),
    (ENCODER | {"data.tokenizer": "mine.tiktoken"}, ("model.num_tokens", "0", "data.tokenizer = mine.tiktoken")),
    (ENCODER | {"model.vocab_size": 50257}, ("model.vocab_size", "50257", "mask", "50304")),
    (ENCODER | {"eval.ensemble": 2}, ("eval.ensemble", "2", "encoder", "set it to 1")),
    ({"sample.window": 8}, ("sample.window", "8", "speculative", "plan", "set it to 4")),
    ({"sample.sampler": "burst"}, ("sample.orders", "burst", "set it to ('uniform',)")),
    ({"sample.sampler": "speculative", "eval.generative.steps": (8,)}, ("eval.generative.steps", "(8,)", "speculative")),
    (ENCODER | {"sample.sampler": "speculative"}, ("sample.sampler", "speculative", "encoder", "plan or adaptive")),
    (ENCODER | {"sample.contexts": 2}, ("sample.contexts", "2", "encoder", "set it to 1")),
    (ENCODER | {"model.activation": "gelu_tanh"}, ("model.activation", "gelu_tanh", "decoder", "set it to gelu")),
    ({"data.prompt_field": "q"}, ("data.prompt_field", "q", "data.source = tfds:huggingface:openwebtext", "files:GLOB")),
    (EXAMPLES | {"objective": "context_average"}, ("objective", "context_average", "data.prompt_field = q", "any_order")),
    (EXAMPLES | {"eval.gap": 8}, ("eval.gap", "8", "data.prompt_field = q", "set it to 0")),
    ({"data.source": "sudoku:5", "eval.ensemble": 2}, ("eval.ensemble", "2", "data.source = sudoku:5", "set it to 1")),
    (EXAMPLES | {"data.completion_field": ""}, ("data.completion_field", "data.prompt_field = q")),
    ({"init_from": "gpt2:gpt2", "init_optimizer": "kept"}, ("init_optimizer", "kept", "init_from = gpt2:gpt2", "reset")),
    (ENCODER | {"objective": "score_entropy"}, ("orders", "mix(0.1)", "score_entropy", "uniform")),
])
def test_fields_that_contradict_are_both_named(changes, named):
  line, = problems(changes)
  assert line.startswith(f"config.{named[0]}: ")
  for part in named[1:]:
    assert part in line


def test_every_objective_and_architecture_that_there_is_can_be_chosen():
  assert sum(config_lib.OBJECTIVES.values(), ()) == tuple(objectives.OBJECTIVES)
  assert tuple(config_lib.OBJECTIVES) == tuple(models.ARCHITECTURES)


def test_every_problem_has_a_line():
  lines = problems({"steps": 0, "model.heads": 7, "eval.split": "valid"})
  assert {line.split(": ")[0] for line in lines} == {"config.steps", "config.model.heads", "config.eval.split"}
  assert len(lines) == 3


def test_a_config_survives_its_way_through_json():
  config = changed({"steps": 7, "sample.orders": ("uniform", "mix(0.5)"), "sharding_rules": ()})
  restored = config_lib.from_dict(json.loads(json.dumps(config.to_dict())))
  assert restored == config
  assert dict(flat(restored)) == dict(flat(config))  # tuples are tuples again
  config_lib.check(restored)


def test_a_run_may_change_its_length_its_machine_and_what_it_reports():
  free = {
      "steps": 7, "data.cache_dir": "/c", "data.tfds_data_dir": "/t", "data.workers": 3, "data.prefetch": 1,
      "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.preset": "", "sharding_rules": (), "eval.orders": 2, "sample.temperature": 0.5,
      "checkpoint.keep": 9, "log.every_steps": 1, "model.remat": "full", "model.scan_layers": False, "model.head_chunk": 64,
  }
  assert config_lib.differences(changed(free), config_lib.default_config()) == []


@pytest.mark.parametrize("field, value", [
    ("seed", 1), ("batch_size", 512), ("orders", "uniform"), ("model.width", 1536), ("model.dtype", "float32"),
    ("optimizer.learning_rate", 1e-3), ("optimizer.weight_decay_rules", ((".*", False),)), ("data.source", "stdlib"),
    ("data.tokenizer", "bytes"),
])
def test_what_would_make_another_run_is_listed_with_both_values(field, value):
  ours, theirs = changed({field: value, "steps": 7}), config_lib.default_config()
  assert config_lib.differences(ours, theirs) == [f"config.{field}: {value!r}, was {dict(flat(theirs))[field]!r}"]


def test_fields_that_only_one_of_two_configs_has_are_differences():
  older = config_lib.default_config()
  del older.model["gate_init"]
  assert config_lib.differences(config_lib.default_config(), older) == ["config.model.gate_init: 0.0, was None"]


def test_a_config_of_an_older_version_gets_the_fields_that_it_lacks():
  older = changed({"steps": 7, "model.width": 96, "sample.orders": ("mix(0.5)",)})
  del older.model["tied_head"], older.model["norm"]
  whole = config_lib.completed(config_lib.from_dict(json.loads(json.dumps(older.to_dict()))))
  assert whole.steps == 7 and whole.model.width == 96 and whole.sample.orders == ("mix(0.5)",)
  assert (whole.model.norm, whole.model.tied_head) == ("rms", False)
  config_lib.check(whole)


@pytest.mark.parametrize("older, remat", [(False, "none"), (True, "full")])
def test_rematerialisation_that_was_on_or_off_has_a_name_now(older, remat):
  fields = config_lib.default_config().to_dict()
  fields["model"]["remat"] = older
  whole = config_lib.completed(config_lib.from_dict(fields))
  assert whole.model.remat == remat
  config_lib.check(whole)


def test_a_field_that_this_version_does_not_know_stays_a_difference():
  newer = changed({"model.depth": 3})
  assert config_lib.differences(config_lib.default_config(), config_lib.completed(newer)) == ["config.model.depth: None, was 3"]


def load(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_passes_the_checks(path):
  config_lib.check(load(path).get_config())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_file_says_how_to_run_it_and_for_how_many_tokens(path):
  module = load(path)
  config = module.get_config()
  text = " ".join(module.__doc__.split())
  assert f"python -m aogpt_jax.main --config=configs/{path.name}" in text
  assert f"{config.steps:,} steps of {config.batch_size * config.model.block_size:,} tokens" in text


RELEASED = dict(decay_steps=500_000, warmup_steps=2000, final_learning_rate=6e-5, weight_decay=0.05, beta1=0.9,
                beta2=0.95, clip_norm=1.0, ema_decay=0.9999)


@pytest.mark.parametrize("name, layers, orders, steps, tokens_per_step, learning_rate", [
    ("small", 12, "mix(0.1)", 250_000, 1_048_576, 6e-4),
    ("medium", 24, "mix(0.1)", 460_000, 1_048_576, 3e-4),
    ("small_sigma_gpt", 12, "uniform", 250_000, 1_048_576, 6e-4),
    ("medium_sigma_gpt", 24, "uniform", 460_000, 1_048_576, 3e-4),
    ("small_any_order", 12, "uniform", 20_000, 524_288, 6e-4),
    ("small_left_to_right", 12, "left_to_right", 20_000, 524_288, 6e-4),
    ("small_block_wise", 12, "block_wise", 20_000, 524_288, 6e-4),
    ("small_fixed_random_1", 12, "fixed_random", 20_000, 524_288, 6e-4),
    ("small_fixed_random_2", 12, "fixed_random", 20_000, 524_288, 6e-4),
    ("small_fixed_random_3", 12, "fixed_random", 20_000, 524_288, 6e-4),
])
def test_the_papers_configs_have_its_recipe(name, layers, orders, steps, tokens_per_step, learning_rate):
  config = load(CONFIGS[0].parent / f"{name}.py").get_config()
  assert config.model.layers == layers
  assert config.orders.split("(")[0] == orders.split("(")[0]
  assert orders.split("(")[1:] in ([], config.orders.split("(")[1:])
  assert config.steps == steps
  assert config.batch_size * config.model.block_size == tokens_per_step
  assert config.optimizer.learning_rate == learning_rate
  assert {field: config.optimizer[field] for field in RELEASED} == RELEASED


@pytest.mark.parametrize("size", ["small", "medium"])
def test_sigma_gpt_differs_from_ao_gpt_of_its_size_as_the_golden_model_does_and_in_its_orders(size):
  ours, aogpt = (dict(flat(load(CONFIGS[0].parent / f"{name}.py").get_config())) for name in (f"{size}_sigma_gpt", size))
  golden = dict(flat(golden_weights.load(golden_weights.SIGMA_GPT)[1]))
  kind = {f"model.{field}": golden[f"model.{field}"] for field in ("target", "norm", "qk_norm", "tied_head", "bias", "weight_init")}
  assert ours == aogpt | kind | {"orders": "uniform"}


@pytest.mark.parametrize("name, objective", [
    ("small_radd", "ao"), ("small_mdlm", "lambda_dce"), ("small_sedd", "score_entropy")])
def test_the_encoders_differ_from_small_in_what_makes_them_encoders_alone(name, objective):
  ours, small = (load(CONFIGS[0].parent / f"{file}.py").get_config() for file in (name, "small"))
  assert config_lib.differences(ours, small) == [
      "config.model.architecture: 'encoder', was 'decoder'", f"config.objective: {objective!r}, was 'any_order'",
      "config.orders: 'uniform', was 'mix(0.1)'"]


def test_the_three_fixed_random_orders_differ():
  orders = {load(path).get_config().orders for path in CONFIGS if "fixed_random" in path.stem}
  assert len(orders) == 3
