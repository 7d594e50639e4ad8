"""Orders, which choose the samples of each step, and the facts about samples that they use."""
