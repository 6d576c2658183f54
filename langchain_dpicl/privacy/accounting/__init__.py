"""What releases were, as events, and what they cost.

Must not import `privacy.extensions`, noise or a ledger; prices of extensions are loaded where an event names one.
"""

from typing import TYPE_CHECKING

from langchain_dpicl._lazy import on_first_use
from langchain_dpicl.privacy.accounting.epsilon import (
    EpsilonBound,
    Opinion,
    epsilon_bound,
    epsilon_upper_bound,
)

if TYPE_CHECKING:  # searches over prices, which no price depends on
    from langchain_dpicl.privacy.accounting.calibration import (
        calibrate,
        delta_upper_bound,
        gdp_epsilon,
        gdp_mu,
        zcdp_epsilon,
        zcdp_rho,
    )

_CALIBRATION = "langchain_dpicl.privacy.accounting.calibration"
_NAMES = ("calibrate", "delta_upper_bound", "gdp_epsilon", "gdp_mu", "zcdp_epsilon", "zcdp_rho")
_HOME = dict.fromkeys(_NAMES, _CALIBRATION)

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

if not TYPE_CHECKING:
    __getattr__, __dir__ = on_first_use(__name__, _HOME)
