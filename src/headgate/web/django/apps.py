"""`"headgate.web.django"` in INSTALLED_APPS brings the system checks."""

from django.apps import AppConfig
from django.core import checks

from .checks import check_deployment, check_settings


class HeadgateConfig(AppConfig):  # type: ignore[misc]
    """The application as Django lists it."""

    name = "headgate.web.django"
    label = "headgate"
    verbose_name = "headgate"

    def ready(self) -> None:
        checks.register(check_settings)
        checks.register(check_deployment, checks.Tags.security, deploy=True)
