"""The AppConfig: `"limitkeeper.web.django"` in INSTALLED_APPS registers the system checks."""

from django.apps import AppConfig
from django.core import checks

from .checks import check_deployment, check_settings


class LimitkeeperConfig(AppConfig):  # type: ignore[misc]
    """The Django application."""

    name = "limitkeeper.web.django"
    label = "limitkeeper"
    verbose_name = "limitkeeper"

    def ready(self) -> None:
        checks.register(check_settings)
        checks.register(check_deployment, checks.Tags.security, deploy=True)
