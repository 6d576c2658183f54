"""What releases were, as events, and what they cost.

Must not import `privacy.extensions`, noise or a ledger; prices of extensions are loaded where an event names one.
"""

from langchain_dpicl.privacy.accounting.calibration import calibrate, gdp_epsilon, gdp_mu, zcdp_epsilon, zcdp_rho
from langchain_dpicl.privacy.accounting.epsilon import (
    EpsilonBound,
    Opinion,
    delta_upper_bound,
    epsilon_bound,
    epsilon_upper_bound,
)

__all__ = [
    "EpsilonBound",
    "Opinion",
    "calibrate",
    "delta_upper_bound",
    "epsilon_bound",
    "epsilon_upper_bound",
    "gdp_epsilon",
    "gdp_mu",
    "zcdp_epsilon",
    "zcdp_rho",
]
