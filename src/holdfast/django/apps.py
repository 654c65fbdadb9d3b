"""Where Django looks for the app."""

from holdfast.integrations.django.apps import HoldfastConfig

__all__ = ["HoldfastConfig"]
