"""Dramatiq on a folder, a server or a store: `dramatiq.set_broker(HoldfastBroker("/var/lib/app/jobs"))`.

Results are kept by `Results(backend=HoldfastResults("/var/lib/app/jobs"))`.
"""

from typing import TYPE_CHECKING

from holdfast.later import names

if TYPE_CHECKING:
    from holdfast.integrations.dramatiq.broker import HoldfastBroker
    from holdfast.integrations.dramatiq.results import HoldfastResults

__all__ = ["HoldfastBroker", "HoldfastResults"]

__getattr__ = names(
    "holdfast.integrations.dramatiq",
    {
        "HoldfastBroker": "holdfast.integrations.dramatiq.broker",
        "HoldfastResults": "holdfast.integrations.dramatiq.results",
    },
)
