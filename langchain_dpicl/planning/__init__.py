"""Expected utility and cost of a plan, from public numbers only."""
