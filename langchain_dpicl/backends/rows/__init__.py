"""One row for each prompt: label scores, answers, neighbours, full vocabularies, gradients. Knows no noise."""
