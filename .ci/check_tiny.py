"""Checks what configs/tiny.py promises of the run in a workdir: files, and losses against the text's own entropies."""

import json
import pathlib
import sys

workdir = pathlib.Path(sys.argv[1])
result = json.loads((workdir / "eval_validation.json").read_text())
unigram, bigram = result["entropies"]["unigram"], result["entropies"]["bigram"]
left_to_right, any_order = (result[name]["nats_per_token"] for name in ("left_to_right", "any_order"))
checks = {
    "a checkpoint": any((workdir / "checkpoints").glob("[0-9]*/ema")),
    "a metrics file": (workdir / "metrics.jsonl").stat().st_size > 0,
    "a loss curve": (workdir / "loss.png").read_bytes()[:4] == b"\x89PNG",
    "sampled text": len((workdir / "samples.txt").read_text().split()) > 0,
    f"left to right {left_to_right:.3f} below the bigram entropy {bigram:.3f}": left_to_right < bigram,
    f"any order {any_order:.3f} at least 0.4 below the unigram entropy {unigram:.3f}": any_order <= unigram - 0.4,
}
for name, ok in checks.items():
  print(f"{'ok' if ok else 'NOT OK'}: {name}")
sys.exit(not all(checks.values()))
