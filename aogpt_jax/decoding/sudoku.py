"""Held-out Sudokus in random order, from left to right, and in orders that adapt: how many are solved.

The clues are given, and come first; a puzzle is solved where all other digits are right. It has one solution, so that a model
that knew it would solve it in any order: what is compared is what an order does to a model that has only begun to learn.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from aogpt_jax import orders
from aogpt_jax import samplers
from aogpt_jax.data import loader
from aogpt_jax.run import Run
from aogpt_jax.sampling import prompts as prompts_lib
from aogpt_jax.sampling import texts as texts_lib

# 1 is the model's own distribution; 0 takes the most probable digit.
TEMPERATURES = (1.0, 0.0)


def methods() -> Iterator[tuple[str, dict[str, Any]]]:
  """(name, arguments of `texts.generate`) of the orders that are compared; all draw one digit a step."""
  yield "random", dict(order="uniform")
  yield "left to right", dict(order="left_to_right")
  for criterion in samplers.CRITERIA:
    yield criterion, dict(order="uniform", sampler="adaptive", criterion=criterion)


def puzzles(run: Run, count: int) -> tuple[list[prompts_lib.Prompt], np.ndarray]:
  """Validation puzzles, and the tokens of their solutions, int [N, T]."""
  rows = loader.Rows(run.packed, "validation")
  read = rows.read(loader.evenly_spread(len(rows), count))
  return [prompts_lib.Prompt(tokens, parts == orders.GIVEN) for tokens, parts in read], read[:, 0]


def solved(
    run: Run, params: Any, prompts: list[prompts_lib.Prompt], solutions: np.ndarray, settings: dict[str, Any]
) -> dict[str, float]:
  """The share of the puzzles that are solved, and of their open cells that are right."""
  texts = texts_lib.generate(run.model, params, run.tokenizer, prompts, batch_size=len(prompts), mesh=run.mesh, **settings)
  right, given = np.array([text.ids for text in texts]) == solutions, np.stack([prompt.known for prompt in prompts])
  return {"solved": round(float(right.all(axis=1).mean()), 5), "cells": round(float(right[~given].mean()), 5)}
