"""The release plan and what every component needs for it: basic samplers and sums, Gaussian and Gumbel noise.

Must not import `privacy.extensions`, a model or a ledger.
"""
