"""Dramatiq on a folder, a server or a store: `dramatiq.set_broker(HoldfastBroker("/var/lib/app/jobs"))`.

Results are kept by `Results(backend=HoldfastResults("/var/lib/app/jobs"))`, and rate limits, barriers and the callbacks
of groups by `GroupCallbacks(HoldfastRateLimits("/var/lib/app/jobs"))`.
"""

from typing import TYPE_CHECKING

from holdfast.later import names

if TYPE_CHECKING:
    from holdfast.integrations.dramatiq.broker import HoldfastBroker
    from holdfast.integrations.dramatiq.rate_limits import HoldfastRateLimits
    from holdfast.integrations.dramatiq.results import HoldfastResults

__all__ = ["HoldfastBroker", "HoldfastRateLimits", "HoldfastResults"]

__getattr__ = names(
    "holdfast.integrations.dramatiq",
    {
        "HoldfastBroker": "holdfast.integrations.dramatiq.broker",
        "HoldfastRateLimits": "holdfast.integrations.dramatiq.rate_limits",
        "HoldfastResults": "holdfast.integrations.dramatiq.results",
    },
)
