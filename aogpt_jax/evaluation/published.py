"""Numbers of the paper (Xue et al., arXiv 2506.19935), to be put beside ours."""

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
