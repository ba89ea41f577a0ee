"""GPT-2, of any size, with weights as Hugging Face keeps them: the judge of generated texts, and a row beside our own models.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019).
"""

import functools
import hashlib
import pathlib
import re
from typing import Any

from flax import linen as nn
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from aogpt_jax import attention
from aogpt_jax import hugging_face
from aogpt_jax import records

# What config.json may say where it says anything; all else that it could say would be another network.
_FIXED = {
    "model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False, "tie_word_embeddings": True}
# Our name of a parameter -> theirs; those of blocks are for each layer, and stacked here.
_NAMES = {
    "tokens/embedding": "wte.weight", "positions/embedding": "wpe.weight", "norm/scale": "ln_f.weight", "norm/bias": "ln_f.bias",
    **{f"blocks/{ours}/{leaf}": f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"
       for ours, theirs, leaves in (
           ("norm1", "ln_1", ("scale", "bias")), ("qkv", "attn.c_attn", ("kernel", "bias")),
           ("attention_out", "attn.c_proj", ("kernel", "bias")), ("norm2", "ln_2", ("scale", "bias")),
           ("fc", "mlp.c_fc", ("kernel", "bias")), ("mlp_out", "mlp.c_proj", ("kernel", "bias")))
       for leaf in leaves}}
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # causal masks
_HEAD = "lm_head.weight"  # the token table again


class Block(nn.Module):
  """Pre-LayerNorm transformer block with biases; the entries stay float32 between the matmuls."""

  heads: int
  eps: float
  dtype: Any

  @nn.compact
  def __call__(self, x_BND: jax.Array, _) -> tuple[jax.Array, None]:
    width = x_BND.shape[-1]
    dense = functools.partial(nn.Dense, dtype=self.dtype)
    norm = functools.partial(nn.LayerNorm, epsilon=self.eps, use_fast_variance=False)
    qkv = dense(3 * width, name="qkv")(norm(name="norm1")(x_BND))
    q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in jnp.split(qkv, 3, axis=-1))
    h_BNHK = attention.attend_whole(q, k, v, causal=True, backend=attention.Backend())
    x_BND = x_BND + dense(width, name="attention_out")(h_BNHK.reshape(x_BND.shape))
    h = jax.nn.gelu(dense(4 * width, name="fc")(norm(name="norm2")(x_BND)), approximate=True)
    return x_BND + dense(width, name="mlp_out")(h), None


class GPT2(nn.Module):
  """A causal language model; small is 12 layers x 768, large 36 x 1280.

  Attributes:
    layers: L.
    width: D.
    heads: H.
    block_size: T, the longest text that it takes, in tokens.
    vocab_size: V.
    eps: of the norms.
    dtype: of the matmuls.
  """

  layers: int
  width: int
  heads: int
  block_size: int
  vocab_size: int
  eps: float = 1e-5
  dtype: Any = jnp.float32

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """float32 logits [B, N, V] for tokens int [B, N], N <= T: `logits[b, i]` predicts the token after `tokens[b, : i + 1]`.

    Raises:
      ValueError: more tokens than the block size.
    """
    x_BND = self.features(tokens)
    table = self.variables["params"]["tokens"]["embedding"]
    return jnp.einsum("BND,VD->BNV", x_BND, table.astype(self.dtype), preferred_element_type=jnp.float32)

  @nn.compact
  def features(self, tokens: jax.Array) -> jax.Array:
    """What the head is given of every entry, [B, N, D] in `dtype`; the head is the token table, without a bias."""
    length = tokens.shape[1]
    if length > self.block_size:
      raise ValueError(f"{length} tokens do not fit the model's block_size = {self.block_size}.")
    x_BND = nn.Embed(self.vocab_size, self.width, name="tokens")(tokens)
    x_BND += nn.Embed(self.block_size, self.width, name="positions")(jnp.arange(length))
    blocks = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
    x_BND, _ = blocks(self.heads, self.eps, self.dtype, name="blocks")(x_BND, None)
    return nn.LayerNorm(epsilon=self.eps, use_fast_variance=False, name="norm")(x_BND).astype(self.dtype)


def load(name: str, dtype: Any = jnp.float32) -> tuple[GPT2, Any]:
  """A GPT-2 with weights in Hugging Face's format.

  Args:
    name: a directory with config.json and *.safetensors, or a name on the Hugging Face hub: gpt2, gpt2-medium, gpt2-large,
      gpt2-xl or ORGANISATION/NAME, which is downloaded once and then found in the hub's cache.
    dtype: of the matmuls.

  Returns:
    The Linen module and its parameters, float32 numpy arrays on the host.

  Raises:
    ImportError: safetensors or, for a name, huggingface_hub is not installed.
    OSError: there is no such directory or name, or no network.
    ValueError: the files are of another network, or parameters are missing, unexpected or of the wrong shape.
  """
  hugging_face.require_safetensors(name)
  model, directory = describe(name, dtype)
  tensors = {}
  files = sorted(directory.glob("*.safetensors"))
  if not files:
    raise FileNotFoundError(f"{directory}: has no *.safetensors; save the model with safe_serialization=True.")
  for file in files:
    for key, x in hugging_face.tensors(file):
      short = key.removeprefix("transformer.")
      if short in tensors:
        raise ValueError(f"{file}: has {records.shown(key)}, which another file of the directory has too; keep the files of one model.")
      if not _BUFFER.fullmatch(short):
        tensors[short] = x.astype(np.float32)
  return model, _params(model, tensors, directory)


def describe(name: str, dtype: Any = jnp.float32) -> tuple[GPT2, pathlib.Path]:
  """The Linen module of a GPT-2 and the directory of its files; arguments and errors as those of `load`, but reads no weights."""
  directory = pathlib.Path(name).expanduser()
  if not directory.is_dir():
    directory = _download(name)
  return _model(directory / "config.json", dtype), directory


def fingerprint(model: GPT2, params: Any) -> str:
  """sha256 hex digest of all that the function that a model computes depends on, but for rounding."""
  digest = hashlib.sha256(repr((model.layers, model.width, model.heads, model.block_size, model.vocab_size, model.eps)).encode())
  for name, x in sorted(traverse_util.flatten_dict(params, sep="/").items()):
    digest.update(name.encode())
    digest.update(np.ascontiguousarray(x))
  return digest.hexdigest()


def _download(name: str) -> pathlib.Path:
  if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "/")):
    raise FileNotFoundError(f"{name}: there is no such directory; give one with config.json and *.safetensors, or a name on the "
                            "Hugging Face hub such as gpt2-large.")
  advice = "download it where there is a network, and give the directory with its config.json and *.safetensors"
  return hugging_face.download(f"{name}: is no directory, and", advice, lambda hub: hub.snapshot_download(
      name, allow_patterns=["config.json", "*.safetensors"]))


def _model(path: pathlib.Path, dtype: Any) -> GPT2:
  """The module that a config.json describes."""
  try:
    config = records.read(path)
  except OSError as e:
    raise FileNotFoundError(f"{path}: can't be read ({e.strerror}); it belongs beside the *.safetensors.") from None
  except ValueError as e:
    raise ValueError(f"{e}; download or save it again.") from None
  if not isinstance(config, dict):
    raise ValueError(f"{path}: holds a {type(config).__name__}, not the fields of a GPT-2; download or save it again.")
  for field, value in _FIXED.items():
    if config.get(field, value) != value:
      raise ValueError(f"{path}: {field} is {config[field]!r}; this GPT-2 has {value!r} alone.")
  names = {"layers": "n_layer", "width": "n_embd", "heads": "n_head", "block_size": "n_positions", "vocab_size": "vocab_size"}
  for field in names.values():
    if type(config.get(field)) is not int or not 1 <= config[field] < 2**24:
      raise ValueError(f"{path}: {field} is {config.get(field)!r}; it must be a number from 1 to {2**24 - 1:,}.")
  fields = {ours: config[theirs] for ours, theirs in names.items()}
  if fields["width"] % fields["heads"]:
    raise ValueError(f"{path}: n_head = {fields['heads']} does not divide n_embd = {fields['width']}.")
  if config.get("n_inner") not in (None, 4 * fields["width"]):
    raise ValueError(f"{path}: n_inner is {config['n_inner']}; this GPT-2 has 4 * n_embd = {4 * fields['width']} alone.")
  eps = config.get("layer_norm_epsilon", 1e-5)
  if type(eps) is not float or not 0 < eps < 1:
    raise ValueError(f"{path}: layer_norm_epsilon is {eps!r}; it must be a number between 0 and 1.")
  return GPT2(**fields, eps=eps, dtype=jnp.dtype(dtype))


def _params(model: GPT2, tensors: dict[str, np.ndarray], directory: pathlib.Path) -> Any:
  """Their tensors as our parameters, each used once."""
  head = tensors.pop(_HEAD, None)
  if head is not None and not np.array_equal(head, tensors.get("wte.weight")):
    raise ValueError(f"{directory}: {_HEAD} is not the token table wte.weight; this GPT-2 has a tied head alone.")
  if model.layers > len(tensors):  # more than can be looked for one by one
    raise ValueError(f"{directory}: has {len(tensors)} tensors, and n_layer of config.json is {model.layers}; give the weights of "
                     "one GPT-2 with its own config.json.")
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
  problems, flat = [], {}
  for ours, x in traverse_util.flatten_dict(shapes, sep="/").items():
    theirs, stacked = _NAMES[ours], ours.startswith("blocks/")
    parts = []
    for key in [f"h.{layer}.{theirs}" for layer in range(model.layers)] if stacked else [theirs]:
      part, shape = tensors.pop(key, None), x.shape[stacked:]
      if part is None:
        problems.append(f"{key} is missing")
      elif part.shape != shape:
        problems.append(f"{key} is of shape {part.shape} where config.json wants {shape}")
      parts.append(part)
    if not problems:
      flat[ours] = np.stack(parts) if stacked else parts[0]
  problems += [f"{records.shown(key)} is unexpected" for key in tensors]
  if problems:
    more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
    raise ValueError(f"{directory}: its tensors are not those of a GPT-2 of config.json: {', '.join(problems[:4])}{more}; give "
                     "the weights of one GPT-2 with its own config.json.")
  return traverse_util.unflatten_dict(flat, sep="/")
