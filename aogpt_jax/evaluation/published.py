"""Numbers of the paper (Xue et al., arXiv 2506.19935), to be put beside ours."""

# Zero-shot perplexity by order, model and size (table 1).
# GPT-2 BPE, blocks of 1,024 tokens. The AO-GPT models were trained with 10% left-to-right data, the encoders were not.
ZERO_SHOT_DATASETS = ("lambada", "wikitext2", "ptb", "wikitext103", "lm1b")
ZERO_SHOT: dict[tuple[str, str, str], tuple[float, ...]] = {
    ("left_to_right", "SEDD", "medium"): (39.19, 30.29, 88.18, 30.05, 53.54),
    ("left_to_right", "RADD", "medium"): (38.60, 29.71, 76.00, 29.96, 52.36),
    ("left_to_right", "GPT-2", "medium"): (35.66, 31.80, 123.14, 31.39, 55.72),
    ("left_to_right", "sigma-GPT", "medium"): (61.05, 44.80, 121.48, 43.68, 76.74),
    ("left_to_right", "AO-GPT", "medium"): (42.44, 31.52, 87.56, 30.86, 50.23),
    ("left_to_right", "SEDD", "small"): (49.41, 41.19, 118.74, 41.70, 72.60),
    ("left_to_right", "RADD", "small"): (49.09, 38.26, 107.78, 38.41, 63.33),
    ("left_to_right", "GPT-2", "small"): (45.04, 42.43, 138.43, 41.60, 75.20),
    ("left_to_right", "sigma-GPT", "small"): (68.61, 57.66, 146.87, 55.54, 90.98),
    ("left_to_right", "AO-GPT", "small"): (52.46, 42.10, 135.96, 40.97, 71.73),
    ("any_order", "SEDD", "medium"): (42.77, 31.04, 87.12, 29.98, 61.19),
    ("any_order", "RADD", "medium"): (41.96, 29.96, 79.06, 28.51, 57.07),
    ("any_order", "sigma-GPT", "medium"): (57.27, 43.28, 126.11, 41.80, 74.81),
    ("any_order", "AO-GPT", "medium"): (49.79, 33.73, 101.01, 32.38, 65.90),
    ("any_order", "AO-GPT, M=8", "medium"): (45.08, 30.63, 87.74, 29.46, 59.11),
    ("any_order", "AO-GPT, M=64", "medium"): (44.31, 30.16, 85.75, 28.98, 58.18),
    ("any_order", "SEDD", "small"): (50.92, 41.84, 114.24, 40.62, 79.29),
    ("any_order", "RADD", "small"): (50.27, 38.26, 110.38, 35.90, 74.28),
    ("any_order", "sigma-GPT", "small"): (65.83, 53.08, 138.61, 50.75, 87.71),
    ("any_order", "AO-GPT", "small"): (59.93, 46.33, 141.92, 45.44, 84.36),
    ("any_order", "AO-GPT, M=8", "small"): (55.62, 42.77, 126.08, 42.02, 77.62),
    ("any_order", "AO-GPT, M=64", "small"): (54.92, 42.24, 123.49, 41.51, 76.73),
}

# Generative perplexity under GPT-2 large of texts of 1024 tokens from medium models: (top_p, temperature) -> model -> steps S ->
# perplexity.
GENERATIVE_PERPLEXITY = {
    (1.0, 1.0): {
        "AO-GPT": {64: 194.588, 128: 154.837, 256: 148.006, 512: 140.369, 1024: 136.406},
        "SEDD": {64: 121.574, 128: 100.014, 256: 86.428, 512: 87.666, 1024: 81.689},
    },
    (0.95, 0.9): {
        "AO-GPT": {64: 33.528, 128: 29.359, 256: 27.378, 512: 27.020, 1024: 26.952},
        "SEDD": {64: 25.414, 128: 22.034, 256: 19.481, 512: 19.022, 1024: 19.311},
    },
    (0.95, 0.7): {
        "AO-GPT": {64: 6.105, 128: 5.615, 256: 5.507, 512: 5.095, 1024: 4.611},
        "SEDD": {64: 6.400, 128: 6.042, 256: 5.201, 512: 4.979, 1024: 5.051},
    },
}
