"""Traces of steps, and programs that are kept for the next start."""

import pytest

from aogpt_jax import config as config_lib


def test_the_steps_asked_for_are_traced_and_compiled_programs_are_kept(command, tmp_path):
  process = command("--mode=train", "--workdir=run", "steps=3", "log.profile=(2, 3)", "compilation_cache=programs", "eval.sequences=2",
                    environment={"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"})
  assert process.returncode == 0, process.stderr
  assert "steps up to 3 are traced in " in process.stdout
  [trace] = (tmp_path / "run" / "profile").rglob("*.xplane.pb")
  assert b"jit_step" in trace.read_bytes()
  assert list((tmp_path / "programs").glob("jit_step-*-cache"))


@pytest.mark.parametrize("steps", [(3,), (0, 2), (5, 4), ("a", "b")])
def test_steps_of_a_trace_that_can_not_be_are_a_mistake_in_the_config(steps):
  config = config_lib.default_config()
  config.log.profile = steps
  with pytest.raises(config_lib.ConfigError, match=r"config\.log\.profile: is .* it must be \(\) or the first and the last step"):
    config_lib.check(config)
