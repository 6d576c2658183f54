"""The public plans of shares, their price, cost and expected utility, and the search for designs."""
