//! Small programs that a newcomer reads first: `mlp`, the tensor-parallel MLP; `gpt`, a small GPT on a real text.
