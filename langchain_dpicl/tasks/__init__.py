"""What a prompt of a task looks like: templates, labels and their spellings. Knows no budget."""
